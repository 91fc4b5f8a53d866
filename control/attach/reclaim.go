package attach

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// Kinds lists what an [Attacher] wants to see of the store.
func Kinds() []store.Kind { return []store.Kind{store.KindNode, store.KindProfile} }

// HandleStore takes in a batch of the store's watch, of which it heeds this
// host's Node, and which profiles there are: an ADD then need not ask. It does
// not block.
//
// Who deletes a Node gives its workloads' addresses back and deletes their
// endpoints, as Calico's tools do. If the daemon runs, or comes back, its
// workloads live on all the same: [Attacher.Run] then takes their addresses
// again and writes the endpoints anew, before others get the addresses.
func (a *Attacher) HandleStore(b store.Batch) {
	a.mu.Lock()
	defer a.mu.Unlock()
	// What waited for the datastore, or for the host's name, goes on.
	if b.Err == nil && (a.storeAway || b.Synced && !a.synced) {
		select {
		case a.back <- struct{}{}:
		default:
		}
	}
	a.storeAway = b.Err != nil
	forgot := false
	for _, ev := range b.Events {
		if ev.Key.Kind == store.KindProfile {
			a.profiles[ev.Key.Name] = !ev.Deleted()
		}
		if ev.Err != nil || ev.Key.Kind != store.KindNode || ev.Key.Name != a.cfg.Node {
			continue
		}
		_, a.nodeKnown = ev.Object.Value.(*store.Node)
		forgot = forgot || !a.nodeKnown
	}
	if b.Synced && !a.synced {
		a.synced = true
		// On a new host nothing is attached yet, and nothing was forgotten.
		forgot = forgot || !a.nodeKnown && (len(a.records) > 0 || !a.restored)
	}
	if forgot || a.forgotten {
		a.reclaimLater()
	}
}

// reclaim takes up again what the datastore forgot, and reports whether
// nothing is left to be taken up.
func (a *Attacher) reclaim(ctx context.Context) bool {
	a.mu.Lock()
	due, doubt := a.forgotten && a.restored, a.doubt.epoch
	if due {
		a.forgotten = false // another deletion from here on counts anew
	}
	a.mu.Unlock()
	if !due {
		return true
	}
	compared, err := a.reclaimAll(ctx)
	if err != nil {
		a.log.Warn("workloads that the datastore forgot are not all written again; will try again", "error", err)
		a.mu.Lock()
		a.reclaimLater()
		a.mu.Unlock()
	}
	if compared {
		a.settle(doubt)
	}
	return err == nil
}

// reclaimAll goes through the workloads that live here. It reports whether each
// was compared with the datastore: its addresses are its own again, its routes
// are down, or the datastore answered with a refusal.
func (a *Attacher) reclaimAll(ctx context.Context) (compared bool, err error) {
	devices, err := a.cfg.Wire.Devices(ctx)
	if err != nil {
		return false, err
	}
	var (
		g    errgroup.Group
		mu   sync.Mutex
		errs []error
	)
	compared = true
	g.SetLimit(parallelReleases)
	for id, r := range a.snapshot() {
		if r.State != stateAttached || !r.there(devices) {
			continue
		}
		g.Go(func() error {
			one, err := a.reclaimOne(ctx, id)
			mu.Lock()
			defer mu.Unlock()
			if compared = compared && one; err != nil {
				errs = append(errs, err)
			}
			return nil
		})
	}
	_ = g.Wait()
	if n := len(errs); n > 3 {
		errs = append(errs[:3], fmt.Errorf("and %d more", n-3))
	}
	return compared, errors.Join(errs...)
}

// reclaimOne takes up one workload again. It reports whether its addresses were
// compared with the datastore, whatever became of its endpoint.
func (a *Attacher) reclaimOne(ctx context.Context, id ID) (compared bool, err error) {
	unlock, r, known, err := a.lock(ctx, id, Workload{})
	if err != nil {
		return false, err
	}
	defer unlock()
	if !known || r.State != stateAttached {
		return true, nil
	}
	if err := a.takeAgain(ctx, r); err != nil {
		if errors.Is(err, ErrHeld) {
			err = a.fence(r, err)
			return err == nil, err
		}
		// One that the datastore refuses, and that is tried again, is no reason to
		// keep others waiting.
		return errors.Is(err, ErrNoAddress) || errors.Is(err, ErrInvalid), err
	}
	if r.Lost != "" {
		r.Lost = ""
		if err := a.save(r); err != nil {
			return false, err
		}
		a.cfg.Sink.Update(dataplane.SourceWorkload, r.wishes(a.cfg.Wire), nil)
		a.log.Info("a workload has its address and its route again", logID(id)...)
	}
	return true, a.endpointAgain(ctx, r)
}

