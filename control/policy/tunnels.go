package policy

import (
	"cmp"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/store"
)

// poolTunnel says which tunnel a pool asks for; the zero value: none.
type poolTunnel struct{ vxlan, ipip, six bool }

func tunnelOfPool(p *cluster.Pool) poolTunnel {
	if p == nil {
		return poolTunnel{}
	}
	t := poolTunnel{}
	switch p.Encap {
	case store.VXLAN, store.VXLANCrossSubnet:
		t.vxlan = true
	case store.IPIP, store.IPIPCrossSubnet:
		t.ipip = true
		t.six = p.CIDR.IsValid() && p.CIDR.Addr().Is6()
	default:
	}
	return t
}

// tunnels returns the encapsulations that this host decapsulates: those that pools ask
// for, and those that it publishes, as during a change both the old and the new. What no
// pool uses is left alone: another program may.
func (s *settings) tunnels() []filter.Tunnel {
	list := slices.DeleteFunc(slices.Clone(s.own), func(t filter.Tunnel) bool {
		return t.Protocol == protoUDP && store.IsSystemPort(t.Port) && t.Port != s.now.vxlanPort
	})
	for _, t := range s.asked {
		if t.vxlan {
			list = append(list, filter.Tunnel{Protocol: protoUDP, Port: s.now.vxlanPort})
		}
		if t.ipip {
			list = append(list, filter.Tunnel{Protocol: protoIPIP})
		}
		if t.six {
			list = append(list, filter.Tunnel{Protocol: protoIPv6})
		}
	}
	return sortedTunnels(list)
}

func sortedTunnels(list []filter.Tunnel) []filter.Tunnel {
	slices.SortFunc(list, func(a, b filter.Tunnel) int {
		return cmp.Or(cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Port, b.Port))
	})
	return slices.Compact(list)
}

// publishedTunnels returns the encapsulations that a node publishes.
func publishedTunnels(n *cluster.Node) []filter.Tunnel {
	var list []filter.Tunnel
	for _, encap := range publishedEncaps(n) {
		switch encap {
		case "ipip":
			list = append(list, filter.Tunnel{Protocol: protoIPIP})
		case "ip6tnl":
			list = append(list, filter.Tunnel{Protocol: protoIPIP}, filter.Tunnel{Protocol: protoIPv6})
		default:
			if port, ok := vxlanPort(encap); ok {
				list = append(list, filter.Tunnel{Protocol: protoUDP, Port: port})
			}
		}
	}
	return sortedTunnels(list)
}

func publishedEncaps(n *cluster.Node) []string {
	if n == nil {
		return nil
	}
	return slices.Concat(n.Encaps.Accepts, n.Encaps.Uses)
}

// vxlanPort returns the port of an encapsulation, if it is one of VXLAN.
func vxlanPort(encap string) (uint16, bool) {
	parts := strings.Split(encap, "/")
	if len(parts) != 3 || !strings.HasPrefix(parts[0], "vxlan") {
		return 0, false
	}
	p, err := strconv.ParseUint(parts[2], 10, 16)
	return uint16(p), err == nil && p > 0
}

// SetSources sets from which addresses packets of a node were seen to come, beside those
// that its Node names: translators' on the way. They count while there is such a Node.
func (c *Calculator) SetSources(node string, addrs []netip.Addr) {
	var list []netip.Prefix
	for _, a := range addrs {
		list = append(list, netip.PrefixFrom(a, a.BitLen()))
	}
	s := &c.settings
	if slices.Equal(s.seen[node], list) {
		return
	}
	was := s.gives(node)
	if s.seen[node] = list; list == nil {
		delete(s.seen, node)
	}
	s.feedNode(c, node, was)
}
