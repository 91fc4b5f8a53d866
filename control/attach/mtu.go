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

// SetMTU makes m the MTU of workloads: of new ones at once, and of running
// ones before it returns. Those whose request gave an MTU keep that, and one
// that somebody lowered inside the workload stays (see [workload.Wire.SetMTU]).
// A workload whose namespace is gone is left out; of those that could not be
// changed the error tells, and a repetition tries them again. It may be
// repeated and cut short at any point: the record says what may be there.
//
// No packet is dropped without an answer on the way: the host's routes say the
// smaller MTU for as long as the two ends of a wire may differ.
//
// What makes room in packets (a pool's change to a form with more overhead, a
// smaller tunnel device) has to wait until [Attacher.ReachedMTU] says that the
// workloads are small enough; what takes less comes first, and then SetMTU.
func (a *Attacher) SetMTU(ctx context.Context, m MTU) error {
	a.mtuPass.Lock()
	defer a.mtuPass.Unlock()
	restored := a.isRestored()
	if restored {
		// Before any workload gets it, so that no kill leaves one that has an MTU
		// which is noted nowhere.
		if err := a.setOut(m); err != nil {
			return err
		}
	}
	a.mu.Lock()
	a.mtu, a.reachedMTU = m, a.reachedMTU.Max(m)
	a.mu.Unlock()
	if !restored {
		return errStarting()
	}
	start := time.Now()
	changed, err := a.followMTU(ctx)
	if changed > 0 {
		a.log.Info("MTU of workloads changed", "ipv4", m.IPv4, "ipv6", m.IPv6, "operator", m.Operator, "workloads", changed, "took", time.Since(start))
	}
	if err != nil {
		return fmt.Errorf("set MTU of workloads: %w", err)
	}
	a.mu.Lock()
	a.reachedMTU = m
	a.mu.Unlock()
	if a.mtuState.Reached == m && len(a.mtuState.Tried) == 0 {
		return nil
	}
	return a.saveMTU(mtuState{Reached: m})
}

// ReachedMTU is what no workload of this host is above, of those that follow
// [Attacher.SetMTU]. After [Attacher.Restore] it is what an earlier life of the
// daemon left; where that is not known, and on a new host, it is zero until
// SetMTU has succeeded.
func (a *Attacher) ReachedMTU() MTU {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.reachedMTU
}

// wantedMTU is the MTU for a workload with addresses of these families.
func (a *Attacher) wantedMTU(v4, v6 bool) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.mtu.of(v4, v6)
}

func (a *Attacher) operatorMTU() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.mtu.Operator
}

// mtuDue returns the MTU that an attachment should have, or 0 when there is
// nothing to change.
func (a *Attacher) mtuDue(r record) int {
	if r.FixedMTU || r.State == stateReleasing || len(r.Addresses) == 0 {
		return 0
	}
	want := a.wantedMTU(r.families())
	if want == r.MTU && len(r.TriedMTUs) == 0 {
		return 0
	}
	return want
}

const (
	// mtuBatch is how many workloads change together: their routes go to the
	// kernel in one batch, and nobody waits long for one of them.
	mtuBatch = 128
	// mtuParallel is how many of them at the same moment. More gain nothing: the
	// kernel changes one device at a time.
	mtuParallel = 4
	// busyWithin is how long to wait for other calls about an attachment.
	busyWithin = 5 * time.Second
)

// locked is an attachment whose locks are held.
type locked struct {
	record
	unlock func()
}

// followMTU brings every workload to its MTU and returns how many changed.
func (a *Attacher) followMTU(ctx context.Context) (int, error) {
	devices, err := a.cfg.Wire.Devices(ctx)
	if err != nil {
		return 0, err
	}
	var free []locked
	var busy []ID
	for id, r := range a.snapshot() {
		switch {
		case r.State == stateAdding:
			busy = append(busy, id)
		case a.mtuDue(r) == 0 || r.AddressesOnly || devices[r.Device] != id.Alias():
			// As it should be, or from before the host booted.
		default:
			if l, ok := a.tryLock(id); ok {
				free = append(free, l)
			} else {
				busy = append(busy, id)
			}
		}
	}
	var errs []error
	changed := 0
	for batch := range slices.Chunk(free, mtuBatch) {
		n, err := a.changeMTUs(ctx, batch)
		for _, l := range batch {
			l.unlock()
		}
		changed += n
		errs = append(errs, err)
	}
	for _, id := range busy {
		n, err := a.changeBusy(ctx, id)
		changed += n
		errs = append(errs, err)
	}
	return changed, errors.Join(errs...)
}

