package attach

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"reflect"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/store"
)

// endpointOf returns the WorkloadEndpoint of an attachment, with Calico's
// names and defaults.
func (a *Attacher) endpointOf(r record) (*store.WorkloadEndpoint, error) {
	w := &store.WorkloadEndpoint{
		Spec: store.WorkloadEndpointSpec{
			Orchestrator:  r.Orchestrator,
			Node:          a.cfg.Node,
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
		return nil, fmt.Errorf("name of the workload endpoint: %w: %w", ErrInvalid, err)
	}
	w.Name, w.Namespace = name, r.Namespace
	store.SetDefaults(w)
	return w, nil
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

// checkEndpoint refuses, before anything is made, what the datastore would
// refuse in the end.
func (a *Attacher) checkEndpoint(r record) error {
	if err := store.Validate(profileOf(r.Network)); err != nil {
		return fmt.Errorf("network name %q: a profile gets this name: %w: %w", r.Network, ErrInvalid, err)
	}
	w, err := a.endpointOf(r)
	if err != nil {
		return err
	}
	if err := store.Validate(w); err != nil {
		return fmt.Errorf("workload endpoint: %w: %w", ErrInvalid, err)
	}
	return nil
}

// putEndpoint writes the profile, if it is missing, and the endpoint. It
// returns the endpoint's revision.
func (a *Attacher) putEndpoint(ctx context.Context, r record) (store.Revision, error) {
	if err := a.putProfiles(ctx, []record{r}); err != nil {
		return 0, err
	}
	want, err := a.endpointOf(r)
	if err != nil {
		return 0, err
	}
	written, err := store.Create(ctx, a.cfg.Store, want)
	if err == nil || !errors.Is(err, store.ErrExists) {
		return written.Revision, err
	}
	key, err := store.KeyOf(want)
	if err != nil {
		return 0, err
	}
	written, err = store.Modify(ctx, a.cfg.Store, key, func(cur store.Object) (any, error) {
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

// putProfiles writes the profiles of attachments' networks that are not known
// to be there.
func (a *Attacher) putProfiles(ctx context.Context, rs []record) error {
	seen := map[string]bool{}
	for _, r := range rs {
		a.mu.Lock()
		known := a.profiles[r.Network]
		a.mu.Unlock()
		if known || seen[r.Network] || r.AddressesOnly {
			continue
		}
		seen[r.Network] = true
		if _, err := store.Create(ctx, a.cfg.Store, profileOf(r.Network)); err != nil && !errors.Is(err, store.ErrExists) {
			return err
		}
	}
	return nil
}

// dropTries bounds how often a deletion is tried again because the endpoint
// was written meanwhile.
const dropTries = 5

// dropEndpoint deletes the endpoint of an attachment. That of a pod is another
// container's by now when its container id says so, and then it stays.
func (a *Attacher) dropEndpoint(ctx context.Context, r record) error {
	want, err := a.endpointOf(r)
	if err != nil {
		// An attachment whose endpoint can have no name never got one.
		return nil //nolint:nilerr // see above
	}
	key, err := store.KeyOf(want)
	if err != nil {
		return err
	}
	if r.Endpoint != 0 {
		err := store.Delete(ctx, a.cfg.Store, key, r.Endpoint)
		if err == nil || errors.Is(err, store.ErrNotFound) {
			return nil
		}
		if !errors.Is(err, store.ErrConflict) {
			return err
		}
	}
	for range dropTries {
		cur, err := a.cfg.Store.Get(ctx, key)
		if errors.Is(err, store.ErrNotFound) {
			return nil
		}
		if err != nil {
			return err
		}
		if have, ok := cur.Value.(*store.WorkloadEndpoint); ok && have.Spec.ContainerID != r.ContainerID {
			return nil
		}
		err = store.Delete(ctx, a.cfg.Store, key, cur.Revision)
		if err == nil || errors.Is(err, store.ErrNotFound) {
			return nil
		}
		if !errors.Is(err, store.ErrConflict) {
			return err
		}
	}
	return fmt.Errorf("delete %s: changed %d times meanwhile: %w", key, dropTries, store.ErrConflict)
}
