package attach

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/routerd/routerd/dataplane/workload"
)

// Collected is what GC did.
type Collected struct {
	Removed []ID
	// Left are those that are not valid and still there: their release failed, or
	// another call works on them.
	Left []ID
	// Unlisted says that there may be more: it is not known which wires are there.
	Unlisted bool
}

// GC detaches every attachment of a network that valid does not list, as many
// as it can, and says which, also with an error. Besides its records it goes by
// the devices of this host and by the datastore's endpoints of this node: not by
// these, and with [ErrNotReady], while the host does not hold its name. An
// attachment that another call works on just now is left alone.
func (a *Attacher) GC(ctx context.Context, network string, valid []ID) (Collected, error) {
	if !a.ledger.restored() {
		return Collected{Unlisted: true}, errStarting()
	}
	garbage, unlisted, listErr := a.garbage(ctx, network, valid)
	var (
		mu   sync.Mutex
		done = Collected{Unlisted: unlisted}
		errs []error
	)
	var g errgroup.Group
	g.SetLimit(parallelReleases)
	for id, r := range garbage {
		g.Go(func() error {
			ok, err := a.collect(ctx, r)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				a.schedule.failed(id)
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
	l, err := a.locks.lockBy(ctx, listed, func(ctx context.Context, key string) (func(), error) {
		if key != attachmentLock(listed.id()) {
			return a.locks.keys.lock(ctx, key)
		}
		if free, ok := a.locks.keys.tryLock(key); ok {
			return free, nil
		}
		return nil, errBusy
	})
	switch {
	case errors.Is(err, errBusy):
		return false, nil
	case err != nil:
		return false, err
	}
	defer l.unlock()
	r, known := l.record, l.known
	if known && r.State.leaving() && a.behind() {
		a.releaser.wires.Set()
		return r.State.detached(), nil // else the wire is still there
	}
	if known && (!r.Since.Equal(listed.Since) || r.State.phase() != listed.State.phase()) {
		return false, nil
	}
	if a.behind() {
		return true, a.releaser.answer(ctx, r)
	}
	return true, a.releaser.release(ctx, r)
}

// garbage returns what is there of a network and not valid. What could be
// listed is returned also when the rest could not; unlisted: the wires could not.
func (a *Attacher) garbage(ctx context.Context, network string, valid []ID) (out map[ID]record, unlisted bool, err error) {
	keep := make(map[ID]bool, len(valid))
	for _, id := range valid {
		id.Network = network
		keep[id] = true
	}
	out = make(map[ID]record)
	add := func(r record) {
		if id := r.id(); r.Network == network && !keep[id] {
			if _, ok := out[id]; !ok {
				out[id] = r
			}
		}
	}
	for _, r := range a.ledger.snapshot() {
		add(r)
	}
	written, err := a.endpoints.list(ctx, network)
	for _, r := range written {
		add(r)
	}
	errs := []error{err}
	devices, err := a.host.Devices(ctx)
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
	return out, unlisted, errors.Join(errs...)
}
