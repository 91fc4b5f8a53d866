package attach

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"k8s.io/apimachinery/pkg/types"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// more is what an endpoint says beside its names and addresses. A record keeps it,
// so that an endpoint that the datastore does not know yet is the same after a
// restart.
type more struct {
	UID            types.UID                    `json:"uid,omitempty"`
	Labels         map[string]string            `json:"labels,omitempty"`
	Profiles       []string                     `json:"profiles,omitempty"` // empty: the network's
	ServiceAccount string                       `json:"serviceAccount,omitempty"`
	Ports          []store.WorkloadEndpointPort `json:"ports,omitempty"`
	Sources        []string                     `json:"sources,omitempty"`  // further addresses that it may send from
	Floating       []netip.Addr                 `json:"floating,omitempty"` // translated to the workload's own
	QoSControls    json.RawMessage              `json:"qosControls,omitempty"`
}

// fill writes into an endpoint what is said of it.
func (m *more) fill(w *store.WorkloadEndpoint, addrs []netip.Addr) {
	if m == nil {
		return
	}
	w.UID, w.Labels = m.UID, maps.Clone(m.Labels)
	w.Spec.ServiceAccountName, w.Spec.Ports, w.Spec.AllowSpoofedSourcePrefixes = m.ServiceAccount, m.Ports, m.Sources
	w.Spec.QoSControls = m.QoSControls
	if len(m.Profiles) > 0 {
		w.Spec.Profiles = m.Profiles
	}
	for _, f := range m.Floating {
		for _, a := range addrs {
			if dataplane.FamilyOf(a) == dataplane.FamilyOf(f) {
				w.Spec.IPNATs = append(w.Spec.IPNATs, store.IPNAT{InternalIP: a.String(), ExternalIP: f.String()})
				break
			}
		}
	}
}

// PodAPI is what Kubernetes' API says of a pod, as its endpoint.
type PodAPI interface {
	Get(ctx context.Context, key store.Key) (store.Object, error)
}

// pods is what the API of Kubernetes says of this host's pods, where the host knows it:
// the copy of its watch, or, of a pod that it has not shown yet, the answer to a
// question.
type pods struct {
	api      PodAPI // nil: there is none
	node     string
	store    *datastore
	patience time.Duration // see apiPatience
	log      *slog.Logger

	mu         sync.Mutex
	known      map[store.Key]*store.WorkloadEndpoint
	unreadable map[store.Key]error
	gone       map[types.UID]time.Time // when the watch showed the end of a pod: see over
	namespaces map[string]*v3.Profile  // by name, their profiles
}

// apiPatience is for how long an API that does not answer is asked for a pod that the watch has
// not reported yet: a runtime may know a pod by a connection that ended a moment later than the
// daemon's, and a server that is replaced is there again by then. A runtime would try again too,
// but later and later.
const apiPatience = 30 * time.Second

func newPods(api PodAPI, node string, db *datastore, log *slog.Logger) *pods {
	return &pods{
		api: api, node: node, store: db, patience: apiPatience, log: log,
		known: make(map[store.Key]*store.WorkloadEndpoint), unreadable: make(map[store.Key]error), gone: make(map[types.UID]time.Time), namespaces: make(map[string]*v3.Profile),
	}
}

// handle takes account of this host's pods, and of the namespaces, in a step of the
// cluster's copy. What this host announced itself is not what the API says.
func (p *pods) handle(s cluster.Step) {
	if p.api == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, ev := range s.Changes {
		if ev.Own {
			if p.relabel(ev); ev.Hidden != nil {
				p.tell(ev.Key, ev.Hidden)
			}
			continue
		}
		switch v := ev.Value.(type) {
		case *store.WorkloadEndpoint:
			p.tell(ev.Key, v)
		case *v3.Profile:
			if name, ok := strings.CutPrefix(v.Name, store.PrefixNamespace); ok {
				p.namespaces[name] = v
			}
		case nil:
			switch {
			case ev.Key.Kind == store.KindProfile && ev.Err == nil:
				delete(p.namespaces, strings.TrimPrefix(ev.Key.Name, store.PrefixNamespace))
			case ev.Key.Kind == store.KindWorkloadEndpoint && ev.Err != nil:
				p.unreadable[ev.Key] = ev.Err
			case ev.Key.Kind == store.KindWorkloadEndpoint:
				if was := p.known[ev.Key]; was != nil {
					p.ended(was)
				}
				delete(p.known, ev.Key)
				delete(p.unreadable, ev.Key)
			}
		}
	}
}

// tell takes account of what the API says of a pod. The caller has the lock.
func (p *pods) tell(key store.Key, w *store.WorkloadEndpoint) {
	delete(p.unreadable, key)
	if w.Spec.Node != p.node {
		return
	}
	was := p.known[key]
	p.limited(was, w)
	if was != nil && was.UID != w.UID {
		p.ended(was)
	}
	p.known[key] = w
}

// goneKept is for how long the end of a pod is remembered: longer than what its host has
// to do about it is put off.
const goneKept = time.Minute

