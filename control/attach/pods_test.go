package attach

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"strings"
	"testing"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"github.com/projectcalico/api/pkg/lib/numorstring"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/memory"
)

// kubePod is the endpoint that a pod stands for which has no addresses yet.
func kubePod(uid types.UID, annotations map[string]string) *store.WorkloadEndpoint {
	w, _ := store.New(store.KindWorkloadEndpoint).(*store.WorkloadEndpoint)
	w.ObjectMeta = metav1.ObjectMeta{
		Name: "node--a-k8s-web--0-eth0", Namespace: "ns1", UID: uid, Annotations: annotations,
		Labels: map[string]string{"app": "web", store.LabelNamespace: "ns1", store.LabelOrchestrator: "k8s"},
	}
	w.Spec = store.WorkloadEndpointSpec{
		Orchestrator: "k8s", Node: "node-a", Pod: "web-0", Endpoint: "eth0", ServiceAccountName: "sa",
		Profiles: []string{"kns.ns1", "ksa.ns1.sa"}, InterfaceName: "caliabc48332923",
		Ports: []store.WorkloadEndpointPort{{Name: "http", Protocol: numorstring.ProtocolFromString("TCP"), Port: 80}},
	}
	return w
}

// told is a step in which the watch tells of objects.
func told(t *testing.T, values ...any) cluster.Step {
	t.Helper()
	s := cluster.Step{Synced: true}
	for _, v := range values {
		key, err := store.KeyOf(v)
		if err != nil {
			t.Fatal(err)
		}
		s.Changes = append(s.Changes, cluster.Decode("node-a", store.Event{Key: key, Object: store.Object{Key: key, Value: v, Revision: 1}}))
	}
	return s
}

func kubeWorld(t *testing.T) *world {
	t.Helper()
	w := newWorld(t)
	w.cfg = func(c *Config) { c.Kubernetes = true }
	return w
}

// askedAPI fails the test where it is asked.
type askedAPI struct{ t *testing.T }

func (a askedAPI) Get(_ context.Context, key store.Key) (store.Object, error) {
	a.t.Errorf("the API was asked for %s", key)
	return store.Object{}, store.ErrNotFound
}

// TestPodOfTheWatch: a pod that the watch told of is attached as it says, and the API is
// not asked, by what its annotations and its namespace's ask for, and its endpoint has its
// labels and profiles.
func TestPodOfTheWatch(t *testing.T) {
	t.Parallel()
	w := kubeWorld(t)
	a := w.start()
	a.pods.api = askedAPI{t}
	ns, _ := store.New(store.KindProfile).(*v3.Profile)
	ns.Name, ns.Annotations = "kns.ns1", map[string]string{"cni.projectcalico.org/ipv4pools": `["of-namespace"]`}
	ns.Spec.LabelsToApply = map[string]string{"pcns.team": "a"}
	pod := kubePod("u1", map[string]string{
		"cni.projectcalico.org/hwAddr": "02:00:00:00:00:07", "cni.projectcalico.org/ipAddrs": `["192.168.0.9"]`,
		"cni.projectcalico.org/floatingIPs": `["192.0.2.7","2001:db8::7"]`, "others.example/x": "y",
	})
	a.HandlePods(told(t, ns, pod))
	req := podRequest(w.request(1), "ns1", "web-0")
	req.PodUID = "u1"
	res := w.add(a, req)
	if res.MAC.String() != "02:00:00:00:00:07" || res.Addresses[0].Addr != netip.MustParseAddr("192.168.0.9") {
		t.Errorf("the result is %+v", res)
	}
	got := w.ipam.lastReq
	diff(t, "pools", []string{"of-namespace"}, got.Pools)
	if got.NamespaceLabels["team"] != "a" {
		t.Errorf("labels of the namespace: %v", got.NamespaceLabels)
	}
	e := w.endpoint("ns1", "node--a-k8s-web--0-eth0")
	want := pod.Spec
	want.ContainerID, want.MAC, want.IPNetworks = req.ID.ContainerID, "02:00:00:00:00:07", []string{"192.168.0.9/32"}
	want.IPNATs = []store.IPNAT{{InternalIP: "192.168.0.9", ExternalIP: "192.0.2.7"}}
	diff(t, "endpoint", want, e.Spec)
	delete(e.Labels, store.LabelServiceAccount) // a default
	diff(t, "labels", pod.Labels, e.Labels)
	if _, err := w.store.Get(t.Context(), store.ResourceKey(store.KindProfile, "net1")); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("the network's profile was written: %v", err)
	}
	w.del(a, req)
	w.expectClean()
}

