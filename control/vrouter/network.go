package vrouter

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/gaissmai/bart"

	"github.com/routerd/routerd/dataplane"
)

// network is what the kernel says of the network around the host, without the
// devices of workloads.
type network struct {
	underlay       *dataplane.Underlay // nil: not known yet
	underlayRoutes *bart.Table[dataplane.UnderlayRoute]
	ownAddrs       map[netip.Addr]bool
}

func newNetwork() *network {
	return &network{underlayRoutes: new(bart.Table[dataplane.UnderlayRoute]), ownAddrs: map[netip.Addr]bool{}}
}

// same reports whether a snapshot says what is known.
func (n *network) same(u dataplane.Underlay) bool {
	return n.underlay != nil && slices.Equal(u.Links, n.underlay.Links) &&
		slices.Equal(u.Addresses, n.underlay.Addresses) && slices.Equal(u.Routes, n.underlay.Routes)
}

func (n *network) set(u dataplane.Underlay) {
	n.underlay = &u
	n.underlayRoutes = new(bart.Table[dataplane.UnderlayRoute])
	for _, r := range u.Routes {
		if old, ok := n.underlayRoutes.Get(r.Prefix); !ok || r.Metric < old.Metric {
			n.underlayRoutes.Insert(r.Prefix, r)
		}
	}
	n.ownAddrs = make(map[netip.Addr]bool, len(u.Addresses))
	for _, a := range u.Addresses {
		n.ownAddrs[a.Prefix.Addr()] = true
	}
}

// device finds a device of the host.
func (n *network) device(name string) (dataplane.UnderlayLink, bool) {
	if n.underlay == nil {
		return dataplane.UnderlayLink{}, false
	}
	i := slices.IndexFunc(n.underlay.Links, func(l dataplane.UnderlayLink) bool { return l.Name == name })
	if i < 0 {
		return dataplane.UnderlayLink{}, false
	}
	return n.underlay.Links[i], true
}

type resolution struct {
	gateway netip.Addr
	link    string
	ok      bool
}

func (n *network) resolution(a netip.Addr) resolution {
	gw, link, err := n.resolve(a)
	return resolution{gw, link, err == nil}
}

// withoutWorkloads leaves out the devices of workloads, which come and go all
// the time: no next hop is resolved through one, and none is an uplink.
func withoutWorkloads(u dataplane.Underlay) dataplane.Underlay {
	return dataplane.Underlay{
		Links:     slices.DeleteFunc(slices.Clone(u.Links), func(l dataplane.UnderlayLink) bool { return isWorkloadLink(l.Name) }),
		Addresses: slices.DeleteFunc(slices.Clone(u.Addresses), func(a dataplane.UnderlayAddress) bool { return isWorkloadLink(a.Link) }),
		Routes:    slices.DeleteFunc(slices.Clone(u.Routes), func(r dataplane.UnderlayRoute) bool { return isWorkloadLink(r.Link) }),
	}
}

func isWorkloadLink(name string) bool { return strings.HasPrefix(name, "cali") }

// errUnresolved says that the underlay has no route to a next hop.
var errUnresolved = errors.New("the underlay has no route to the next hop")

// resolve finds how the underlay reaches an address: the gateway and the
// device of the longest matching route that is not ours. Our own routes are
// never used, so a next hop cannot resolve through a pod's prefix.
func (n *network) resolve(a netip.Addr) (netip.Addr, string, error) {
	if a.Is6() && a.IsLinkLocalUnicast() {
		return n.resolveLinkLocal(a)
	}
	r, ok := n.underlayRoutes.Lookup(a)
	if !ok {
		return netip.Addr{}, "", fmt.Errorf("%s: %w", a, errUnresolved)
	}
	if n.ownAddrs[a] {
		return netip.Addr{}, "", fmt.Errorf("next hop %s is this host itself", a)
	}
	if r.Gateway.IsValid() {
		return r.Gateway, r.Link, nil
	}
	return a, r.Link, nil
}

// resolveLinkLocal finds an address that is known on one device alone, which its
// zone names (RFC 4007, section 11): a peer of an unnumbered session.
func (n *network) resolveLinkLocal(a netip.Addr) (netip.Addr, string, error) {
	if a.Zone() == "" {
		return netip.Addr{}, "", fmt.Errorf("link-local next hop %s comes without its device: %w", a, errUnresolved)
	}
	if n.underlay != nil {
		for _, l := range n.underlay.Links {
			if l.Name == a.Zone() && l.Up {
				return a.WithZone(""), l.Name, nil
			}
		}
	}
	return netip.Addr{}, "", fmt.Errorf("%s: device %s is gone, down or without carrier: %w", a.WithZone(""), a.Zone(), errUnresolved)
}
