package kubecontrollers

import (
	"cmp"
	"context"
	"encoding/json"
	"log/slog"
	"reflect"
	"sync"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/store"
)

// Running is what daemons do of what a KubeControllersConfiguration can ask for.
type Running struct {
	// API says that Kubernetes' API is the datastore, and Mirrored that what it says is brought
	// into another one.
	API, Mirrored bool
	// LeakGrace returns how long an address must have leaked before it is freed.
	LeakGrace func(*v3.KubeControllersConfiguration) time.Duration
}

// status returns what is in force of a resource, in the form in which kube-controllers say it.
// What has no effect is not in it.
func (r Running) status(k *v3.KubeControllersConfiguration, a *cluster.Controllers) v3.KubeControllersConfigurationStatus {
	node := &v3.NodeControllerConfig{SyncLabels: v3.Disabled, LeakGracePeriod: &metav1.Duration{Duration: r.LeakGrace(k)}}
	asked := k.Spec.Controllers.Node
	if r.Mirrored && (asked == nil || asked.SyncLabels != v3.Disabled) {
		node.SyncLabels = v3.Enabled
	}
	if asked != nil && asked.HostEndpoint != nil {
		node.HostEndpoint = running(asked.HostEndpoint, a)
	}
	s := v3.KubeControllersConfigurationStatus{RunningConfig: v3.KubeControllersConfigurationSpec{Controllers: v3.ControllersConfig{Node: node}}}
	if r.API {
		// Why labels are not synchronised: they are there.
		s.EnvironmentVars = map[string]string{"DATASTORE_TYPE": "kubernetes"}
	}
	if c := &s.RunningConfig.Controllers; r.Mirrored {
		c.Policy, c.WorkloadEndpoint = &v3.PolicyControllerConfig{}, &v3.WorkloadEndpointControllerConfig{}
		c.ServiceAccount, c.Namespace = &v3.ServiceAccountControllerConfig{}, &v3.NamespaceControllerConfig{}
	}
	return reread(s)
}

// reread returns a status as it is read after it was written: an empty map is none.
func reread(s v3.KubeControllersConfigurationStatus) (out v3.KubeControllersConfigurationStatus) {
	raw, err := json.Marshal(s)
	if err != nil || json.Unmarshal(raw, &out) != nil {
		return s
	}
	return out
}

// running returns what is in force of the host endpoints of Nodes.
func running(asked *v3.AutoHostEndpointConfig, a *cluster.Controllers) *v3.AutoHostEndpointConfig {
	h := &v3.AutoHostEndpointConfig{AutoCreate: v3.Disabled, CreateDefaultHostEndpoint: cmp.Or(asked.CreateDefaultHostEndpoint, v3.DefaultHostEndpointsEnabled)}
	if a.Create {
		h.AutoCreate = v3.Enabled
	}
	for _, t := range a.Templates {
		h.Templates = append(h.Templates, t.Template)
	}
	return h
}

// StatusWriter writes the status of the KubeControllersConfiguration. Its methods are safe for
// concurrent use.
type StatusWriter struct {
	running Running
	store   store.Store
	log     *slog.Logger
	changed async.Signal

	mu   sync.Mutex
	live bool
	seen cluster.Change // Value nil: there is none
}

// NewStatusWriter returns a StatusWriter of what is in force.
func NewStatusWriter(r Running, s store.Store, log *slog.Logger) *StatusWriter {
	return &StatusWriter{running: r, store: s, log: log, changed: async.NewSignal()}
}

// HandleStore applies a step of the cluster's copy. It does not block.
func (w *StatusWriter) HandleStore(s cluster.Step) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.live = s.Source == cluster.Live
	for _, ch := range s.Changes {
		if ch.Key == store.ResourceKey(store.KindKubeControllersConfiguration, store.DefaultName) && ch.Err == nil {
			w.seen = *ch
		}
	}
	w.changed.Set()
}

// Run says what is in force until ctx ends. It is for one host of the cluster. Where another
// program writes the status again and again, as kube-controllers do, it leaves it to that
// one: the two would never end.
func (w *StatusWriter) Run(ctx context.Context) {
	var said turn
	_ = rounds(ctx, w.changed, w.log, "status", func(ctx context.Context) error { return w.say(ctx, &said) }) // ctx ended
}

// maxTurns is how often the status is written that another program wrote since.
const maxTurns = 3

// turn is what was written, and how often another program wrote something else since.
type turn struct {
	wrote  *v3.KubeControllersConfigurationStatus
	at     store.Revision
	others int
}

// say writes what is due.
func (w *StatusWriter) say(ctx context.Context, said *turn) error {
	w.mu.Lock()
	live, seen := w.live, w.seen
	w.mu.Unlock()
	k, ok := seen.Object.Value.(*v3.KubeControllersConfiguration)
	if !live || !ok || seen.Object.Revision < said.at || said.others == maxTurns {
		return nil
	}
	if said.wrote != nil && !reflect.DeepEqual(k.Status, *said.wrote) {
		if said.others++; said.others == maxTurns {
			w.log.Info("another program writes the status of the KubeControllersConfiguration; it is left to it")
			return nil
		}
	}
	want := w.running.status(k, seen.Value.(*cluster.Controllers))
	if reflect.DeepEqual(k.Status, want) {
		return nil
	}
	written, err := store.ModifyStatus(ctx, w.store, seen.Key, func(cur store.Object) (any, error) {
		c, ok := cur.Value.(*v3.KubeControllersConfiguration)
		if !ok || cur.Revision != seen.Object.Revision {
			return nil, nil // the watch shows what it is now
		}
		c = store.Clone(c).(*v3.KubeControllersConfiguration)
		c.Status = want
		return c, nil
	})
	if err == nil && written.Revision > seen.Object.Revision {
		said.wrote, said.at = &want, written.Revision
	}
	return err
}
