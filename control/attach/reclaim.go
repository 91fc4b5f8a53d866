package attach

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/store"
)

// reclaimer gives the datastore back what it forgot of living workloads, and
// takes the routes of those down whose addresses another has by now.
type reclaimer struct {
	node      string
	ledger    *ledger
	locks     *locks
	host      *host
	addresses *addresses
	endpoints *endpoints
	store     *datastore
	schedule  *schedule
	log       *slog.Logger
	work      async.Signal // the datastore is to be written
	now       async.Signal // nothing that failed before counts

	mu                sync.Mutex
	forgotten         bool // the datastore may lack what is attached
	synced, nodeKnown bool // what the watch says of this host's Node
	kindFile          string
	moved             bool // what is attached is to be written to a datastore of another kind than before
	// That addresses of running workloads may be another's by now is a doubt.
	doubt    bool
	epoch    int           // how often it was raised
	verified chan struct{} // closed when there is none; nil: there never was
}

// handle takes account of this host's Node in a step of the cluster's copy.
func (x *reclaimer) handle(s cluster.Step) {
	x.mu.Lock()
	defer x.mu.Unlock()
	forgot := false
	for _, ev := range s.Changes {
		if ev.Err != nil || ev.Key.Kind != store.KindNode || ev.Key.Name != x.node {
			continue
		}
		x.nodeKnown = ev.Value != nil
		forgot = forgot || !x.nodeKnown
	}
	if s.Synced && !x.synced {
		x.synced = true
		// On a new host nothing is attached yet, and nothing was forgotten.
		forgot = forgot || !x.nodeKnown && x.ledger.has(func(state) bool { return true })
	}
	if forgot || x.forgotten || x.freed(s) || x.givenBack(s) {
		x.arm()
	}
}

// settling is how old an attachment without an endpoint has to be for what a block says
// of it to count: the block may be of the time before. Others have an endpoint, which is
// written after the address is theirs.
const settling = 5 * time.Second

// young reports whether an attachment is so new. One from the future is not: the
// clock went back.
func (r record) young() bool {
	age := time.Since(r.Since)
	return age >= 0 && age < settling
}

// freed reports whether a block says of an address that lives on this host that it
// is free, or another has it: as where an operator released it, or deleted the block.
func (x *reclaimer) freed(s cluster.Step) bool {
	var living []record
	for _, ev := range s.Changes {
		if ev.Err != nil || ev.Key.Kind != store.KindIPAMBlock {
			continue
		}
		if living == nil {
			living = x.ledger.settled()
		}
		b, _ := ev.Value.(*cluster.Block)
		rev := s.Revision
		if b != nil {
			rev = b.Revision
		}
		for _, r := range living {
			// An endpoint from further on than the datastore is of one that was restored from
			// a snapshot since: it says nothing of what is older.
			if rev <= r.Endpoint && r.Endpoint <= s.Revision || r.Endpoint == 0 && r.young() {
				continue
			}
			// Once the endpoint is there the address was the workload's own: a block from
			// further on by which it is reserved is of a datastore that was restored.
			reserved := r.State == attachedPatched || r.Endpoint == 0 || rev <= r.Endpoint
			for _, a := range r.addrs() {
				if ev.Key.CIDR().Contains(a) && !x.holds(b, a, r, reserved) {
					x.log.Warn("a workload's address was released in the datastore; it is assigned again", append(logID(r.id()), "address", a)...)
					return true
				}
			}
		}
	}
	return false
}

// givenBack reports whether a block says of an address that a workload of this host lost
// to another that it is free, or the workload's again.
func (x *reclaimer) givenBack(s cluster.Step) bool {
	var lost []record
	for _, ev := range s.Changes {
		if ev.Err != nil || ev.Key.Kind != store.KindIPAMBlock {
			continue
		}
		if lost == nil {
			lost = x.ledger.fenced()
		}
		b, _ := ev.Value.(*cluster.Block)
		for _, r := range lost {
			for _, a := range r.addrs() {
				if ev.Key.CIDR().Contains(a) && (free(b, a) || x.holds(b, a, r, false)) {
					x.log.Info("the address that a workload lost is free again; it is assigned again", append(logID(r.id()), "address", a)...)
					return true
				}
			}
		}
	}
	return false
}

