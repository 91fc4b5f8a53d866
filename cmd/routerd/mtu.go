package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/control/attach"
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

// followMTU brings workloads to the MTU that the core works out, whenever that
// changes. Workloads that could not be changed are tried again and shown as
// the condition WorkloadMTU.
func (d *router) followMTU(ctx context.Context) error {
	retry := time.NewTimer(0)
	defer retry.Stop()
	backoff := async.Backoff{Min: minMTURetry, Max: maxMTURetry}
	if err := d.tellWorkloadMTU(ctx, d.attach.ReachedMTU()); err != nil {
		return err
	}
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-d.core.MTUChanged():
			backoff.Reset()
		case <-retry.C:
		}
		if d.workloadMTU() == 0 {
			continue // the core says so when it knows
		}
		// Before workloads are raised, so that the core never believes them
		// smaller than they are.
		m := d.workloadMTUs()
		if err := d.tellWorkloadMTU(ctx, d.attach.ReachedMTU().Max(m)); err != nil {
			return err
		}
		err := d.attach.SetMTU(ctx, m)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err := d.tellWorkloadMTU(ctx, d.attach.ReachedMTU()); err != nil {
			return err
		}
		if err == nil {
			d.mtuErr.Store(nil)
			continue
		}
		if d.mtuErr.Swap(&err) == nil {
			d.log.Warn("workloads are not all at their MTU; will try again", "error", err)
		}
		retry.Reset(backoff.Next())
	}
}

// workloadMTUs is what workloads are to get.
func (d *router) workloadMTUs() attach.MTU {
	return attach.MTU{IPv4: d.core.MTU(dataplane.IPv4), IPv6: d.core.MTU(dataplane.IPv6), Operator: d.cfg.CNI.MTU}
}

// workloadMTU is the MTU of workloads in bytes, the smallest where families
// differ; 0: not known yet.
func (d *router) workloadMTU() int {
	m := d.workloadMTUs()
	switch {
	case m.Operator != 0:
		return m.Operator
	case m.IPv4 == 0 || m.IPv6 != 0 && m.IPv6 < m.IPv4:
		return m.IPv6
	}
	return m.IPv4
}

// mtuError says what of the MTUs is not as it should be.
func (d *router) mtuError(hosts []dataplane.Host) error {
	var errs []error
	if p := d.mtuErr.Load(); p != nil {
		errs = append(errs, *p)
	}
	return errors.Join(append(errs, checkMTUs(d.workloadMTUs(), hosts)...)...)
}

// checkMTUs says which MTUs that an operator set, or that the underlay leaves,
// cannot work: large packets are then fragmented or dropped.
func checkMTUs(m attach.MTU, hosts []dataplane.Host) []error {
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

// minIPv6MTU is what every link with IPv6 must take (RFC 8200, section 5).
const minIPv6MTU = 1280

func vxlanField(f dataplane.Family) string {
	if f == dataplane.IPv6 {
		return "vxlanMTUV6"
	}
	return "vxlanMTU"
}
