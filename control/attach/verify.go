package attach

import (
	"context"
	"errors"
	"fmt"

	"github.com/routerd/routerd/store"
)

// doubt says that addresses of running workloads may be another's by now. The
// Attacher's lock guards it.
type doubt struct {
	epoch   int           // how often it was raised
	settled chan struct{} // closed when there is none; nil: there never was
	open    bool
}

// Doubt says that what was assigned to this host's workloads may be somebody
// else's by now: its Node was deleted, or it is in a new epoch. ADD waits until
// each workload has been compared with the datastore once: what is still its
// own, or free, it keeps, or takes again; of what is another's the routes are
// taken down and the workload is named (see [Endpoint]). It does not block.
func (a *Attacher) Doubt() {
	a.mu.Lock()
	defer a.mu.Unlock()
	attached := !a.restored
	for _, r := range a.records {
		attached = attached || r.State == stateAttached
	}
	if !attached {
		return // what comes from now on is of the new epoch
	}
	a.doubt.epoch++
	if !a.doubt.open {
		a.doubt.open, a.doubt.settled = true, make(chan struct{})
	}
	a.forgotten = true
	select {
	case a.back <- struct{}{}:
	default:
	}
}

// Verified waits until no doubt is left: see [Attacher.Doubt].
func (a *Attacher) Verified(ctx context.Context) error {
	for {
		a.mu.Lock()
		open, settled := a.doubt.open, a.doubt.settled
		a.mu.Unlock()
		if !open {
			return nil
		}
		select {
		case <-settled:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// errVerifying says why there is no ADD yet, while the datastore answers.
func (a *Attacher) errVerifying() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.doubt.open || a.storeAway {
		return nil
	}
	return fmt.Errorf("the addresses of the workloads on this host are being compared with the datastore: %w", ErrNotReady)
}

// settle takes in that each workload was compared with the datastore since the
// doubt of an epoch was raised.
func (a *Attacher) settle(epoch int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.doubt.open && a.doubt.epoch == epoch {
		a.doubt.open = false
		close(a.doubt.settled)
	}
}

// FenceForeign takes down the routes of workloads whose addresses others hold
// in the datastore, and writes nothing there: it is for a host that must not,
// because another has its name. What is free, or cannot be read, stays.
func (a *Attacher) FenceForeign(ctx context.Context) error {
	devices, err := a.cfg.Wire.Devices(ctx)
	if err != nil {
		return err
	}
	var errs []error
	for id, r := range a.snapshot() {
		if r.State != stateAttached || r.Given || r.Lost != "" || !r.there(devices) {
			continue
		}
		cause, err := a.foreign(ctx, r)
		if err == nil && cause != nil {
			err = a.fenceNow(ctx, id, cause)
		}
		if errs = append(errs, err); ctx.Err() != nil {
			break
		}
	}
	return errors.Join(errs...)
}

func (a *Attacher) fenceNow(ctx context.Context, id ID, cause error) error {
	unlock, r, known, err := a.lock(ctx, id, Workload{})
	if err != nil {
		return err
	}
	defer unlock()
	if !known || r.State != stateAttached {
		return nil
	}
	return a.fence(r, cause)
}

// foreign says who else holds an address of an attachment; nil: nobody.
func (a *Attacher) foreign(ctx context.Context, r record) (cause, err error) {
	ctx, cancel := a.storeContext(ctx)
	defer cancel()
	for _, addr := range r.Addresses {
		obj, err := a.cfg.Store.Get(ctx, store.BlockKey(addr.Block))
		switch {
		case errors.Is(err, store.ErrNotFound), errors.Is(err, store.ErrDecode):
			continue
		case err != nil:
			return nil, storeError("read block "+addr.Block.String(), err)
		}
		b, ok := obj.Value.(*store.Block)
		if !ok {
			continue
		}
		if holder := holderOf(b, addr); holder != "" && holder != handle(r.id()) {
			return fmt.Errorf("%s is held by %s: %w", addr.Addr, holder, ErrHeld), nil
		}
	}
	return nil, nil
}

// holderOf returns the handle of who holds an address of a block for something
// that runs; empty: nobody.
func holderOf(b *store.Block, want Address) string {
	addr := want.Block.Addr()
	for _, i := range b.Allocations {
		if addr == want.Addr {
			if i == nil || *i < 0 || *i >= len(b.Attributes) {
				return ""
			}
			at := b.Attributes[*i]
			if at.HandleID == nil || at.ReleasedAt != nil || at.Secondary["type"] == attrReserve {
				return ""
			}
			return *at.HandleID
		}
		addr = addr.Next()
	}
	return ""
}

// attrReserve is the type of what a host holds ready, as package ipam writes it.
const attrReserve = "routerdReserve"