// TestPodAskedFor: a pod that the watch has not told yet, or not as it is now, is asked
// for, and what cannot be attached is refused with the reason.
func TestPodAskedFor(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name       string
		told, held *store.WorkloadEndpoint
		uid        string
		refused    string // empty: attached
		kind       error
	}{
		{name: "the watch is late", held: kubePod("u1", nil), uid: "u1"},
		{name: "made anew since the watch told", told: kubePod("u0", nil), held: kubePod("u1", nil), uid: "u1"},
		{name: "a runtime that says no uid", told: kubePod("u1", nil)},
		{name: "a static pod", told: kubePod("u1", map[string]string{"kubernetes.io/config.hash": "h1"}), uid: "h1"},
		{name: "gone", uid: "u1", refused: "pod ns1/web-0: the API has none of this name on node-a", kind: ErrNotReady},
		{name: "another by now", told: kubePod("u2", nil), held: kubePod("u2", nil), uid: "u1", refused: "another uid than the runtime's u1", kind: ErrNotReady},
		{name: "malformed list", told: kubePod("u1", map[string]string{"cni.projectcalico.org/ipAddrs": "192.168.0.5"}), uid: "u1", refused: `annotation cni.projectcalico.org/ipAddrs: "192.168.0.5": want a JSON list`, kind: ErrInvalid},
		{name: "malformed address", told: kubePod("u1", map[string]string{"cni.projectcalico.org/floatingIPs": `["x"]`}), uid: "u1", refused: "annotation cni.projectcalico.org/floatingIPs", kind: ErrInvalid},
		{name: "malformed family", told: kubePod("u1", map[string]string{"cni.projectcalico.org/ipFamilies": `["IPv5"]`}), uid: "u1", refused: `"IPv5" is not IPv4 or IPv6`, kind: ErrInvalid},
		{name: "malformed MAC address", told: kubePod("u1", map[string]string{"cni.projectcalico.org/hwAddr": "x"}), uid: "u1", refused: "annotation cni.projectcalico.org/hwAddr", kind: ErrInvalid},
		{name: "malformed bandwidth", told: kubePod("u1", map[string]string{"kubernetes.io/ingress-bandwidth": "fast"}), uid: "u1", refused: `annotation kubernetes.io/ingress-bandwidth: "fast": want bits per second from 1k to 1P`, kind: ErrInvalid},
		{name: "limits that make sense", told: kubePod("u1", map[string]string{"kubernetes.io/egress-bandwidth": "10M", "qos.projectcalico.org/ingressMaxConnections": "5"}), uid: "u1"},
		{name: "addresses without IPAM", told: kubePod("u1", map[string]string{"cni.projectcalico.org/ipAddrsNoIpam": `["10.0.0.1"]`}), uid: "u1", refused: "feature_control.ip_addrs_no_ipam", kind: ErrInvalid},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			w := kubeWorld(t)
			a := w.start()
			if tc.told != nil {
				a.HandlePods(told(t, tc.told))
			}
			if tc.held != nil {
				key, err := store.KeyOf(tc.held)
				if err != nil {
					t.Fatal(err)
				}
				if _, err := w.store.Txn(t.Context(), store.Op{Action: store.Put, Object: store.Object{Key: key, Value: tc.held}}); err != nil {
					t.Fatal(err)
				}
			}
			req := podRequest(w.request(1), "ns1", "web-0")
			req.PodUID = tc.uid
			_, err := a.Add(t.Context(), req)
			if tc.refused == "" {
				if err != nil {
					t.Fatal(err)
				}
				diff(t, "profiles", []string{"kns.ns1", "ksa.ns1.sa"}, w.endpoint("ns1", "node--a-k8s-web--0-eth0").Spec.Profiles)
				return
			}
			if !errors.Is(err, tc.kind) || !strings.Contains(err.Error(), tc.refused) {
				t.Errorf("%v, want %q", err, tc.refused)
			}
			if left := len(a.Endpoints()); left != 0 {
				t.Errorf("%d attachments are left", left)
			}
		})
	}
}

// TestNoPod: what is no pod's first interface is attached, and the datastore, which has
// no place for it, is not written.
func TestNoPod(t *testing.T) {
	t.Parallel()
	w := kubeWorld(t)
	a := w.start()
	req := w.request(1)
	w.add(a, req)
	w.check(a, req)
	endpoints, _, err := w.store.List(t.Context(), store.KindWorkloadEndpoint, "")
	if err != nil || len(endpoints) != 0 {
		t.Errorf("endpoints were written: %v, %v", endpoints, err)
	}
	w.del(a, req)
	w.expectClean()
}