// tryLock takes the locks of an attachment unless somebody has them.
func (a *Attacher) tryLock(id ID) (locked, bool) {
	free, ok := a.locks.tryLock(attachmentLock(id))
	if !ok {
		return locked{}, false
	}
	r, known := a.record(id)
	if !known {
		free()
		return locked{}, false
	}
	freeShared, ok := a.locks.tryLock(a.sharedLock(r))
	if !ok {
		free()
		return locked{}, false
	}
	// Whoever took the device over changed the record.
	r, known = a.record(id)
	if !known {
		freeShared()
		free()
		return locked{}, false
	}
	return locked{r, func() { freeShared(); free() }}, true
}

// changeBusy waits for the call that has an attachment.
func (a *Attacher) changeBusy(ctx context.Context, id ID) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, busyWithin)
	defer cancel()
	unlock, r, known, err := a.lock(ctx, id, Workload{})
	if err != nil {
		return 0, err
	}
	defer unlock()
	if !known {
		return 0, nil
	}
	return a.changeMTUs(ctx, []locked{{record: r}})
}

// changeMTUs changes attachments whose locks the caller holds, all of them in
// the same three steps: the routes, which hold back what is too large for
// either end, the wires, and the routes again. It returns how many it changed.
//
// What is on disk meanwhile says of all of them what may be there; see
// [mtuState]. Only what differs from the others is written to its record.
func (a *Attacher) changeMTUs(ctx context.Context, batch []locked) (int, error) {
	var due []record
	for _, l := range batch {
		if want := a.mtuDue(l.record); want != 0 {
			r := l.record
			r.TriedMTUs = append(slices.Clone(r.TriedMTUs), want)
			due = append(due, r)
		}
	}
	if len(due) == 0 {
		return 0, nil
	}
	if err := a.at("mtu start"); err != nil {
		return 0, err
	}
	a.keep(due)
	if err := a.wish(ctx, due); err != nil {
		return 0, err
	}
	if err := a.at("mtu held"); err != nil {
		return 0, err
	}
	done, err := a.setWires(ctx, due)
	if err := a.at("mtu wires"); err != nil {
		return 0, err
	}
	a.keep(done)
	return len(done), errors.Join(err, a.at("mtu reached"), a.wish(ctx, done))
}

// keep remembers records whose file says as much, together with mtuFile.
func (a *Attacher) keep(records []record) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, r := range records {
		a.records[r.id()] = r
	}
}

// wish hands over what the host's kernel should have for attachments, and
// waits for it.
func (a *Attacher) wish(ctx context.Context, records []record) error {
	var objs []dataplane.Object
	for _, r := range records {
		objs = append(objs, r.wishes(a.cfg.Wire)...)
	}
	if err := a.cfg.Sink.Wait(ctx, a.cfg.Sink.Update(dataplane.SourceWorkload, objs, nil)); err != nil {
		return fmt.Errorf("program the host's routes: %w", err)
	}
	return nil
}

// setWires changes the devices. It returns the records as they are after it, of
// those that were changed and of those that are gone.
func (a *Attacher) setWires(ctx context.Context, records []record) ([]record, error) {
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
			err := a.cfg.Wire.SetMTU(ctx, spec, ours...)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				r.MTU, r.TriedMTUs = want, nil
			case errors.Is(err, workload.ErrNoNamespace) || errors.Is(err, workload.ErrDiffers):
				// Nothing sends from there any more, or another ADD makes it whole.
				a.log.Info("MTU of a workload not changed: its wire is not there", append(logID(r.id()), "error", err)...)
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
