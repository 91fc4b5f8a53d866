// Package ipip carries packets between hosts inside IP packets: IPv4 in IPv4
// (RFC 2003) over the kernel module's own device tunl0, and IPv6 or IPv4 in
// IPv6 (RFC 2473) over a device of the module ip6_tunnel.
package ipip

import (
	"fmt"
	"net/netip"

	"github.com/routerd/routerd/dataplane"
)

// The names of the tunnel devices. The first is the one that the kernel's ipip
// module makes in every network namespace, and that Calico's users know;
// Calico has no IPIP over IPv6, so the second is ours.
const (
	Device   = "tunl0"
	DeviceV6 = "tunl6.calico"
)

// Overheads: one IP header without options. The tunnel's encapsulation limit
// (RFC 2473, section 4.1.1), which would take eight bytes more, is off.
const (
	overheadIPv4 = 20
	overheadIPv6 = 40
)

// Driver is the IPIP driver. Its zero value is ready to use.
type Driver struct{}

var _ dataplane.Driver = Driver{}

// Name implements [dataplane.Driver].
func (Driver) Name() string { return dataplane.DriverIPIP }

// Overhead implements [dataplane.Driver].
func (Driver) Overhead(outer dataplane.Family) int {
	if outer == dataplane.IPv6 {
		return overheadIPv6
	}
	return overheadIPv4
}

// Requires implements [dataplane.Driver].
func (Driver) Requires(outer dataplane.Family) []dataplane.Requirement {
	if outer == dataplane.IPv6 {
		return []dataplane.Requirement{{Link: dataplane.LinkIP6TNL, Module: "ip6_tunnel"}}
	}
	return []dataplane.Requirement{{Link: dataplane.LinkIPIP, Module: "ipip"}}
}

// Encaps implements [dataplane.Driver].
func (Driver) Encaps(h dataplane.Host) []dataplane.Encap {
	if carries(h) != nil {
		return nil
	}
	return []dataplane.Encap{{Driver: dataplane.DriverIPIP, Outer: h.Outer()}}
}

// Encap implements [dataplane.Driver].
func (Driver) Encap(h dataplane.Host, _ dataplane.Peer) (dataplane.Encap, error) {
	if err := carries(h); err != nil {
		return dataplane.Encap{}, err
	}
	return dataplane.Encap{Driver: dataplane.DriverIPIP, Outer: h.Outer()}, nil
}

// Host implements [dataplane.Driver]: the device and, once it is known, its
// address, which becomes the source of what the host itself sends to pods.
func (d Driver) Host(h dataplane.Host) ([]dataplane.Object, error) {
	if err := carries(h); err != nil {
		return nil, err
	}
	mtu := h.IPIPMTU
	if mtu == 0 {
		mtu = h.UplinkMTU - d.Overhead(h.Outer())
	}
	link := dataplane.Link{Name: device(h), Type: dataplane.LinkIPIP, MTU: mtu}
	if h.Outer() == dataplane.IPv6 {
		link.Type, link.Local, link.Parent = dataplane.LinkIP6TNL, h.Addr.Addr(), h.Uplink
	}
	objs := []dataplane.Object{link}
	if h.IPIPAddr.IsValid() {
		objs = append(objs, dataplane.Address{Link: link.Name, Prefix: netip.PrefixFrom(h.IPIPAddr, h.IPIPAddr.BitLen())})
	}
	return append(objs, dataplane.LooseSource(link.Name), dataplane.Forwarding(link.Name)), nil
}

// Peer implements [dataplane.Driver]. The gateway on the device is the outer
// destination, so it must be taken as on-link.
func (Driver) Peer(h dataplane.Host, p dataplane.Peer) ([]dataplane.Object, error) {
	if err := carries(h); err != nil {
		return nil, err
	}
	dst := p.Dst()
	switch {
	case !dst.IsValid():
		return nil, fmt.Errorf("underlay address of %s: %w", p.Name, dataplane.ErrIncomplete)
	case dataplane.FamilyOf(dst) != h.Outer():
		return nil, fmt.Errorf("%s of %s is not of this host's family %s: %w", dst, p.Name, h.Outer(), dataplane.ErrNoPath)
	}
	return []dataplane.Object{dataplane.NextHop{ID: p.NextHop, Link: device(h), Gateway: dst, OnLink: true}}, nil
}

func device(h dataplane.Host) string {
	if h.Outer() == dataplane.IPv6 {
		return DeviceV6
	}
	return Device
}

// carries says why the host cannot carry its workloads' packets in IP packets.
func carries(h dataplane.Host) error {
	switch {
	case !h.Addr.IsValid():
		return fmt.Errorf("underlay address: %w", dataplane.ErrIncomplete)
	case h.Outer() == dataplane.IPv4 && h.Inner() == dataplane.IPv6:
		return fmt.Errorf("IPIP carries no IPv6 packets over the IPv4 address %s: use VXLAN, or give the hosts IPv6 addresses: %w",
			h.Addr.Addr(), dataplane.ErrNoPath)
	}
	return nil
}
