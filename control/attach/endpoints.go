package attach

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"sync"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"golang.org/x/sync/errgroup"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/store"
)

// endpoints writes the WorkloadEndpoints of attachments, and the profiles of
// their networks.
type endpoints struct {
	node       string
	kubernetes bool // see Config.Kubernetes
	store      *datastore

	mu       sync.Mutex
	profiles map[string]bool // by network: the watch says that it is there
}

// handle takes account of the profiles in a step of the cluster's copy.
func (x *endpoints) handle(s cluster.Step) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, ev := range s.Changes {
		if ev.Key.Kind == store.KindProfile {
			x.profiles[ev.Key.Name] = !ev.Own && !ev.Deleted()
		}
	}
}

// unknownProfile calls show with the profile of a network's endpoints, which
// without it are denied everything, unless the watch is known to have shown one.
func (x *endpoints) unknownProfile(network string, show func(store.Event)) {
	x.mu.Lock()
	known := x.profiles[network]
	x.mu.Unlock()
	if known {
		return
	}
	p := profileOf(network)
	key, err := store.KeyOf(p)
	if err != nil {
		return
	}
	store.SetDefaults(p)
	show(store.Event{Key: key, Object: store.Object{Key: key, Value: p}})
}

// of returns the WorkloadEndpoint of an attachment, with Calico's names and
// defaults.
func (x *endpoints) of(r record) (*store.WorkloadEndpoint, store.Key, error) {
	w := &store.WorkloadEndpoint{
		Spec: store.WorkloadEndpointSpec{
			Orchestrator:  r.Orchestrator,
			Node:          x.node,
			ContainerID:   r.ContainerID,
			Pod:           r.Pod,
			Endpoint:      r.Interface,
			Profiles:      []string{r.Network},
			InterfaceName: r.Device,
			MAC:           r.MAC,
		},
	}
	for _, addr := range r.addrs() {
		w.Spec.IPNetworks = append(w.Spec.IPNetworks, netip.PrefixFrom(addr, addr.BitLen()).String())
	}
	name, err := store.WorkloadEndpointName(&w.Spec)
	if err != nil {
		return nil, store.Key{}, fmt.Errorf("name of the workload endpoint: %w: %w", ErrInvalid, err)
	}
	w.Name, w.Namespace = name, r.Namespace
	r.More.fill(w, r.addrs())
	store.SetDefaults(w)
	key, err := store.KeyOf(w)
	return w, key, err
}

// local reports whether the datastore has no place for an attachment's endpoint:
// that of Kubernetes knows one of each pod, and no others.
func (x *endpoints) local(r record) bool {
	return r.AddressesOnly || x.kubernetes && (r.Orchestrator != Kubernetes || r.Interface != podInterface)
}

// key returns the key of an attachment's endpoint. One whose endpoint can have no
// name never got one.
func (x *endpoints) key(r record) (store.Key, bool) {
	if r.Network == "" || r.AddressesOnly {
		return store.Key{}, false
	}
	_, key, err := x.of(r)
	return key, err == nil
}

// profileOf returns the profile that every endpoint of a network gets: those
// of one network may talk to each other, and to everybody.
func profileOf(network string) *v3.Profile {
	p := v3.NewProfile()
	p.Name = network
	p.Spec = v3.ProfileSpec{
		Ingress:       []v3.Rule{{Action: v3.Allow, Source: v3.EntityRule{Selector: "has(" + network + ")"}}},
		Egress:        []v3.Rule{{Action: v3.Allow}},
		LabelsToApply: map[string]string{network: ""},
	}
	return p
}

// check refuses, before anything is made, what the datastore would refuse in the
// end.
func (x *endpoints) check(r record) error {
	if err := store.Validate(profileOf(r.Network)); err != nil {
		return fmt.Errorf("network name %q: a profile gets this name: %w: %w", r.Network, ErrInvalid, err)
	}
	w, _, err := x.of(r)
	if err != nil {
		return err
	}
	if err := store.Validate(w); err != nil {
		return fmt.Errorf("workload endpoint: %w: %w", ErrInvalid, err)
	}
	return nil
}

// put writes the profile, if it is missing, and the endpoint. It returns the
// endpoint's revision.
func (x *endpoints) put(ctx context.Context, r record) (store.Revision, error) {
	switch {
	case x.local(r):
		return 0, nil
	case x.kubernetes:
		return x.patch(ctx, r)
	}
	if err := x.putProfiles(ctx, []record{r}); err != nil {
		return 0, err
	}
	want, key, err := x.of(r)
	if err != nil {
		return 0, err
	}
	written, err := store.Create(ctx, x.store, want)
	if err == nil || !errors.Is(err, store.ErrExists) {
		return written.Revision, err
	}
	written, err = store.Modify(ctx, x.store, key, func(cur store.Object) (any, error) {
		have, ok := cur.Value.(*store.WorkloadEndpoint)
		if !ok {
			return want, nil
		}
		next := store.Clone(have).(*store.WorkloadEndpoint)
		next.Spec = want.Spec
		for k, v := range want.Labels {
			if next.Labels == nil {
				next.Labels = make(map[string]string)
			}
			next.Labels[k] = v
		}
		if reflect.DeepEqual(next, have) {
			return nil, nil
		}
		return next, nil
	})
	return written.Revision, err
}

// patch writes the addresses of a pod. They are the truth whatever the object said
// before; its uid says that it is still the same.
func (x *endpoints) patch(ctx context.Context, r record) (store.Revision, error) {
	w, key, err := x.of(r)
	if err != nil {
		return 0, err
	}
	written, err := x.store.Txn(ctx, store.Op{Action: store.Put, Object: store.Object{Key: key, Value: w}})
	if err != nil {
		return 0, err
	}
	return written[0].Revision, nil
}