// free reports whether a block, nil: there is none any more, has an address as free.
// Of others' blocks that is not known here.
func free(b *cluster.Block, a netip.Addr) bool {
	if b == nil {
		return true
	}
	whole := b.Value()
	if whole == nil {
		return false
	}
	n, _ := whole.Ordinal(a)
	return whole.Attribute(n) == nil
}

// holds reports whether a block, nil: there is none any more, gives an address to a
// workload of this host, or to its reserve where that counts.
func (x *reclaimer) holds(b *cluster.Block, a netip.Addr, r record, reserved bool) bool {
	if b == nil {
		return false
	}
	whole := b.Value()
	if whole == nil {
		// Of others' blocks is known which addresses this host borrowed.
		return slices.Contains(b.Borrowed, cluster.Borrowed{Addr: a, Node: x.node})
	}
	n, _ := whole.Ordinal(a)
	at := whole.Attribute(n)
	return at != nil && at.HandleID != nil && (*at.HandleID == handle(r.id()) || reserved && *at.HandleID == store.ReserveHandle(x.node))
}

// later has [Attacher.Run] take up again what the datastore forgot.
func (x *reclaimer) later() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.arm()
}

// arm is later for who has the lock. A try that is to come, or due, is not put off
// by more reasons for it.
func (x *reclaimer) arm() {
	if x.forgotten && x.schedule.armed(ID{}) {
		return
	}
	x.forgotten = true
	x.schedule.failed(ID{})
}

