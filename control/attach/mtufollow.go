package attach

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/ipip"
	"github.com/routerd/routerd/dataplane/vxlan"
)

// The first and the longest pause between tries to bring workloads to their
// MTU.
const (
	minMTURetry = time.Second
	maxMTURetry = time.Minute
)

// Core is what works out the MTU of workloads, and goes by that which they have.
type Core interface {
	MTU(f dataplane.Family) int // 0: not known yet
	MTUChanged() <-chan struct{}
	WorkloadMTU(ctx context.Context, f dataplane.Family, mtu int) error
}

// MTUFollower brings workloads to the MTU that the core works out, whenever that changes.
// Make one with [NewMTUFollower].
type MTUFollower struct {
	core     Core
	attach   *Attacher
	operator int // see [MTU.Operator]
	log      *slog.Logger
	err      atomic.Pointer[error] // why workloads are not at their MTU; nil: they are
}

// NewMTUFollower makes a follower. operator is what an operator set; 0: nothing.
func NewMTUFollower(core Core, a *Attacher, operator int, log *slog.Logger) *MTUFollower {
	return &MTUFollower{core: core, attach: a, operator: operator, log: log}
}

// Run follows the core until ctx ends. Workloads that could not be changed are tried again and shown as
// the condition WorkloadMTU.
func (f *MTUFollower) Run(ctx context.Context) error {
	retry := time.NewTimer(0)
	defer retry.Stop()
	backoff := async.Backoff{Min: minMTURetry, Max: maxMTURetry}
	if err := f.publish(ctx, f.attach.ReachedMTU()); err != nil {
		return err
	}
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-f.core.MTUChanged():
			backoff.Reset()
		case <-retry.C:
		}
		if f.Smallest() == 0 {
			continue // the core says so when it knows
		}
		// Before workloads are raised, so that the core never believes them
		// smaller than they are.
		m := f.Wanted()
		if err := f.publish(ctx, f.attach.ReachedMTU().Max(m)); err != nil {
			return err
		}
		err := f.attach.SetMTU(ctx, m)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err := f.publish(ctx, f.attach.ReachedMTU()); err != nil {
			return err
		}
		if err == nil {
			f.err.Store(nil)
			continue
		}
		if f.err.Swap(&err) == nil {
			f.log.Warn("not all workloads have their MTU; will try again", "error", err)
		}
		retry.Reset(backoff.Next())
	}
}

// publish lets the core know how large packets workloads send at most. What
// an operator set does not count: it does not follow the core, which must not
// wait for it.
func (f *MTUFollower) publish(ctx context.Context, m MTU) error {
	for family, mtu := range map[dataplane.Family]int{dataplane.IPv4: m.IPv4, dataplane.IPv6: m.IPv6} {
		if err := f.core.WorkloadMTU(ctx, family, mtu); err != nil {
			return err
		}
	}
	return nil
}

// Wanted is what workloads are to get.
func (f *MTUFollower) Wanted() MTU {
	return MTU{IPv4: f.core.MTU(dataplane.IPv4), IPv6: f.core.MTU(dataplane.IPv6), Operator: f.operator}
}

// Smallest is the MTU of workloads in bytes, the smallest where families
// differ; 0: not known yet.
func (f *MTUFollower) Smallest() int {
	m := f.Wanted()
	switch {
	case m.Operator != 0:
		return m.Operator
	case m.IPv4 == 0 || m.IPv6 != 0 && m.IPv6 < m.IPv4:
		return m.IPv6
	}
	return m.IPv4
}

// Err says what of the MTUs is not as it should be.
func (f *MTUFollower) Err(hosts []dataplane.Host) error {
	var errs []error
	if p := f.err.Load(); p != nil {
		errs = append(errs, *p)
	}
	return errors.Join(append(errs, checkMTUs(f.Wanted(), hosts)...)...)
}

// checkMTUs says which MTUs that an operator set, or that the underlay leaves,
// cannot work: large packets are then fragmented or dropped.
func checkMTUs(m MTU, hosts []dataplane.Host) []error {
	var errs []error
	for _, h := range hosts {
		f := dataplane.FamilyOf(h.Addr.Addr())
		room := map[dataplane.Family]int{dataplane.IPv4: m.IPv4, dataplane.IPv6: m.IPv6}[f]
		if m.Operator > room && room != 0 {
			errs = append(errs, fmt.Errorf("cni.mtu is %d, and the pools leave %d of the %d bytes that %s takes in %s: set it to %d or less, or to 0",
				m.Operator, room, h.UplinkMTU, h.Uplink, f, room))
		}
		if f == dataplane.IPv6 && room != 0 && room < minIPv6MTU {
			errs = append(errs, fmt.Errorf("the pools leave %d of the %d bytes that %s takes, and IPv6 needs %d: raise the MTU of %s",
				room, h.UplinkMTU, h.Uplink, minIPv6MTU, h.Uplink))
		}
		for _, t := range []struct {
			field    string
			set      int
			overhead int
		}{
			{"ipipMTU", h.IPIPMTU, ipip.Driver{}.Overhead(f)},
			{vxlanField(f), h.VXLANMTU, vxlan.Driver{}.Overhead(f)},
		} {
			if room := h.UplinkMTU - t.overhead; t.set > room {
				errs = append(errs, fmt.Errorf("%s of FelixConfiguration is %d, and %s takes %d with %d for the tunnel: set it to %d or less, or to 0",
					t.field, t.set, h.Uplink, h.UplinkMTU, t.overhead, room))
			}
		}
	}
	return errs
}

func vxlanField(f dataplane.Family) string {
	if f == dataplane.IPv6 {
		return "vxlanMTUV6"
	}
	return "vxlanMTU"
}
