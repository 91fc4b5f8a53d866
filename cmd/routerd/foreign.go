package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"github.com/routerd/routerd/control/vrouter"
	"github.com/routerd/routerd/dataplane"
)

// foreignRoute is a stranger's route that takes packets from a route of ours.
type foreignRoute struct {
	theirs dataplane.UnderlayRoute
	ours   dataplane.RouteKey
}

func (f foreignRoute) String() string {
	s := strings.TrimSpace(f.theirs.Type + " " + f.theirs.Prefix.String())
	if f.theirs.Gateway.IsValid() {
		s += " via " + f.theirs.Gateway.String()
	}
	if f.theirs.Link != "" {
		s += " dev " + f.theirs.Link
	}
	s += fmt.Sprintf(" proto %d", f.theirs.Protocol)
	if f.theirs.Metric != 0 {
		s += fmt.Sprintf(" metric %d", f.theirs.Metric)
	}
	return s
}

// foreignRoutes finds the strangers' routes that take packets from routes of
// ours: those to the same prefix that the kernel prefers, and those to a more
// specific prefix within a pool. status says what became of a route of ours,
// and whether it is wanted.
func foreignRoutes(u dataplane.Underlay, pools []netip.Prefix, status func(dataplane.Key) (dataplane.Status, bool)) []foreignRoute {
	var out []foreignRoute
	for _, r := range slices.Concat(u.Routes, u.Dropping) {
		if ownDevice(r.Link) {
			continue
		}
		within := 0
		for _, p := range pools {
			if p.Bits() <= r.Prefix.Bits() && p.Contains(r.Prefix.Addr()) {
				within = max(within, p.Bits(), 1)
			}
		}
		for bits := r.Prefix.Bits(); bits >= 0; bits-- {
			if bits < r.Prefix.Bits() && (within == 0 || bits < within) {
				break
			}
			key := routeKey(netip.PrefixFrom(r.Prefix.Addr(), bits).Masked())
			ours, wanted := status(key)
			if !wanted {
				continue
			}
			if takes(r, key, ours) {
				out = append(out, foreignRoute{theirs: r, ours: key})
			}
			break
		}
	}
	return out
}

// takes reports whether a stranger's route takes packets from one of ours that
// is to its prefix or a less specific one.
func takes(r dataplane.UnderlayRoute, key dataplane.RouteKey, ours dataplane.Status) bool {
	if o, ok := ours.Object.(dataplane.Route); ok && o.Type == dataplane.Blackhole && r.Type != "" {
		return false // ours drops them too: BIRD leaves such a route for a host's own block
	}
	if r.Prefix != key.Prefix || ours.State != dataplane.Done {
		return true
	}
	return r.Metric < key.Metric || r.Metric == key.Metric && !r.Behind
}

// routeKey is the key of the route that the core wants for a prefix.
func routeKey(p netip.Prefix) dataplane.RouteKey {
	key := dataplane.RouteKey{Prefix: p, Table: dataplane.MainTable}
	if p.Addr().Is6() {
		key.Metric = 1024 // what the kernel takes zero for
	}
	return key
}

// ownDevice reports whether routerd made a device, by its name.
func ownDevice(name string) bool {
	for _, prefix := range []string{"cali", "vxlan.calico", "vxlan-v6.calico"} {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	return name == "tunl0" || name == "tunl6.calico"
}

// foreign keeps what is known of strangers' routes. Its zero value is ready.
type foreign struct {
	mu       sync.Mutex
	underlay dataplane.Underlay
	list     []foreignRoute
	told     map[string]bool
}

// see takes in a snapshot of the underlay.
func (f *foreign) see(u dataplane.Underlay) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.underlay = u
}

// foreignRoutes returns the strangers' routes that matter now, and logs those
// that came and went. Where the pools are not known for a moment the last
// answer stays.
func (d *router) foreignRoutes(pools []vrouter.PoolStatus, err error) []foreignRoute {
	var cidrs []netip.Prefix
	for _, p := range pools {
		cidrs = append(cidrs, p.CIDR)
	}
	f := &d.foreign
	f.mu.Lock()
	defer f.mu.Unlock()
	if err != nil {
		return f.list
	}
	list := foreignRoutes(f.underlay, cidrs, d.kernel.Status)
	now := map[string]bool{}
	for _, r := range list {
		s := r.String()
		if now[s] = true; !f.told[s] {
			d.log.Warn("a route of another program takes packets from ours; it is left alone", "route", s, "ours", r.ours.String())
		}
	}
	for s := range f.told {
		if !now[s] {
			d.log.Info("the route of another program takes no packets from ours any more", "route", s)
		}
	}
	f.told, f.list = now, list
	return list
}

// maxForeign bounds how many routes a condition names.
const maxForeign = 3

// foreignError says which strangers' routes take packets from ours.
func foreignError(list []foreignRoute) error {
	if len(list) == 0 {
		return nil
	}
	var names []string
	for _, r := range list {
		names = append(names, fmt.Sprintf("%s (before %s)", r, r.ours))
	}
	slices.Sort(names)
	s := strings.Join(names[:min(len(names), maxForeign)], ", ")
	if n := len(names) - maxForeign; n > 0 {
		s += fmt.Sprintf(" and %d more", n)
	}
	return errors.New("routes of other programs take packets from ours and are left alone: " + s + "; remove them, or have their program leave the pools alone")
}

// followForeign looks for strangers' routes after a change of the underlay.
func (d *router) followForeign(ctx context.Context, u dataplane.Underlay) {
	d.foreign.see(u)
	d.foreignRoutes(d.core.Pools(ctx))
}
