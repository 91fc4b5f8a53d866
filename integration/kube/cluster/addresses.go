package cluster

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/routerd/routerd/dataplane"
)

// family is what addresses a cluster has in one of IP's families.
type family struct {
	dataplane.Family

	controlPlane netip.Addr // of the API server and of etcd, which is the router's
	forwarding   string     // the router's setting
	hashing      string     // likewise, of by what it shares traffic among several next hops
	services     string     // the range of Services
	dns          string     // the Service of DNS
	pods         string     // of configs/kubernetes
	rackBits     int
}

// ServerAddrs are where pods and nodes reach the API server of a cluster: its own address, and
// that of the Service kubernetes.
func ServerAddrs() []netip.Addr {
	f := familyOf(dataplane.IPv4)
	return []netip.Addr{f.controlPlane, netip.MustParsePrefix(f.services).Addr().Next()}
}

func familyOf(f dataplane.Family) family {
	if f == dataplane.IPv6 {
		return family{
			f, netip.MustParseAddr("fd00:10:199::1"), "ipv6/conf/all/forwarding", "ipv6/fib_multipath_hash_policy",
			"fd00:10:96::/112", "fd00:10:96::a", "fd00:10:244::/48", 64,
		}
	}
	return family{f, netip.MustParseAddr("10.199.0.1"), "ipv4/ip_forward", "ipv4/fib_multipath_hash_policy", "10.96.0.0/16", "10.96.0.10", "192.168.0.0/16", 24}
}

// bird is what BIRD calls the family.
func (f family) bird() string { return strings.ToLower(f.String()) }

// host is an address in a rack: 1 is the router's.
func (f family) host(rack, n int) netip.Addr {
	a := f.controlPlane.AsSlice()
	if f.Family == dataplane.IPv6 {
		a[7] = byte(rack)
	} else {
		a[2] = byte(rack)
	}
	a[len(a)-1] = byte(n)
	addr, _ := netip.AddrFromSlice(a)
	return addr
}

// added is what ip(8) has behind `addr add` for an address in a rack.
func (f family) added(rack, n int, dev string) string {
	s := fmt.Sprintf("%s/%d dev %s", f.host(rack, n), f.rackBits, dev)
	if f.Family == dataplane.IPv6 {
		s += " nodad"
	}
	return s
}

// each returns what a function says of each of the cluster's families, with commas between.
func (c *Cluster) each(of func(family) string) string {
	var l []string
	for _, f := range c.families {
		l = append(l, of(f))
	}
	return strings.Join(l, ",")
}

// parseFamilies reads what [Config.Flags] takes.
func parseFamilies(s string) (list []dataplane.Family, err error) {
	for name := range strings.SplitSeq(s, ",") {
		switch name {
		case "ipv4":
			list = append(list, dataplane.IPv4)
		case "ipv6":
			list = append(list, dataplane.IPv6)
		default:
			return nil, fmt.Errorf("family %q: want ipv4 or ipv6, or both with a comma between", name)
		}
	}
	return list, nil
}
