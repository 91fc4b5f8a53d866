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

	"github.com/routerd/routerd/dataplane/workload"
)

// MTU is what workloads get, in bytes; see [Attacher.SetMTU].
type MTU struct {
	IPv4, IPv6 int // what the pools of the family leave; 0: not known
	// Operator is what the operator set for all workloads of this host, whatever
	// the pools leave; 0: nothing.
	Operator int
}

// minIPv6MTU is what every link with IPv6 must take (RFC 8200, section 5): the
// kernel takes IPv6 off a device with less.
const minIPv6MTU = 1280

// of is the MTU of a workload that has addresses of these families; 0: not
// known. A device has one MTU, so it is the smaller.
func (m MTU) of(v4, v6 bool) int {
	if m.Operator != 0 {
		return m.Operator
	}
	switch {
	case v4 && v6 && (m.IPv4 == 0 || m.IPv6 == 0):
		return 0
	case v4 && v6:
		return max(min(m.IPv4, m.IPv6), minIPv6MTU)
	case v6 && m.IPv6 != 0:
		return max(m.IPv6, minIPv6MTU)
	case v6:
		return 0
	}
	return m.IPv4
}

// Max returns the larger of each.
func (m MTU) Max(o MTU) MTU {
	return MTU{max(m.IPv4, o.IPv4), max(m.IPv6, o.IPv6), max(m.Operator, o.Operator)}
}

// mtus brings workloads to their MTU.
type mtus struct {
	dir    string // of the file
	ledger *ledger
	locks  *locks
	host   *host
	steps  *runner
	log    *slog.Logger

	mu            sync.Mutex
	want, reached MTU

	pass sync.Mutex // held while workloads are brought to another MTU
	file mtuState   // guarded by pass once restored
}

// set is [Attacher.SetMTU].
func (x *mtus) set(ctx context.Context, m MTU) error {
	x.pass.Lock()
	defer x.pass.Unlock()
	restored := x.ledger.restored()
	if restored {
		// Before any workload gets it, so that no kill leaves one that has an MTU
		// which is noted nowhere.
		if err := x.setOut(m); err != nil {
			return err
		}
	}
	x.mu.Lock()
	x.want, x.reached = m, x.reached.Max(m)
	x.mu.Unlock()
	if !restored {
		return errStarting()
	}
	start := time.Now()
	changed, err := x.follow(ctx)
	if changed > 0 {
		x.log.Info("MTU of workloads changed", "ipv4", m.IPv4, "ipv6", m.IPv6, "operator", m.Operator, "workloads", changed, "took", time.Since(start))
	}
	if err != nil {
		return fmt.Errorf("set MTU of workloads: %w", err)
	}
	x.mu.Lock()
	x.reached = m
	x.mu.Unlock()
	if x.file.Reached == m && len(x.file.Tried) == 0 {
		return nil
	}
	return x.save(mtuState{Reached: m})
}

func (x *mtus) isReached() MTU {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.reached
}

// wanted is the MTU for a workload with addresses of these families.
func (x *mtus) wanted(v4, v6 bool) int {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.want.of(v4, v6)
}

// current returns the MTU of an attachment as it should be by now, and of one
// whose request gave it, that.
func (x *mtus) current(r record, v4, v6 bool) int {
	if mtu := x.wanted(v4, v6); !r.FixedMTU && mtu != 0 {
		return mtu
	}
	return r.MTU
}

func (x *mtus) operator() int {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.want.Operator
}

// due returns the MTU that an attachment should have, or 0 when there is
// nothing to change.
func (x *mtus) due(r record) int {
	if r.FixedMTU || r.State.leaving() || len(r.Addresses) == 0 {
		return 0
	}
	want := x.wanted(r.families())
	if want == r.MTU && len(r.TriedMTUs) == 0 {
		return 0
	}
	return want
}

const (
	// mtuBatch is how many workloads change together: their routes go to the
	// kernel in one batch, and no verb waits long for one of them.
	mtuBatch = 128
	// mtuParallel is how many of them at the same moment. More gain nothing: the
	// kernel changes one device at a time.
	mtuParallel = 4
	// busyWithin is how long to wait for other calls about an attachment.
	busyWithin = 5 * time.Second
)

