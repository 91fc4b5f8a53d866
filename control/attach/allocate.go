package attach

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"
)

// AllocateRequest asks for addresses alone: another plugin makes the
// interface.
type AllocateRequest struct {
	ID              ID
	Workload        Workload
	Node            string // the node that the request means; empty: whichever this is
	IPv4, IPv6      bool
	IPv4Pools       []string // names or CIDRs; empty: chosen by the pools' selectors
	IPv6Pools       []string
	Addresses       []netip.Addr // these, at most one of a family
	NamespaceLabels map[string]string
	PodUID          string // empty: the runtime does not say it

	// Link is the host's device behind which the container is, such as a
	// bridge: the host routes the addresses there. Empty: the other plugin sees
	// to it.
	Link string
	// Gateway keeps an address of each block for the host itself, to be the
	// gateway of the block's containers, and keeps the block's first and last
	// address from them, which on a shared link mean something else.
	Gateway bool
}

// Allocate gives addresses. A repeat returns the same. [Attacher.Del] and
// [Attacher.GC] take them back; until then they are a workload's, also across
// restarts, though nothing else is known of it.
func (a *Attacher) Allocate(ctx context.Context, req AllocateRequest) (Result, error) {
	if err := a.errNotServing(); err != nil {
		return Result{}, err
	}
	add, _, err := a.completed(ctx, AddRequest{
		ID: req.ID, Workload: req.Workload, Node: req.Node, IPv4: req.IPv4, IPv6: req.IPv6,
		IPv4Pools: req.IPv4Pools, IPv6Pools: req.IPv6Pools, Addresses: req.Addresses, NamespaceLabels: req.NamespaceLabels, PodUID: req.PodUID,
	})
	if err == nil {
		err = checkNames(req.ID)
	}
	if err == nil {
		err = checkRequested(add)
	}
	if err != nil {
		return Result{}, err
	}
	l, err := a.locks.lock(ctx, req.ID, req.Workload)
	if err != nil {
		return Result{}, err
	}
	defer l.unlock()
	if l.State.attached() {
		if !l.AddressesOnly {
			return Result{}, fmt.Errorf("%w: %w", errRole(l.record), ErrInvalid)
		}
		return l.result(), nil
	}
	r := recordOf(req.ID, req.Workload)
	r.Since = time.Now().UTC().Truncate(time.Millisecond)
	r.AddressesOnly, r.Device = true, req.Link
	if r, l.known, err = a.followAllocation(ctx, req, r, l); err != nil {
		return Result{}, err
	}
	x := &addition{Attacher: a, req: add, r: r, inherits: l.known || r.Reused}
	if err := x.runAllocation(ctx, req.Gateway); err != nil {
		return Result{}, errors.Join(err, a.releaser.undo(ctx, x.r, err))
	}
	return x.r.result(), nil
}

// followAllocation is follow for an allocation. One with a gateway asks the
// datastore anyway.
func (a *Attacher) followAllocation(ctx context.Context, req AllocateRequest, r record, l locked) (record, bool, error) {
	if !req.Gateway || !l.known || !l.State.leaving() || !a.behind() {
		return a.follow(ctx, r, l.record, l.known)
	}
	if err := a.ledger.errNamesake(r); err != nil {
		return r, false, err
	}
	if err := a.releaser.release(ctx, l.record); err != nil {
		a.schedule.failed(r.id())
		return r, false, fmt.Errorf("release what an earlier call left: %w", err)
	}
	return r, false, nil
}

// runAllocation gets addresses alone, step by step.
func (x *addition) runAllocation(ctx context.Context, gateway bool) error {
	err := x.steps.run(ctx,
		step{"intent", x.intent},
		step{"address", func(ctx context.Context) error { return x.allocate(ctx, gateway) }},
		step{"vacant", func(ctx context.Context) error { return x.reclaimer.vacant(ctx, x.r) }},
		step{"done", func(ctx context.Context) error {
			if err := x.done(ctx); err != nil {
				return err
			}
			return x.ledger.sync()
		}},
		step{"route", func(context.Context) error {
			// The device may come into being after this call: the kernel's owner waits
			// for it.
			x.host.show(x.r)
			return nil
		}},
	)
	if err == nil && x.later {
		x.work.Set()
	}
	return err
}

// allocate gets the addresses.
func (x *addition) allocate(ctx context.Context, gateway bool) (err error) {
	if gateway {
		x.r.Addresses, err = x.gateways.assignInside(ctx, x.req, x.r)
		return err
	}
	if err := x.address(ctx); err != nil {
		return err
	}
	for i := range x.r.Addresses {
		x.r.Addresses[i].Gateway = netip.Addr{}
	}
	return nil
}