// TestPodBeforeTheAPIIsBack: a pod that the watch has not told yet, and that the API cannot be
// asked for because its server is being replaced, is attached when either tells of it.
func TestPodBeforeTheAPIIsBack(t *testing.T) {
	t.Parallel()
	for _, watch := range []bool{false, true} { // by the watch, and not by an answer
		t.Run(fmt.Sprint("watch=", watch), func(t *testing.T) {
			t.Parallel()
			api := memory.New()
			t.Cleanup(func() { _ = api.Close() })
			pod := kubePod("u1", nil)
			if _, err := store.Create(t.Context(), api, pod); err != nil {
				t.Fatal(err)
			}
			api.Fail(errors.New("connection refused"))
			p := newPods(api, pod.Spec.Node, &datastore{Store: api, timeout: time.Minute}, slog.New(slog.DiscardHandler))
			answer := make(chan error, 1)
			go func() {
				req := AddRequest{Workload: Workload{Orchestrator: Kubernetes, Namespace: pod.Namespace, Pod: pod.Spec.Pod}, PodUID: "u1"}
				_, _, err := p.complete(t.Context(), req)
				answer <- err
			}()
			select {
			case err := <-answer:
				t.Fatalf("while the API is away the answer is %v", err)
			case <-time.After(200 * time.Millisecond):
			}
			if watch {
				p.handle(told(t, pod))
			} else {
				api.Fail(nil)
			}
			if err := <-answer; err != nil {
				t.Error(err)
			}
		})
	}
}

// TestPodWhileTheAPIIsAway: a pod that ran here before, such as a static one that is made anew, is
// known from the datastore where that is not the API, and no other pod is.
func TestPodWhileTheAPIIsAway(t *testing.T) {
	t.Parallel()
	api, etcd := memory.New(), memory.New()
	for _, s := range []*memory.Store{api, etcd} {
		t.Cleanup(func() { _ = s.Close() })
	}
	api.Fail(errors.New("connection refused"))
	known := kubePod("u1", nil)
	if _, err := store.Create(t.Context(), etcd, known); err != nil {
		t.Fatal(err)
	}
	p := newPods(api, known.Spec.Node, &datastore{Store: etcd, timeout: time.Minute}, slog.New(slog.DiscardHandler))
	for uid, want := range map[string]error{"u1": nil, "u2": store.ErrUnavailable, "": store.ErrUnavailable} {
		p.patience = apiPatience
		if want != nil {
			p.patience = time.Millisecond // as long as it lasts, it asks again
		}
		req := AddRequest{Workload: Workload{Orchestrator: Kubernetes, Namespace: known.Namespace, Pod: known.Spec.Pod}, PodUID: uid}
		_, got, err := p.complete(t.Context(), req)
		switch {
		case !errors.Is(err, want):
			t.Errorf("pod %q: %v, want %v", uid, err, want)
		case err == nil && !maps.Equal(got.Labels, known.Labels):
			t.Errorf("pod %q has the labels %v, want %v", uid, got.Labels, known.Labels)
		}
	}
}

// TestLimitsAreSaid: that a pod's limits make no sense is said
// once for each change of that.
func TestLimitsAreSaid(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	p := newPods(memory.New(), "node-a", nil, slog.New(slog.NewTextHandler(&out, nil)))
	for _, step := range []struct {
		annotations map[string]string
		want        string // empty: nothing is said
	}{
		{nil, ""},
		{map[string]string{store.AnnotationIngressBandwidth: "1M"}, ""},
		{map[string]string{store.AnnotationIngressBandwidth: "x"}, "limits are invalid"},
		{map[string]string{store.AnnotationIngressBandwidth: "x", "cni.projectcalico.org/x": "y"}, ""},
		{map[string]string{store.AnnotationDSCP: "AF11"}, ""},
		{map[string]string{store.AnnotationDSCP: "AF15"}, "limits are invalid"},
		{map[string]string{store.AnnotationIngressBandwidth: "y"}, "limits are invalid"},
	} {
		out.Reset()
		p.handle(told(t, kubePod("u1", step.annotations)))
		if got := out.String(); !strings.Contains(got, step.want) || step.want == "" && got != "" {
			t.Errorf("with %v: %q, want %q", step.annotations, got, step.want)
		}
	}
}
