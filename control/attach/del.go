package attach

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/workload"
	"github.com/routerd/routerd/store"
)

// Del detaches a container. It succeeds when there is nothing to detach; the
// container's namespace need not exist. Without a record it goes by what
// follows from the names. With [Config.Behind] it answers when it is certain
// that the attachment goes, also after the loss of power. Else, while the
// datastore is away, it cuts the wire and returns [store.ErrUnavailable], or
// [ErrNotReady] where the host does not hold its name; the caller should try
// again, and the daemon does so by itself.
func (a *Attacher) Del(ctx context.Context, req DelRequest) error {
	if !a.isRestored() {
		return errStarting()
	}
	if have, known := a.record(req.ID); known && have.State == stateReleasing && a.behind() {
		a.cutLater() // it was answered before, or failed, and the rest is on its way
		return a.cfg.Journal.Sync()
	}
	unlock, r, known, err := a.lock(ctx, req.ID, req.Workload)
	if err != nil {
		return err
	}
	defer unlock()
	if !known && req.AddressesOnly {
		r.AddressesOnly, r.Device = true, ""
	}
	if a.behind() {
		return a.mark(ctx, r)
	}
	if err := a.release(ctx, r); err != nil {
		a.completeLater(r.id())
		return err
	}
	return nil
}

// release removes all of an attachment, the record last. The caller has its
// locks. The address goes back only after the wire is cut.
func (a *Attacher) release(ctx context.Context, r record) error {
	if err := a.at("del start"); err != nil {
		return err
	}
	if have, known := a.record(r.id()); known && have.State != stateReleasing {
		have.State = stateReleasing
		if err := a.save(have); err != nil {
			return err
		}
		// The caller's record may know more than the one on disk.
		r.State = have.State
	}
	if err := a.at("del marked"); err != nil {
		return err
	}
	if err := a.cut(ctx, r); err != nil {
		return err
	}
	return a.finish(ctx, r)
}

// finish removes the rest of an attachment whose wire is cut.
func (a *Attacher) finish(ctx context.Context, r record) error {
	if err := a.at("del cut"); err != nil {
		return err
	}
	if err := a.untell(ctx, r); err != nil {
		return err
	}
	if err := a.at("del address"); err != nil {
		return err
	}
	if err := a.forget(r.id()); err != nil {
		return err
	}
	return a.at("del done")
}

// untell takes out of the datastore what it knows of an attachment.
func (a *Attacher) untell(ctx context.Context, r record) error {
	if a.localOnly(r) || a.disowned(r.id()) {
		return nil
	}
	if err := a.held(); err != nil {
		return fmt.Errorf("release the attachment: %w", err)
	}
	storeCtx, cancel := a.storeContext(ctx)
	defer cancel()
	if r.Queued {
		if err := a.quiesce(storeCtx); err != nil {
			return storeError("release the attachment", err)
		}
	}
	if !r.AddressesOnly {
		if err := a.dropEndpoint(storeCtx, r); err != nil {
			return storeError("delete the workload endpoint", err)
		}
	}
	if err := a.at("del endpoint"); err != nil {
		return err
	}
	if _, shared := a.namesake(r.id()); r.leases() && !shared {
		if err := a.cfg.IPAM.ReleaseHandle(storeCtx, handle(r.id())); err != nil {
			return storeError("release the address", err)
		}
	}
	if err := a.releaseGateways(storeCtx, r); err != nil {
		return storeError("release the gateway's address", err)
	}
	return nil
}

// cut removes the wire and what the host's kernel has for it. The caller has
// the attachment's locks, and the address is still the attachment's.
func (a *Attacher) cut(ctx context.Context, r record) error {
	if !r.AddressesOnly {
		if err := a.cfg.Wire.Detach(ctx, r.Device, r.id()); err != nil {
			return fmt.Errorf("cut the wire: %w", err)
		}
	}
	a.cfg.Sink.Update(dataplane.SourceWorkload, nil, a.goneWith(r))
	// Once the address is given back it may be another container's, whose route
	// a repeated cut must not withdraw.
	a.mu.Lock()
	defer a.mu.Unlock()
	if have, ok := a.records[r.id()]; ok {
		have.Addresses, have.cut = nil, true
		a.records[r.id()] = have
	}
	return nil
}

// goneWith is what the kernel of the host needs no more without an attachment.
func (a *Attacher) goneWith(r record) []dataplane.Key {
	gone := keysOf(r.wishes(a.cfg.Wire))
	if a.taken(r) {
		gone = slices.DeleteFunc(gone, func(k dataplane.Key) bool { return k.Kind() == dataplane.KindSysctl })
	}
	return gone
}

// taken reports whether another attachment has the device now.
func (a *Attacher) taken(r record) bool { return len(a.others(r)) > 0 }