// raise raises the doubt: see [Attacher.Doubt].
func (x *reclaimer) raise() {
	if !x.ledger.has(state.attached) {
		return // what comes from now on is of the new epoch
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.epoch++
	if !x.doubt {
		x.doubt, x.verified = true, make(chan struct{})
	}
	x.forgotten = true
	x.now.Set()
}

// wait waits until there is no doubt.
func (x *reclaimer) wait(ctx context.Context) error {
	for {
		x.mu.Lock()
		doubt, verified := x.doubt, x.verified
		x.mu.Unlock()
		if !doubt {
			return nil
		}
		select {
		case <-verified:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// errDoubt says why there is no ADD yet, while the datastore answers.
func (x *reclaimer) errDoubt() error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if !x.doubt || x.store.isAway() {
		return nil
	}
	return fmt.Errorf("the addresses of the workloads on this host are being compared with the datastore: %w", ErrNotReady)
}

// settle ends the doubt of an epoch: each workload was compared with the
// datastore since it was raised.
func (x *reclaimer) settle(epoch int) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.doubt && x.epoch == epoch {
		x.doubt = false
		close(x.verified)
	}
}

// all takes up again what the datastore forgot, and reports whether nothing is
// left to be taken up.
func (x *reclaimer) all(ctx context.Context) bool {
	x.mu.Lock()
	due, epoch := x.forgotten && x.ledger.restored(), x.epoch
	if due {
		x.forgotten = false // another deletion from here on counts anew
	}
	x.mu.Unlock()
	if !due {
		return true
	}
	compared, err := x.each(ctx)
	if err != nil {
		x.log.Warn("not all workloads missing from the datastore were written again; will try again", "error", err)
		x.later()
	} else {
		x.written()
	}
	if compared {
		x.settle(epoch)
	}
	return err == nil
}

// each goes through the workloads that live here. It reports whether each was
// compared with the datastore: its addresses are its own again, its routes are
// down, or the datastore answered with a refusal.
func (x *reclaimer) each(ctx context.Context) (compared bool, err error) {
	devices, err := x.host.Devices(ctx)
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
	for id, r := range x.ledger.snapshot() {
		if !r.State.attached() || !r.onHost(devices) {
			continue
		}
		g.Go(func() error {
			one, err := x.one(ctx, id)
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

// one takes up one workload again. It reports whether its addresses were compared
// with the datastore, whatever became of its endpoint.
func (x *reclaimer) one(ctx context.Context, id ID) (compared bool, err error) {
	l, err := x.locks.lock(ctx, id, Workload{})
	if err != nil {
		return false, err
	}
	defer l.unlock()
	r := l.record
	if !r.State.attached() {
		return true, nil
	}
	x.ledger.note(id, asked, nil)
	if err := x.addresses.regain(ctx, r); err != nil {
		if heldByOther(err) {
			err = x.fence(r, err)
			return err == nil, err
		}
		// One that the datastore refuses, and that is tried again, is no reason to
		// keep others waiting.
		return refused(err) || unserviceable(err), err
	}
	if r.State == attachedFenced {
		r.Fenced = ""
		if r, err = x.ledger.save(r, regained); err != nil {
			return false, err
		}
		x.host.show(r)
		x.log.Info("a workload has its address and its route again", logID(id)...)
	}
	return true, x.endpoint(ctx, r)
}

// endpoint writes the endpoint of a workload again.
func (x *reclaimer) endpoint(ctx context.Context, r record) error {
	if r.AddressesOnly {
		return nil
	}
	rev, err := x.endpoints.putNow(ctx, r, "write the workload endpoint of "+handle(r.id())+" again")
	if err != nil || rev == r.Endpoint && !r.State.pending() {
		return err
	}
	r.Endpoint = rev
	if r.Reused {
		x.work.Set() // the flush releases what is left of the earlier container
		_, err = x.ledger.save(r, completed)
		return err
	}
	r.Claims = nil
	x.log.Info("workload written to the datastore again", logID(r.id())...)
	_, err = x.ledger.save(r, stored)
	return err
}

// fence takes down the routes of a workload whose address became another
// workload's, while this host could not know: two owners are worse than none. The
// workload is named until it is detached.
func (x *reclaimer) fence(r record, cause error) error {
	if r.State == attachedFenced {
		return nil
	}
	// The route goes first: that the disk is full is no reason to keep it.
	x.host.withdrawRoutes(r)
	r.Fenced, r.Claims = cause.Error(), nil
	if _, err := x.ledger.save(r, fenced); err != nil {
		return fmt.Errorf("note that %s lost its address: %w", handle(r.id()), err)
	}
	x.log.Error("a workload's address now belongs to something else, so its route is removed; recreate the workload",
		append(logID(r.id()), "pod", r.Pod, "addresses", r.addrs(), "error", cause)...)
	return nil
}

// fenceForeign is [Attacher.FenceForeign].
func (x *reclaimer) fenceForeign(ctx context.Context) error {
	devices, err := x.host.Devices(ctx)
	if err != nil {
		return err
	}
	var errs []error
	for id, r := range x.ledger.snapshot() {
		if !r.State.attached() || r.Given || r.State == attachedFenced || !r.onHost(devices) {
			continue
		}
		cause, err := x.addresses.foreign(ctx, r)
		if err == nil && cause != nil {
			err = x.fenceNow(ctx, id, cause)
		}
		if errs = append(errs, err); ctx.Err() != nil {
			break
		}
	}
	return errors.Join(errs...)
}

func (x *reclaimer) fenceNow(ctx context.Context, id ID, cause error) error {
	l, err := x.locks.lock(ctx, id, Workload{})
	if err != nil {
		return err
	}
	defer l.unlock()
	if !l.State.attached() {
		return nil
	}
	return x.fence(l.record, cause)
}

// vacant verifies that no other workload of this host lives with an address
// that IPAM just gave to r: IPAM may have been made to forget it.
func (x *reclaimer) vacant(ctx context.Context, r record) error {
	for id, other := range x.ledger.snapshot() {
		if id == r.id() || !other.State.attached() {
			continue
		}
		i := slices.IndexFunc(other.Addresses, func(have Address) bool { return slices.Contains(r.addrs(), have.Addr) })
		if i < 0 {
			continue
		}
		devices, err := x.host.Devices(ctx)
		if err != nil {
			return err
		}
		if !other.onHost(devices) {
			continue
		}
		x.later()
		return fmt.Errorf("assign an address: %s is still in use by %s, which the datastore forgot: %w", other.Addresses[i].Addr, handle(id), ErrNotReady)
	}
	return nil
}