// takeAgain takes the addresses of a workload again; [ErrHeld]: one is somebody
// else's.
func (a *Attacher) takeAgain(ctx context.Context, r record) error {
	if r.Given {
		return nil
	}
	ctx, cancel := a.storeContext(ctx)
	defer cancel()
	for _, want := range r.Addresses {
		req := a.assignRequest(r, dataplane.FamilyOf(want.Addr))
		req.Address, req.Again = want.Addr, true
		got, err := a.cfg.IPAM.Assign(ctx, req)
		if err == nil && got[0].Addr != want.Addr {
			err = fmt.Errorf("its handle has %s: %w", got[0].Addr, ErrNoAddress)
		}
		if err != nil {
			return storeError(fmt.Sprintf("take address %s of %s again", want.Addr, handle(r.id())), err)
		}
	}
	return nil
}

// endpointAgain writes the endpoint of a workload again.
func (a *Attacher) endpointAgain(ctx context.Context, r record) (err error) {
	if r.AddressesOnly {
		return nil
	}
	ctx, cancel := a.storeContext(ctx)
	defer cancel()
	before := r.Endpoint
	if r.Endpoint, err = a.putEndpoint(ctx, r); err != nil {
		return storeError("write the workload endpoint of "+handle(r.id())+" again", err)
	}
	if r.Endpoint == before && !r.Queued {
		return nil
	}
	if r.Stale {
		a.writeLater()
		return a.save(r) // the writer releases what is left of the earlier life
	}
	r.Queued, r.Claims = false, nil
	a.log.Info("workload written to the datastore again", logID(r.id())...)
	return a.save(r)
}

// fence takes down the routes of a workload whose address became somebody
// else's, while this host could not know: two owners are worse than none. The
// workload is named until it is detached.
func (a *Attacher) fence(r record, cause error) error {
	if r.Lost != "" {
		return nil
	}
	routes := slices.DeleteFunc(keysOf(r.wishes(a.cfg.Wire)), func(k dataplane.Key) bool { return k.Kind() != dataplane.KindRoute })
	r.Lost = cause.Error()
	r.Queued, r.Claims = false, nil
	// The route goes first: that the disk is full is no reason to keep it.
	a.cfg.Sink.Update(dataplane.SourceWorkload, nil, routes)
	if err := a.save(r); err != nil {
		return fmt.Errorf("note that %s lost its address: %w", handle(r.id()), err)
	}
	a.log.Error("a workload's address is somebody else's by now, and its route is taken down; start the workload anew",
		append(logID(r.id()), "pod", r.Pod, "addresses", r.addrs(), "error", cause)...)
	return nil
}

// vacant verifies that no other workload of this host lives with an address
// that IPAM just gave to r: IPAM may have been made to forget it.
func (a *Attacher) vacant(ctx context.Context, r record) error {
	for id, other := range a.snapshot() {
		if id == r.id() || other.State != stateAttached {
			continue
		}
		for _, have := range other.Addresses {
			for _, got := range r.Addresses {
				if have.Addr != got.Addr {
					continue
				}
				devices, err := a.cfg.Wire.Devices(ctx)
				if err != nil {
					return err
				}
				if !other.there(devices) {
					continue
				}
				a.mu.Lock()
				a.reclaimLater()
				a.mu.Unlock()
				return fmt.Errorf("assign an address: %s is still in use by %s, which the datastore forgot: %w", got.Addr, handle(id), ErrNotReady)
			}
		}
	}
	return nil
}

// assignRequest asks for an address of a family for an attachment.
func (a *Attacher) assignRequest(r record, f dataplane.Family) AssignRequest {
	ar := AssignRequest{
		Handle: handle(r.id()),
		Family: f,
		Attributes: map[string]string{
			"node":      a.cfg.Node,
			"timestamp": time.Now().UTC().Round(0).String(),
		},
		Fresh: r.Stale,
	}
	if r.AddressesOnly {
		// No endpoint tells of it.
		ar.Attributes["type"] = "ipamPlugin"
	}
	if r.Pod != "" {
		ar.Namespace = r.Namespace
		ar.Attributes["namespace"], ar.Attributes["pod"] = r.Namespace, r.Pod
	}
	return ar
}
