// Package foreign finds what other programs have on this host that stands in
// routerd's way: routes that take packets from routes of ours, and packet filter
// rules that Calico's Felix left. It changes nothing but what an operator asks it
// to remove.
package foreign

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"github.com/routerd/routerd/dataplane"
)

// Route is a foreign route that takes packets from a route of ours.
type Route struct {
	theirs dataplane.UnderlayRoute
	ours   dataplane.RouteKey
}

// Ours is the route of ours that it takes packets from.
func (f Route) Ours() string { return f.ours.String() }

// Takes is the prefix whose packets it takes.
func (f Route) Takes() netip.Prefix { return f.theirs.Prefix }

// String returns the route as ip(8) takes it.
func (f Route) String() string {
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

// overriding finds the foreign routes that take packets from routes of ours: those
// to the same prefix that the kernel prefers, and those to a more specific prefix
// within a pool. status says whether the kernel has a route of ours, and whether it
// is desired.
func overriding(u dataplane.Underlay, pools []netip.Prefix, status func(dataplane.Key) (dataplane.Status, bool)) []Route {
	var out []Route
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
			if overrides(r, key, ours) {
				out = append(out, Route{theirs: r, ours: key})
			}
			break
		}
	}
	return out
}

// overrides reports whether a foreign route takes packets from one of ours that is
// to its prefix or a less specific one.
func overrides(r dataplane.UnderlayRoute, key dataplane.RouteKey, ours dataplane.Status) bool {
	if o, ok := ours.Object.(dataplane.Route); ok && o.Type == dataplane.Blackhole && r.Type != "" {
		return false // ours drops them too: BIRD leaves such a route for a host's own block
	}
	if r.Prefix != key.Prefix || ours.State != dataplane.Done {
		return true
	}
	return r.Metric < key.Metric || r.Metric == key.Metric && !r.Behind
}

// routeKey is the key of the route that the core has for a prefix.
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

// Routes keeps the foreign routes that matter and logs those that come and go. It
// is safe for concurrent use.
type Routes struct {
	status func(dataplane.Key) (dataplane.Status, bool)
	log    *slog.Logger

	mu       sync.Mutex
	underlay dataplane.Underlay
	list     []Route
	known    map[string]bool // what was logged
}

// NewRoutes returns a Routes without any. status says what became of an object of
// ours in the kernel, and whether it is desired at all.
func NewRoutes(status func(dataplane.Key) (dataplane.Status, bool), log *slog.Logger) *Routes {
	return &Routes{status: status, log: log}
}

// HandleUnderlay applies a snapshot of the network around the host.
func (f *Routes) HandleUnderlay(u dataplane.Underlay) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.underlay = u
}

// Last returns what [Routes.Find] found last.
func (f *Routes) Last() []Route {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.list
}

// Find returns the foreign routes that matter now beside the pools.
func (f *Routes) Find(pools []netip.Prefix) []Route {
	f.mu.Lock()
	defer f.mu.Unlock()
	list := overriding(f.underlay, pools, f.status)
	now := map[string]bool{}
	for _, r := range list {
		s := r.String()
		if now[s] = true; !f.known[s] {
			f.log.Warn("a route of another program takes packets from ours; it is left alone", "route", s, "ours", r.ours.String())
		}
	}
	for s := range f.known {
		if !now[s] {
			f.log.Info("the route of another program takes no packets from ours any more", "route", s)
		}
	}
	f.known, f.list = now, list
	return list
}

// maxNamed bounds how many routes a condition names.
const maxNamed = 3

// RoutesError says which foreign routes take packets from ours; nil: none does.
func RoutesError(list []Route) error {
	if len(list) == 0 {
		return nil
	}
	var names []string
	for _, r := range list {
		names = append(names, fmt.Sprintf("%s (before %s)", r, r.ours))
	}
	slices.Sort(names)
	s := strings.Join(names[:min(len(names), maxNamed)], ", ")
	if n := len(names) - maxNamed; n > 0 {
		s += fmt.Sprintf(" and %d more", n)
	}
	return errors.New("routes of other programs divert packets from ours and are left alone: " + s + "; remove them, or have their program leave the pools alone")
}