// follow brings every workload to its MTU and returns how many changed.
func (x *mtus) follow(ctx context.Context) (int, error) {
	devices, err := x.host.Devices(ctx)
	if err != nil {
		return 0, err
	}
	var free []locked
	var busy []ID
	for id, r := range x.ledger.snapshot() {
		switch {
		case !r.State.attached() && !r.State.leaving():
			busy = append(busy, id)
		case x.due(r) == 0 || r.AddressesOnly || devices[r.Device] != id.Alias():
			// As it should be, or from before the host booted.
		default:
			if l, ok := x.locks.tryLock(id); ok {
				free = append(free, l)
			} else {
				busy = append(busy, id)
			}
		}
	}
	var errs []error
	changed := 0
	for batch := range slices.Chunk(free, mtuBatch) {
		n, err := x.change(ctx, batch)
		for _, l := range batch {
			l.unlock()
		}
		changed += n
		errs = append(errs, err)
	}
	for _, id := range busy {
		n, err := x.changeBusy(ctx, id)
		changed += n
		errs = append(errs, err)
	}
	return changed, errors.Join(errs...)
}

// changeBusy waits for the call that has an attachment.
func (x *mtus) changeBusy(ctx context.Context, id ID) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, busyWithin)
	defer cancel()
	l, err := x.locks.lock(ctx, id, Workload{})
	if err != nil {
		return 0, err
	}
	defer l.unlock()
	if !l.known {
		return 0, nil
	}
	return x.change(ctx, []locked{l})
}

// change changes attachments whose locks the caller holds, all of them in the
// same steps: the routes, which hold back what is too large for either end, the
// wires, and the routes again. It returns how many it changed.
//
// What is on disk meanwhile says of all of them what may be there; see
// [mtuState]. Only what differs from the others is written to its record.
func (x *mtus) change(ctx context.Context, batch []locked) (int, error) {
	var due, done []record
	for _, l := range batch {
		if want := x.due(l.record); want != 0 {
			r := l.record
			r.TriedMTUs = append(slices.Clone(r.TriedMTUs), want)
			due = append(due, r)
		}
	}
	if len(due) == 0 {
		return 0, nil
	}
	var refused error // the other wires change all the same
	err := x.steps.run(ctx,
		step{"hold back", func(ctx context.Context) error { x.note(due); return x.show(ctx, due) }},
		step{"set wires", func(ctx context.Context) error { done, refused = x.setWires(ctx, due); return nil }},
		step{"note MTU", func(context.Context) error { x.note(done); return nil }},
		step{"let go", func(ctx context.Context) error { return x.show(ctx, done) }},
	)
	return len(done), errors.Join(refused, err)
}

// note takes account of MTUs of which the file says as much: see mtuFile.
func (x *mtus) note(records []record) {
	for _, r := range records {
		x.ledger.note(r.id(), none, func(have *record) { have.MTU, have.TriedMTUs = r.MTU, r.TriedMTUs })
	}
}

func (x *mtus) show(ctx context.Context, records []record) error {
	return x.host.wait(ctx, x.host.show(records...))
}

// setWires changes the devices. It returns the records as they are after it, of
// those that were changed and of those that are gone.
func (x *mtus) setWires(ctx context.Context, records []record) ([]record, error) {
	var (
		mu   sync.Mutex
		done []record
		errs []error
		g    errgroup.Group
	)
	g.SetLimit(mtuParallel)
	for _, r := range records {
		g.Go(func() error {
			want := r.TriedMTUs[len(r.TriedMTUs)-1]
			ours := append([]int{r.MTU}, r.TriedMTUs...)
			spec := r.spec()
			spec.MTU = want
			err := x.host.SetMTU(ctx, spec, ours...)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				r.MTU, r.TriedMTUs = want, nil
			case errors.Is(err, workload.ErrNoNamespace) || errors.Is(err, workload.ErrDiffers):
				// Nothing sends from there any more, or another ADD makes it whole.
				x.log.Info("MTU of a workload not changed: its wire is not there", append(logID(r.id()), "error", err)...)
				r.TriedMTUs = nil
			default:
				errs = append(errs, fmt.Errorf("container %s, interface %s: %w", r.ContainerID, r.Interface, err))
				return nil
			}
			done = append(done, r)
			return nil
		})
	}
	_ = g.Wait() // the errors are in errs
	return done, errors.Join(errs...)
}
