package vrouter

import (
	"context"
	"maps"

	"github.com/routerd/routerd/dataplane"
)

// WorkloadMTU says how large packets this host's workloads of a family send at
// most, in bytes. A tunnel that takes less is not used before they are
// lowered, and its device not lowered; see [Core.MTU]. Before the first call
// workloads are taken to follow at once.
func (c *Core) WorkloadMTU(ctx context.Context, f dataplane.Family, mtu int) error {
	return c.post(ctx, func(l *loop) { l.setWorkloadMTU(f, mtu) })
}

// Unsupported says why this kernel has no device for a driver over a family of
// the underlay.
type Unsupported struct {
	Driver string
	Outer  dataplane.Family
	Err    error
}

// Unsupported takes in all that this kernel has no devices for. It is published,
// so that a change to such a mode can be refused before it is begun. Before the
// first call what was published stays.
func (c *Core) Unsupported(ctx context.Context, list []Unsupported) error {
	return c.post(ctx, func(l *loop) {
		l.unsupported = map[dataplane.Form]error{}
		for _, u := range list {
			l.unsupported[dataplane.Form{Driver: u.Driver, Outer: u.Outer}] = u.Err
		}
	})
}

// setReach takes in what was measured of the underlay in a family.
func (t *table) setReach(f dataplane.Family, peers map[string]dataplane.Reach) {
	old := t.reach[f]
	t.reach[f] = peers
	for name, r := range peers {
		if old[name] != r {
			t.remeasured(name)
		}
	}
	for name := range old {
		if _, ok := peers[name]; !ok {
			t.remeasured(name)
		}
	}
}

func (t *table) remeasured(name string) {
	t.rechoose(name)
	t.refreshNode(name)
}

// setDelivery takes in what probes through tunnels found in a family.
func (t *table) setDelivery(f dataplane.Family, peers map[string][]dataplane.Delivery) {
	now := make(map[string]map[dataplane.Form]dataplane.Delivery, len(peers))
	for name, list := range peers {
		now[name] = make(map[dataplane.Form]dataplane.Delivery, len(list))
		for _, d := range list {
			now[name][d.Form] = d
		}
	}
	old := t.delivery[f]
	t.delivery[f] = now
	if !t.probing[f] {
		t.probing[f] = true
		t.rechooseAll()
	}
	for name := range t.nodes {
		switch {
		case !sameSizes(old[name], now[name]):
			t.remeasured(name)
		case maps.Equal(old[name], now[name]):
		case t.rechoose(name): // what came out the same changes nothing further on
			t.refreshNode(name)
		}
	}
}

// sameSizes reports whether packets of the same size get through each form.
func sameSizes(a, b map[dataplane.Form]dataplane.Delivery) bool {
	for f := range b {
		if a[f].MTU != b[f].MTU {
			return false
		}
	}
	for f := range a {
		if a[f].MTU != b[f].MTU {
			return false
		}
	}
	return true
}

// setWorkloadMTU notes how large packets workloads send.
func (t *table) setWorkloadMTU(f dataplane.Family, mtu int) {
	if t.podMTU[f] == mtu {
		return
	}
	t.podMTU[f] = mtu
	t.formsDirty = true
	t.rechooseAll()
}

// setKernel takes in how far the kernel is with what takes forms in. It
// reports whether that is news.
func (t *table) setKernel(now map[dataplane.Form]formState) bool {
	changed := len(now) != len(t.kernel)
	for f, st := range now {
		old, ok := t.kernel[f]
		changed = changed || !ok || old.done != st.done || !sameError(old.err, st.err)
	}
	if !changed {
		return false
	}
	t.kernel = now
	t.formsDirty = true
	t.rechooseAll()
	return true
}

// formMTU is what a form takes, in bytes; 0: this host cannot send it.
func (t *table) formMTU(f dataplane.Form) int {
	if f.Driver == dataplane.DriverDirect {
		least := 0
		for _, h := range t.hosts {
			if least == 0 || h.UplinkMTU < least {
				least = h.UplinkMTU
			}
		}
		return least
	}
	h, ok := t.hosts[f.Outer]
	if !ok {
		return 0
	}
	ipip, vx := t.settings.tunnelMTU(f.Outer)
	set := vx
	if f.Driver == dataplane.DriverIPIP {
		set = ipip
	}
	if set != 0 {
		return set
	}
	return h.UplinkMTU - driverOf(f).Overhead(f.Outer)
}

// mtu is what workloads of a family may send, in bytes: what every form takes
// that is in use or wanted, and every device as it is. 0 while the underlay is
// not known, and where this host reaches nobody in the family.
func (t *table) mtu(inner dataplane.Family) int {
	forms := set[dataplane.Form]{}
	pools := 0
	for _, p := range t.pools {
		if p.family() != inner {
			continue
		}
		pools++
		for _, f := range t.formsOf(t.modeOf(p), inner) {
			forms[f] = struct{}{}
		}
	}
	if pools == 0 {
		return t.hosts[inner].UplinkMTU
	}
	_, uses := t.own()
	for f := range uses {
		forms[f] = struct{}{}
	}
	least := 0
	for _, outer := range t.outers(inner) {
		if h := t.hosts[outer]; least == 0 || h.UplinkMTU < least {
			least = h.UplinkMTU
		}
	}
	for f := range forms {
		mtu := t.formMTU(f)
		if mtu == 0 {
			continue
		}
		for _, k := range t.formKeys[f] {
			lk, ok := k.(dataplane.LinkKey)
			if !ok {
				continue
			}
			// A device that is to be raised is not yet larger than it is.
			if have, ok := ownDevice(t.underlay, lk.Name); ok && have.Up && have.MTU < mtu {
				mtu = have.MTU
			}
		}
		if least == 0 || mtu < least {
			least = mtu
		}
	}
	return least
}
