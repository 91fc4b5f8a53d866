package topology

import (
	"errors"
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"strings"

	"github.com/gaissmai/bart"

	"github.com/routerd/routerd/dataplane"
)

// Network is what the kernel says of the network around the host, without the
// devices of workloads.
type Network struct {
	Underlay *dataplane.Underlay // nil: not known yet; to be read, [Network.Set] changes it

	routes   *bart.Table[dataplane.UnderlayRoute]
	ownAddrs map[netip.Addr]bool
}

// NewNetwork returns a network of which nothing is known yet.
func NewNetwork() *Network {
	return &Network{routes: new(bart.Table[dataplane.UnderlayRoute]), ownAddrs: map[netip.Addr]bool{}}
}

// Same reports whether a snapshot says what is known.
func (n *Network) Same(u dataplane.Underlay) bool {
	return n.Underlay != nil && slices.Equal(u.Links, n.Underlay.Links) &&
		slices.Equal(u.Addresses, n.Underlay.Addresses) && slices.Equal(u.Routes, n.Underlay.Routes)
}

// Set replaces what is known by a snapshot.
func (n *Network) Set(u dataplane.Underlay) {
	n.Underlay = &u
	n.routes = new(bart.Table[dataplane.UnderlayRoute])
	for _, r := range u.Routes {
		if old, ok := n.routes.Get(r.Prefix); !ok || r.Metric < old.Metric {
			n.routes.Insert(r.Prefix, r)
		}
	}
	n.ownAddrs = make(map[netip.Addr]bool, len(u.Addresses))
	for _, a := range u.Addresses {
		n.ownAddrs[a.Prefix.Addr()] = true
	}
}

// RouteTo returns the longest route of the underlay that leads to an address.
func (n *Network) RouteTo(a netip.Addr) (dataplane.UnderlayRoute, bool) { return n.routes.Lookup(a) }

// RoutesWithin yields the routes of the underlay that lie in a prefix.
func (n *Network) RoutesWithin(p netip.Prefix) iter.Seq[dataplane.UnderlayRoute] {
	return func(yield func(dataplane.UnderlayRoute) bool) {
		for _, r := range n.routes.Subnets(p) {
			if !yield(r) {
				return
			}
		}
	}
}

// OfOwnAddress reports whether a route is that to an address of this host, as the kernel
// makes one for each address of IPv6, a tunnel's included, and none for IPv4's.
func (n *Network) OfOwnAddress(r dataplane.UnderlayRoute) bool {
	return r.Prefix.IsSingleIP() && n.ownAddrs[r.Prefix.Addr()]
}

// OtherPods returns the addresses in this host's pod CIDRs by which another network of pods
// is on the host; see [dataplane.Underlay.OtherPods].
func (n *Network) OtherPods(podCIDRs []netip.Prefix) []dataplane.UnderlayAddress {
	if n.Underlay == nil || len(podCIDRs) == 0 {
		return nil
	}
	return n.Underlay.OtherPods(podCIDRs)
}

// Device finds a device of the host.
func (n *Network) Device(name string) (dataplane.UnderlayLink, bool) {
	if n.Underlay == nil {
		return dataplane.UnderlayLink{}, false
	}
	i := slices.IndexFunc(n.Underlay.Links, func(l dataplane.UnderlayLink) bool { return l.Name == name })
	if i < 0 {
		return dataplane.UnderlayLink{}, false
	}
	return n.Underlay.Links[i], true
}

// WithoutWorkloads leaves out the devices of workloads, which come and go all
// the time: no next hop is resolved through one, and none is an uplink.
func WithoutWorkloads(u dataplane.Underlay) dataplane.Underlay {
	return dataplane.Underlay{
		Links:     slices.DeleteFunc(slices.Clone(u.Links), func(l dataplane.UnderlayLink) bool { return isWorkloadLink(l.Name) }),
		Addresses: slices.DeleteFunc(slices.Clone(u.Addresses), func(a dataplane.UnderlayAddress) bool { return isWorkloadLink(a.Link) }),
		Routes:    slices.DeleteFunc(slices.Clone(u.Routes), func(r dataplane.UnderlayRoute) bool { return isWorkloadLink(r.Link) }),
	}
}

func isWorkloadLink(name string) bool { return strings.HasPrefix(name, "cali") }

// errUnresolved says that the underlay has no route to a next hop.
var errUnresolved = errors.New("the underlay has no route to the next hop")

// Resolve finds how the underlay reaches an address: the gateway and the
// device of the longest matching route that is not ours. Our own routes are
// never used, so a next hop cannot resolve through a pod's prefix.
func (n *Network) Resolve(a netip.Addr) (netip.Addr, string, error) {
	if a.Is6() && a.IsLinkLocalUnicast() {
		return n.resolveLinkLocal(a)
	}
	r, ok := n.routes.Lookup(a)
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
func (n *Network) resolveLinkLocal(a netip.Addr) (netip.Addr, string, error) {
	if a.Zone() == "" {
		return netip.Addr{}, "", fmt.Errorf("link-local next hop %s comes without its device: %w", a, errUnresolved)
	}
	if n.Underlay != nil {
		for _, l := range n.Underlay.Links {
			if l.Name == a.Zone() && l.Up {
				return a.WithZone(""), l.Name, nil
			}
		}
	}
	return netip.Addr{}, "", fmt.Errorf("%s: device %s is gone, down or without carrier: %w", a.WithZone(""), a.Zone(), errUnresolved)
}