// ended notes that a pod that the watch has shown has gone. The caller has the lock.
func (p *pods) ended(w *store.WorkloadEndpoint) {
	now := time.Now()
	maps.DeleteFunc(p.gone, func(_ types.UID, at time.Time) bool { return now.Sub(at) > goneKept })
	p.gone[w.UID] = now
}

// over reports whether those who read pods know already that an attachment's container has
// no address any more: its pod has gone, or has finished, which it never ceases to have. What
// the watch has not shown counts as neither.
func (p *pods) over(r record) bool {
	if p.api == nil || r.More == nil || r.More.UID == "" {
		return false
	}
	key, err := podKey(p.node, r.workload())
	if err != nil {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, gone := p.gone[r.More.UID]; gone {
		return true
	}
	w := p.known[key]
	return w != nil && w.UID == r.More.UID && w.Spec.ContainerID == r.ContainerID && len(w.Spec.IPNetworks) == 0
}

// relabel takes from what hides the watch's word of a pod the labels that the watch
// said. The caller has the lock.
func (p *pods) relabel(ev *cluster.Change) {
	v, ok := ev.Value.(*store.WorkloadEndpoint)
	known := p.known[ev.Key]
	if !ok || known == nil || v.UID == "" || v.UID != known.UID || maps.Equal(v.Labels, known.Labels) {
		return
	}
	next := *known
	next.Labels = v.Labels
	p.known[ev.Key] = &next
}

// limited says of a pod's limits that they make no sense, or what of them is not carried
// out, once for each change of them.
func (p *pods) limited(was, now *store.WorkloadEndpoint) {
	says := func(w *store.WorkloadEndpoint) string {
		if _, err := store.QoSOf(w.Annotations); err != nil {
			return "a pod's limits are invalid and are not applied; a new pod with them is refused: " + err.Error()
		}
		return ""
	}
	text := says(now)
	if text != "" && (was == nil || was.UID != now.UID || says(was) != text) {
		p.log.Warn("limits of a pod", "pod", now.Namespace+"/"+now.Spec.Pod, "error", text)
	}
}

// complete adds to a request what the API says of its pod, and returns what its
// endpoint is to say.
func (p *pods) complete(ctx context.Context, req AddRequest) (AddRequest, *more, error) {
	if p.api == nil || req.Workload.Orchestrator != Kubernetes {
		if len(req.Sources) == 0 && len(req.Floating) == 0 {
			return req, nil, nil
		}
		return req, &more{Sources: req.Sources, Floating: req.Floating}, nil
	}
	w, err := p.pod(ctx, req)
	if err == nil {
		err = p.ask(&req, w)
	}
	if err != nil {
		return req, nil, fmt.Errorf("pod %s/%s: %w", req.Workload.Namespace, req.Workload.Pod, err)
	}
	return req, &more{
		UID: w.UID, Labels: w.Labels, Profiles: w.Spec.Profiles, ServiceAccount: w.Spec.ServiceAccountName, Ports: w.Spec.Ports,
		Sources: w.Spec.AllowSpoofedSourcePrefixes, Floating: req.Floating, QoSControls: w.Spec.QoSControls,
	}, nil
}

// pod returns what the API says of a request's pod. One that the watch has not
// shown yet, or only as it was before it was made anew, is asked for, again and again for
// [apiPatience] where there is no answer.
func (p *pods) pod(ctx context.Context, req AddRequest) (*store.WorkloadEndpoint, error) {
	key, err := podKey(p.node, req.Workload)
	if err != nil {
		return nil, err
	}
	ctx, cancel := bounded(ctx, p.patience)
	defer cancel()
	pause := async.Backoff{Min: 100 * time.Millisecond, Max: time.Second}
	for {
		w, err := p.once(ctx, key, req)
		if !errors.Is(err, store.ErrUnavailable) || pause.Wait(ctx) != nil {
			return w, err
		}
	}
}

// once looks for a request's pod in what the watch reported, and else asks for it.
func (p *pods) once(ctx context.Context, key store.Key, req AddRequest) (*store.WorkloadEndpoint, error) {
	p.mu.Lock()
	w, unreadable := p.known[key], p.unreadable[key]
	p.mu.Unlock()
	if w != nil && unreadable == nil && isPod(w, req.PodUID) {
		return w, nil
	}
	ctx, cancel := p.store.context(ctx)
	defer cancel()
	o, err := p.api.Get(ctx, key)
	if errors.Is(err, store.ErrUnavailable) {
		if last, ok := p.last(ctx, key, req.PodUID); ok {
			return last, nil
		}
	}
	switch {
	case errors.Is(err, store.ErrNotFound):
		return nil, fmt.Errorf("the API has none of this name on %s; it may have been deleted: %w", p.node, ErrNotReady)
	case errors.Is(err, store.ErrDecode):
		return nil, fmt.Errorf("%w: %w", err, ErrInvalid)
	case err != nil:
		return nil, storeError("ask the API for the pod, which is not yet in the watch", err)
	}
	w, ok := o.Value.(*store.WorkloadEndpoint)
	if !ok || !isPod(w, req.PodUID) {
		return nil, fmt.Errorf("the API has one with another uid than the runtime's %s: it was recreated: %w", req.PodUID, ErrNotReady)
	}
	return w, nil
}

// last returns the endpoint that the datastore has of a pod which ran here before, such as a
// static one that is made anew while the API is away: with its labels and profiles.
func (p *pods) last(ctx context.Context, key store.Key, uid string) (*store.WorkloadEndpoint, bool) {
	if p.api == PodAPI(p.store) || uid == "" {
		return nil, false
	}
	o, err := p.store.Get(ctx, key)
	w, ok := o.Value.(*store.WorkloadEndpoint)
	return w, err == nil && ok && isPod(w, uid)
}

// podKey is the key of a pod's endpoint.
func podKey(node string, w Workload) (store.Key, error) {
	name, err := store.WorkloadEndpointName(&store.WorkloadEndpointSpec{Node: node, Orchestrator: Kubernetes, Pod: w.Pod, Endpoint: podInterface})
	if err != nil {
		return store.Key{}, fmt.Errorf("name of its endpoint: %w: %w", ErrInvalid, err)
	}
	return store.Key{Kind: store.KindWorkloadEndpoint, Namespace: w.Namespace, Name: name}, nil
}

// podInterface is the only interface of a pod that Calico's model knows.
const podInterface = "eth0"

// isPod reports whether an endpoint is that of the pod with a uid. Older runtimes
// do not say which.
func isPod(w *store.WorkloadEndpoint, uid string) bool {
	return uid == "" || string(w.UID) == uid || w.Annotations[store.AnnotationConfigHash] == uid
}

// ask adds to a request what a pod's annotations and its namespace's ask for; the
// pod's count more.
func (p *pods) ask(req *AddRequest, w *store.WorkloadEndpoint) error {
	p.mu.Lock()
	namespace := p.namespaces[req.Workload.Namespace]
	p.mu.Unlock()
	sources := []map[string]string{w.Annotations}
	if namespace != nil {
		sources = slices.Insert(sources, 0, namespace.Annotations)
		of := make(map[string]string, len(namespace.Spec.LabelsToApply))
		for k, v := range namespace.Spec.LabelsToApply {
			if name, ok := strings.CutPrefix(k, store.LabelPrefixNamespace); ok {
				of[name] = v
			}
		}
		maps.Copy(of, req.NamespaceLabels)
		req.NamespaceLabels = of
	}
	if _, err := store.QoSOf(w.Annotations); err != nil {
		return fmt.Errorf("%w: %w", err, ErrInvalid)
	}
	for _, annotations := range sources {
		for _, key := range slices.Sorted(maps.Keys(annotations)) {
			name, ok := strings.CutPrefix(key, store.AnnotationPrefixCNI)
			if value := annotations[key]; ok && value != "" {
				if err := req.annotate(name, value); err != nil {
					return fmt.Errorf("annotation %s: %q: %w: %w", key, value, err, ErrInvalid)
				}
			}
		}
	}
	return nil
}

// annotate changes a request as an annotation asks for. Others' annotations are
// none of ours.
func (req *AddRequest) annotate(name, value string) (err error) {
	switch name {
	case "ipv4pools":
		req.IPv4Pools, err = listed(value, func(s string) (string, error) { return s, nil })
	case "ipv6pools":
		req.IPv6Pools, err = listed(value, func(s string) (string, error) { return s, nil })
	case "ipFamilies":
		var families []string
		families, err = listed(value, func(s string) (string, error) {
			if s != "IPv4" && s != "IPv6" {
				return "", fmt.Errorf("%q is not IPv4 or IPv6", s)
			}
			return s, nil
		})
		if len(families) > 0 {
			req.IPv4, req.IPv6 = slices.Contains(families, "IPv4"), slices.Contains(families, "IPv6")
		}
	case "ipAddrs":
		req.Addresses, err = listed(value, netip.ParseAddr)
	case "ipAddrsNoIpam":
		if len(req.Given) == 0 {
			err = errors.New("it is read by the plugin alone: the conflist needs the capability io.kubernetes.cri.pod-annotations and feature_control.ip_addrs_no_ipam")
		}
	case "hwAddr":
		req.MAC, err = dataplane.ParseMAC(value)
	case "floatingIPs":
		req.Floating, err = listed(value, netip.ParseAddr)
	}
	return err
}

// listed reads a JSON list of texts.
func listed[T any](text string, parse func(string) (T, error)) ([]T, error) {
	var texts []string
	if err := json.Unmarshal([]byte(text), &texts); err != nil {
		return nil, errors.New(`want a JSON list of strings, such as ["192.168.0.5"]`)
	}
	var out []T
	for _, t := range texts {
		v, err := parse(t)
		if err != nil {
			return nil, err
		}
		out = append(out, v)
	}
	return out, nil
}