// parallelPatches is how many pods are written at once.
const parallelPatches = 8

// patchAll writes the addresses of pods, one by one.
func (x *endpoints) patchAll(ctx context.Context, rs []record) ([]store.Revision, []error) {
	revs, errs := make([]store.Revision, len(rs)), make([]error, len(rs))
	var g errgroup.Group
	g.SetLimit(parallelPatches)
	for i, r := range rs {
		g.Go(func() error {
			revs[i], errs[i] = x.put(ctx, r)
			return nil
		})
	}
	_ = g.Wait()
	return revs, errs
}

// putNow is put within the time of a step.
func (x *endpoints) putNow(ctx context.Context, r record, step string) (store.Revision, error) {
	ctx, cancel := x.store.context(ctx)
	defer cancel()
	rev, err := x.put(ctx, r)
	if err != nil {
		return 0, storeError(step, err)
	}
	return rev, nil
}

// putAll writes endpoints in one transaction where they are new, as they nearly
// always are, else one by one.
func (x *endpoints) putAll(ctx context.Context, rs []record) ([]store.Revision, []error) {
	if x.kubernetes {
		return x.patchAll(ctx, rs)
	}
	revs, errs := make([]store.Revision, len(rs)), make([]error, len(rs))
	var values []any
	var of []int
	for i, r := range rs {
		if r.AddressesOnly {
			continue
		}
		w, _, err := x.of(r)
		if errs[i] = err; err == nil {
			values, of = append(values, w), append(of, i)
		}
	}
	if len(values) == 0 {
		return revs, errs
	}
	err := x.putProfiles(ctx, rs)
	if err == nil {
		var written []store.Object
		if written, err = store.CreateAll(ctx, x.store, values...); err == nil {
			for i, o := range written {
				revs[of[i]] = o.Revision
			}
			return revs, errs
		}
	}
	for _, i := range of {
		if errs[i] = err; !errors.Is(err, store.ErrUnavailable) {
			revs[i], errs[i] = x.put(ctx, rs[i])
		}
	}
	return revs, errs
}

// putProfiles writes the profiles of attachments' networks that are not known
// to be there.
func (x *endpoints) putProfiles(ctx context.Context, rs []record) error {
	seen := map[string]bool{}
	for _, r := range rs {
		x.mu.Lock()
		known := x.profiles[r.Network]
		x.mu.Unlock()
		if known || seen[r.Network] || r.AddressesOnly {
			continue
		}
		seen[r.Network] = true
		if _, err := store.Create(ctx, x.store, profileOf(r.Network)); err != nil && !errors.Is(err, store.ErrExists) {
			return err
		}
	}
	return nil
}

// dropTries bounds how often a deletion is tried again because the endpoint
// was written meanwhile.
const dropTries = 5

// drop deletes the endpoint of an attachment. That of a pod is another
// container's by now when its container id says so, and then it stays.
func (x *endpoints) drop(ctx context.Context, r record) error {
	key, ok := x.key(r)
	if !ok || x.local(r) {
		return nil
	}
	if x.kubernetes {
		w, _, err := x.of(r)
		if err == nil {
			_, err = x.store.Txn(ctx, store.Op{Action: store.Remove, Object: store.Object{Key: key, Value: w}})
		}
		if errors.Is(err, store.ErrNotFound) || errors.Is(err, store.ErrConflict) {
			return nil // the pod is gone, or another container's by now
		}
		return err
	}
	if r.Endpoint != 0 {
		err := store.Delete(ctx, x.store, key, r.Endpoint)
		if err == nil || errors.Is(err, store.ErrNotFound) {
			return nil
		}
		if !errors.Is(err, store.ErrConflict) {
			return err
		}
	}
	for range dropTries {
		cur, err := x.store.Get(ctx, key)
		if errors.Is(err, store.ErrNotFound) {
			return nil
		}
		if err != nil {
			return err
		}
		if have, ok := cur.Value.(*store.WorkloadEndpoint); ok && have.Spec.ContainerID != r.ContainerID {
			return nil
		}
		err = store.Delete(ctx, x.store, key, cur.Revision)
		if err == nil || errors.Is(err, store.ErrNotFound) {
			return nil
		}
		if !errors.Is(err, store.ErrConflict) {
			return err
		}
	}
	return fmt.Errorf("delete %s: changed %d times meanwhile: %w", key, dropTries, store.ErrConflict)
}

// list returns what the datastore shows of a network on this host. What is
// shown while the host does not hold its name is not its own. That of Kubernetes
// does not say which network a pod is in.
func (x *endpoints) list(ctx context.Context, network string) ([]record, error) {
	if x.kubernetes {
		return nil, nil
	}
	if err := x.store.held(); err != nil {
		return nil, fmt.Errorf("list workload endpoints: %w", err)
	}
	ctx, cancel := x.store.context(ctx)
	defer cancel()
	objects, _, err := x.store.List(ctx, store.KindWorkloadEndpoint, "")
	switch {
	case errors.Is(err, store.ErrDecode):
		err = nil // the others count
	case err != nil:
		err = storeError("list workload endpoints", err)
	}
	var out []record
	for _, o := range objects {
		w, ok := o.Value.(*store.WorkloadEndpoint)
		if !ok || w.Spec.Node != x.node || !slices.Contains(w.Spec.Profiles, network) {
			continue
		}
		out = append(out, recordOf(ID{Network: network, ContainerID: w.Spec.ContainerID, Interface: w.Spec.Endpoint},
			Workload{Orchestrator: w.Spec.Orchestrator, Namespace: w.Namespace, Pod: w.Spec.Pod}))
	}
	return out, err
}
