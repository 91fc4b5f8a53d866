package attach

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/store"
)

// releaser takes attachments off the host and out of the datastore.
type releaser struct {
	behind    bool // see Config.Behind
	ledger    *ledger
	locks     *locks
	host      *host
	store     *datastore
	addresses *addresses
	endpoints *endpoints
	gateways  *gateways
	own       *ownWrites
	flusher   *flusher
	pods      *pods
	linger    time.Duration // see Config.LingerEnd
	schedule  *schedule
	steps     *runner
	log       *slog.Logger
	wires     async.Signal // wires are to be removed
}

// undoTimeout bounds what is done after a failure. It runs in a context of its
// own: the caller's may be what ended.
const undoTimeout = 10 * time.Second

// release removes all of an attachment, the record last. The caller has its
// locks. The address is released only after the wire is gone.
func (x *releaser) release(ctx context.Context, r record) error {
	err := x.steps.run(ctx,
		step{"mark", func(context.Context) error { return x.markIfKnown(r) }},
		step{"detach", func(ctx context.Context) error { return x.host.detach(ctx, r) }},
	)
	if err != nil {
		return err
	}
	return x.finish(ctx, r)
}

// markIfKnown marks an attachment as on its way out. The caller's record may know
// more than the one on disk, which stays as it is but for that.
func (x *releaser) markIfKnown(r record) error {
	have, known := x.ledger.get(r.id())
	if !known || have.State.leaving() {
		return nil
	}
	_, err := x.ledger.advance(r, released)
	return err
}

// finish removes the rest of an attachment that is detached.
func (x *releaser) finish(ctx context.Context, r record) error {
	if x.ledger.state(r.id()).withoutStore() {
		return x.steps.run(ctx, step{"forget", func(context.Context) error { return x.forget(r) }})
	}
	if err := x.store.held(); err != nil {
		return fmt.Errorf("release the attachment: %w", err)
	}
	storeCtx, cancel := x.store.context(ctx)
	defer cancel()
	return x.steps.run(storeCtx,
		step{"delete endpoint", func(ctx context.Context) error { return x.dropEndpoint(ctx, r) }},
		step{"release address", func(ctx context.Context) error { return x.releaseAddresses(ctx, r) }},
		step{"forget", func(context.Context) error { return x.forget(r) }},
	)
}

func (x *releaser) dropEndpoint(ctx context.Context, r record) error {
	if err := x.flusher.wait(ctx); err != nil {
		return storeError("release the attachment", err)
	}
	if x.endpoints.kubernetes && x.pods.over(r) {
		return nil
	}
	if err := x.endpoints.drop(ctx, r); err != nil {
		return storeError("delete the workload endpoint", err)
	}
	return nil
}

func (x *releaser) releaseAddresses(ctx context.Context, r record) error {
	if _, shared := x.ledger.namesake(r.id()); r.leases() && !shared && !x.ledger.state(r.id()).unassigned() {
		if err := x.addresses.releaseHandle(ctx, handle(r.id())); err != nil {
			return storeError("release the address", err)
		}
	}
	if err := x.gateways.release(ctx, r); err != nil {
		return storeError("release the gateway's address", err)
	}
	return nil
}

// forget removes the record, the last that there is of an attachment.
func (x *releaser) forget(r record) error {
	old, known := x.ledger.get(r.id())
	if err := x.addresses.forget(r.id()); err != nil {
		return err
	}
	x.schedule.done(r.id())
	if known {
		x.own.ended(old)
	}
	return nil
}

// answer answers a DEL before the datastore knows: from here on the attachment is
// on its way out, also after the loss of power. The rest is the work of
// [Attacher.Run]. The caller has the attachment's locks.
func (x *releaser) answer(ctx context.Context, r record) error {
	err := x.steps.run(ctx,
		step{"mark", func(context.Context) error {
			var err error
			r, err = x.ledger.advance(r, released)
			return err
		}},
		step{"answer", func(context.Context) error {
			x.schedule.done(r.id())
			if x.lingers(r) {
				x.schedule.await(r.id(), x.linger)
			}
			x.host.withdraw(r)
			x.own.announceEnd(r)
			return x.ledger.sync()
		}},
	)
	if err == nil {
		x.wires.Set()
	}
	return err
}

// lingers reports whether the datastore need not hear of an attachment's end at once. An
// address that was asked for by name may be so again, by a pod on any node.
func (x *releaser) lingers(r record) bool {
	return x.linger > 0 && x.endpoints.kubernetes && !x.endpoints.local(r) && !r.Named && !r.State.withoutStore()
}

// hurry releases what lingers, for an attachment under way that can have no address: one that
// it could have may be among what goes. It reports whether there was anything. What another call
// is about goes soon after.
func (x *releaser) hurry(ctx context.Context, own record) bool {
	var g errgroup.Group
	g.SetLimit(parallelReleases)
	ids := slices.DeleteFunc(x.schedule.awaited(), func(id ID) bool { return !x.ledger.state(id).leaving() })
	for _, id := range ids {
		g.Go(func() error {
			l, err := x.locks.lockBeside(ctx, id, own)
			if err != nil {
				x.schedule.await(id, 0)
				return nil
			}
			defer l.unlock()
			if !l.State.leaving() {
				return nil
			}
			if err := x.release(ctx, l.record); err != nil {
				x.schedule.await(id, 0)
				x.log.Debug("release of an attachment is still incomplete; will try again", append(logID(id), "error", err)...)
			}
			return nil
		})
	}
	_ = g.Wait()
	return len(ids) > 0
}