// others returns the other attachments that have the device of r and are not on
// their way out.
func (a *Attacher) others(r record) []record {
	a.mu.Lock()
	defer a.mu.Unlock()
	var out []record
	for id, other := range a.records {
		if other.Device == r.Device && id != r.id() && other.State != stateReleasing {
			out = append(out, other)
		}
	}
	return out
}

// GC detaches every attachment of a network that valid does not list, as many
// as it can, and says which, also with an error. Besides its records it goes by
// the devices of this host and by the datastore's endpoints of this node: not by
// these, and with [ErrNotReady], while the host does not hold its name. An
// attachment that another call works on just now is left alone.
func (a *Attacher) GC(ctx context.Context, network string, valid []ID) (Collected, error) {
	if !a.isRestored() {
		return Collected{Unlisted: true}, errStarting()
	}
	stale, unlisted, listErr := a.garbage(ctx, network, valid)
	var (
		mu   sync.Mutex
		done = Collected{Unlisted: unlisted}
		errs []error
	)
	var g errgroup.Group
	g.SetLimit(parallelReleases)
	for id, r := range stale {
		g.Go(func() error {
			ok, err := a.collect(ctx, r)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				a.completeLater(id)
				errs = append(errs, fmt.Errorf("container %s, interface %s: %w", id.ContainerID, id.Interface, err))
			}
			if ok && err == nil {
				done.Removed = append(done.Removed, id)
			} else {
				done.Left = append(done.Left, id)
			}
			return nil
		})
	}
	_ = g.Wait()
	slices.SortFunc(done.Removed, compareIDs)
	slices.SortFunc(done.Left, compareIDs)
	return done, errors.Join(append(errs, listErr)...)
}

// collect releases one attachment unless it is busy or has changed since the
// garbage was listed.
func (a *Attacher) collect(ctx context.Context, listed record) (bool, error) {
	free, ok := a.locks.tryLock(attachmentLock(listed.id()))
	if !ok {
		return false, nil
	}
	defer free()
	freeShared, err := a.locks.lock(ctx, a.sharedLock(listed))
	if err != nil {
		return false, err
	}
	defer freeShared()
	r, known := a.record(listed.id())
	if known && r.State == stateReleasing && a.behind() {
		a.cutLater()
		return r.cut, nil // else the wire is still there
	}
	if known && (!r.Since.Equal(listed.Since) || r.State != listed.State) {
		return false, nil
	}
	if !known {
		r = listed
	}
	if a.behind() {
		return true, a.mark(ctx, r)
	}
	return true, a.release(ctx, r)
}

// garbage returns what is there of a network and not valid. What could be
// listed is returned also when the rest could not; unlisted: the wires could not.
func (a *Attacher) garbage(ctx context.Context, network string, valid []ID) (stale map[ID]record, unlisted bool, err error) {
	keep := make(map[ID]bool, len(valid))
	for _, id := range valid {
		id.Network = network
		keep[id] = true
	}
	stale = make(map[ID]record)
	add := func(r record) {
		if id := r.id(); r.Network == network && !keep[id] {
			if _, ok := stale[id]; !ok {
				stale[id] = r
			}
		}
	}
	for _, r := range a.snapshot() {
		add(r)
	}
	written, err := a.written(ctx, network)
	for _, r := range written {
		add(r)
	}
	errs := []error{err}
	devices, err := a.cfg.Wire.Devices(ctx)
	if err != nil {
		errs, unlisted = append(errs, err), true
	}
	for device, alias := range devices {
		if owner, ok := workload.ParseAlias(alias); ok {
			r := recordOf(owner, Workload{})
			r.Device = device
			add(r)
		}
	}
	return stale, unlisted, errors.Join(errs...)
}

// written returns what the datastore shows of a network on this host. What is
// shown while the host does not hold its name is not its own.
func (a *Attacher) written(ctx context.Context, network string) ([]record, error) {
	if err := a.held(); err != nil {
		return nil, fmt.Errorf("list workload endpoints: %w", err)
	}
	ctx, cancel := a.storeContext(ctx)
	defer cancel()
	endpoints, _, err := a.cfg.Store.List(ctx, store.KindWorkloadEndpoint, "")
	switch {
	case errors.Is(err, store.ErrDecode):
		err = nil // the others count
	case err != nil:
		err = storeError("list workload endpoints", err)
	}
	var out []record
	for _, o := range endpoints {
		w, ok := o.Value.(*store.WorkloadEndpoint)
		if !ok || w.Spec.Node != a.cfg.Node || !slices.Contains(w.Spec.Profiles, network) {
			continue
		}
		out = append(out, recordOf(ID{Network: network, ContainerID: w.Spec.ContainerID, Interface: w.Spec.Endpoint},
			Workload{Orchestrator: w.Spec.Orchestrator, Namespace: w.Namespace, Pod: w.Spec.Pod}))
	}
	return out, err
}
