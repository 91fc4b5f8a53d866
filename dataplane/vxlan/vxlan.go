// Package vxlan carries packets between hosts inside UDP (RFC 7348). Nothing
// is learned or flooded: every peer's neighbour and FDB entry is static.
package vxlan

import (
	"crypto/sha1"
	"fmt"
	"net/netip"

	"github.com/routerd/routerd/dataplane"
)

// The names of the usual tunnel devices over IPv4 and IPv6, as Calico's users
// know them.
const (
	Device   = "vxlan.calico"
	DeviceV6 = "vxlan-v6.calico"
)

// MaxDevices is how many devices one family of the underlay can have.
const MaxDevices = 9

// DeviceName returns the name of a device over an underlay of that family. Slot
// 0 is the usual one; those up to [MaxDevices]-1 are for networks that differ
// in VNI or port, while a cluster changes from one to another. The kernel
// limits names to 15 characters.
func DeviceName(outer dataplane.Family, slot int) string {
	switch {
	case slot == 0 && outer == dataplane.IPv6:
		return DeviceV6
	case slot == 0:
		return Device
	case outer == dataplane.IPv6:
		return fmt.Sprintf("%s6-%d", Device, slot+1)
	}
	return fmt.Sprintf("%s-%d", Device, slot+1)
}

// The defaults of Calico, so that hosts of both understand each other.
const (
	DefaultVNI  = 4096
	DefaultPort = 4789
)

// Overheads: outer Ethernet 14 (it is the inner frame's header that counts
// against the underlay's MTU), VXLAN 8, UDP 8, and the outer IP header.
const (
	overheadIPv4 = 14 + 8 + 8 + 20
	overheadIPv6 = 14 + 8 + 8 + 40
)

// Driver is the VXLAN driver. Its zero value is ready to use.
type Driver struct{}

var _ dataplane.Driver = Driver{}

// Name implements [dataplane.Driver].
func (Driver) Name() string { return dataplane.DriverVXLAN }

// Overhead implements [dataplane.Driver].
func (Driver) Overhead(outer dataplane.Family) int {
	if outer == dataplane.IPv6 {
		return overheadIPv6
	}
	return overheadIPv4
}

// Requires implements [dataplane.Driver].
func (Driver) Requires(dataplane.Family) []dataplane.Requirement {
	return []dataplane.Requirement{{Link: dataplane.LinkVXLAN, Module: "vxlan"}}
}

// Encaps implements [dataplane.Driver].
func (Driver) Encaps(h dataplane.Host) []dataplane.Encap { return []dataplane.Encap{encap(h)} }

// Encap implements [dataplane.Driver].
func (Driver) Encap(h dataplane.Host, _ dataplane.Peer) (dataplane.Encap, error) {
	return encap(h), nil
}

func encap(h dataplane.Host) dataplane.Encap {
	return dataplane.Encap{Driver: dataplane.DriverVXLAN, Outer: h.Outer(), VNI: h.VXLANVNI, Port: h.VXLANPort}
}

// Host implements [dataplane.Driver]: the device and, once it is known, its
// address.
func (d Driver) Host(h dataplane.Host) ([]dataplane.Object, error) {
	if !h.Addr.IsValid() || h.Uplink == "" {
		return nil, fmt.Errorf("underlay address: %w", dataplane.ErrIncomplete)
	}
	mtu := h.VXLANMTU
	if mtu == 0 {
		mtu = h.UplinkMTU - d.Overhead(h.Outer())
	}
	link := dataplane.Link{
		Name: device(h), Type: dataplane.LinkVXLAN, MTU: mtu, MAC: h.VXLANMAC,
		VNI: h.VXLANVNI, Port: h.VXLANPort, Local: h.Addr.Addr(), Parent: h.Uplink,
	}
	objs := []dataplane.Object{link}
	if h.VXLANAddr.IsValid() {
		objs = append(objs, dataplane.Address{Link: link.Name, Prefix: netip.PrefixFrom(h.VXLANAddr, h.VXLANAddr.BitLen())})
	}
	return append(objs, dataplane.LooseSource(link.Name), dataplane.Forwarding(link.Name)), nil
}

// Peer implements [dataplane.Driver]: the peer's VTEP as next hop, the
// neighbour entry that gives it a MAC, and the FDB entry that gives the MAC an
// underlay address.
func (Driver) Peer(h dataplane.Host, p dataplane.Peer) ([]dataplane.Object, error) {
	dst := p.Dst()
	switch {
	case !dst.IsValid():
		return nil, fmt.Errorf("underlay address of %s: %w", p.Name, dataplane.ErrIncomplete)
	case h.Addr.IsValid() && dataplane.FamilyOf(dst) != h.Outer():
		return nil, fmt.Errorf("%s of %s is not of this host's family %s: %w", dst, p.Name, h.Outer(), dataplane.ErrNoPath)
	case !p.VXLANAddr.IsValid():
		return nil, fmt.Errorf("%s VXLAN tunnel address of %s: %w", h.Inner(), p.Name, dataplane.ErrIncomplete)
	case p.VXLANMAC.IsZero():
		return nil, fmt.Errorf("VXLAN MAC of %s: %w", p.Name, dataplane.ErrIncomplete)
	}
	dev, gateway := device(h), p.VXLANAddr
	if gateway.Is6() {
		gateway = linkLocal(p.VXLANMAC)
	}
	return []dataplane.Object{
		dataplane.FDBEntry{Link: dev, MAC: p.VXLANMAC, Dst: dst, Port: p.TunnelPort},
		dataplane.Neighbour{Link: dev, Addr: gateway, MAC: p.VXLANMAC},
		dataplane.NextHop{ID: p.NextHop, Link: dev, Gateway: gateway, OnLink: true},
	}, nil
}

// linkLocal is the link-local address that a MAC has (RFC 4291, appendix A).
// It stands for the peer's VTEP as an IPv6 gateway: the kernel refuses a
// gateway to which a route leads through another device
// (ip6_route_check_nh_onlink), and to the address of the VTEP leads the route to
// the peer's block, which goes another way until a change of mode is over.
func linkLocal(m dataplane.MAC) netip.Addr {
	return netip.AddrFrom16([16]byte{0: 0xfe, 1: 0x80, 8: m[0] ^ 2, 9: m[1], 10: m[2], 11: 0xff, 12: 0xfe, 13: m[3], 14: m[4], 15: m[5]})
}

func device(h dataplane.Host) string {
	if h.VXLANDevice != "" {
		return h.VXLANDevice
	}
	return DeviceName(h.Outer(), 0)
}

// MAC derives the MAC of a node's VTEP from the node's name, as Calico does
// for nodes that publish none: 66 and the first five bytes of the name's
// SHA-1. Every host must derive the same, so the rule cannot change.
func MAC(node string) dataplane.MAC {
	sum := sha1.Sum([]byte(node))
	m := dataplane.MAC{0x66}
	copy(m[1:], sum[:5])
	return m
}