// undo takes back what a failed ADD made. The error says what it could not.
func (x *releaser) undo(ctx context.Context, r record, cause error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	x.own.announceEnd(r)
	var err error
	if errors.Is(cause, store.ErrUnavailable) || x.behind && !x.ledger.state(r.id()).withoutStore() {
		// Asking a datastore that is away costs the caller time and gains nothing.
		r, err = x.ledger.save(r, released)
		err = errors.Join(err, x.host.detach(ctx, r))
		x.schedule.failed(r.id())
	} else if err = x.release(ctx, r); err != nil {
		x.schedule.failed(r.id())
	}
	if err != nil {
		return fmt.Errorf("undo: %w", err)
	}
	return nil
}

// succeed prepares the record of an attachment that follows on one with the same
// names that is on its way out, old. It does not wait for the datastore, which
// may know of the former's addresses, or be written just now: they are released
// when this one is flushed. The caller has the locks.
func (x *releaser) succeed(ctx context.Context, r, old record) (record, error) {
	if x.ledger.state(old.id()).withoutStore() {
		return r, x.release(ctx, old)
	}
	if !old.State.detached() {
		if err := x.host.detach(ctx, old); err != nil {
			return r, err
		}
	}
	x.schedule.done(r.id())
	r.Reused = old.Reused || !old.Given
	r.Former = append(slices.Clone(old.Former), old.Claims...)
	return r, nil
}

// takeOver has the earlier containers of the pod whose device r has now released
// without it. It returns what they wanted of the kernel.
func (x *releaser) takeOver(r record) (earlier []record, err error) {
	for _, other := range x.ledger.sharing(r) {
		earlier = append(earlier, other)
		other.Addresses = nil
		if _, err := x.ledger.save(other, released); err != nil {
			return nil, err
		}
		x.log.Info("device taken over from an earlier container of the pod",
			append(logID(other.id()), "device", r.Device, "next", r.ContainerID)...)
		x.schedule.failed(other.id())
	}
	return earlier, nil
}

// parallelDetaches is how many wires are removed at once: the kernel deletes a
// group of devices in the time of one.
const parallelDetaches = 64

// runWires removes the wires of what is on its way out, whatever the datastore
// does, and has the rest done.
func (x *releaser) runWires(ctx context.Context, rest async.Signal) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-x.wires:
		}
		x.detachAll(ctx)
		rest.Set()
	}
}

// detachAll reports whether no wire is left of what is on its way out. What goes
// without the datastore is released too.
func (x *releaser) detachAll(ctx context.Context) bool {
	var g errgroup.Group
	g.SetLimit(parallelDetaches)
	for id, r := range x.ledger.snapshot() {
		if !r.State.leaving() || r.State.detached() {
			continue
		}
		g.Go(func() error {
			l, ok := x.locks.tryLock(id)
			if !ok {
				return nil // whoever has it detaches it
			}
			defer l.unlock()
			if !l.State.leaving() {
				return nil
			}
			err := x.host.detach(ctx, l.record)
			if err == nil && l.State.withoutStore() {
				err = x.finish(ctx, l.record)
			}
			if err != nil {
				x.schedule.failed(id)
			}
			return err
		})
	}
	if err := g.Wait(); err != nil {
		x.log.Warn("not all workload devices were removed; will try again", "error", err)
		return false
	}
	return true
}

// parallelReleases bounds how many attachments are released at once by
// background work and GC.
const parallelReleases = 16

// complete tries to finish every interrupted release, but for those that are to
// be tried again later, and reports whether none is left. With the first that has waited
// for its pod's end go those whose pod has ended meanwhile.
func (x *releaser) complete(ctx context.Context, later func(ID) bool) bool {
	var (
		mu   sync.Mutex
		left int
	)
	all := x.ledger.snapshot()
	if x.linger > 0 {
		x.schedule.gather(all, func(r record) bool { return r.State.leaving() }, later, x.pods.over)
	}
	note := func(id ID, err error) {
		mu.Lock()
		defer mu.Unlock()
		if left++; left == 1 && err != nil {
			x.log.Warn("release of an attachment is still incomplete; will try again", append(logID(id), "error", err)...)
		}
	}
	var g errgroup.Group
	g.SetLimit(parallelReleases)
	for id, r := range all {
		switch {
		case !r.State.leaving():
		case later(id):
			note(id, nil)
		case r.State.detached() && !r.State.withoutStore() && !x.store.writable():
			// It would only wait for the datastore, whose return or first answer wakes Run.
			x.schedule.failed(id)
			note(id, nil)
		default:
			g.Go(func() error {
				err := x.completeOne(ctx, id, later)
				switch {
				case err == nil:
					return nil
				case errors.Is(err, errLater):
					note(id, nil)
					return nil
				}
				x.schedule.failed(id)
				if errors.Is(err, context.Canceled) {
					err = nil // another verb needed its locks
				}
				note(id, err)
				return nil
			})
		}
	}
	_ = g.Wait()
	return left == 0
}

// errLater says that an attachment is to be tried later.
var errLater = errors.New("later")

// completeOne finishes an interrupted release, unless later says, now that no other call is about the
// attachment, that it waits: the DEL that had the lock says so last.
func (x *releaser) completeOne(ctx context.Context, id ID, later func(ID) bool) error {
	l, err := x.locks.lockBy(ctx, recordOf(id, Workload{}), x.locks.keys.await)
	if err != nil {
		return err
	}
	defer l.unlock()
	// Who asks for the container or its device does not wait for the datastore.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	x.locks.keys.yield(attachmentLock(id), cancel)
	x.locks.keys.yield(x.locks.shared(l.record), cancel)
	if !l.State.leaving() {
		x.schedule.done(id)
		return nil
	}
	if later(id) {
		return errLater
	}
	if err := x.release(ctx, l.record); err != nil {
		return err
	}
	x.log.Debug("release completed", logID(id)...)
	return nil
}
