// Package vxlan carries packets between hosts inside UDP (RFC 7348). Nothing
// is learned or flooded: every peer's neighbour and FDB entry is static.
package vxlan

import (
	"crypto/sha1"
	"fmt"
	"net/netip"

	"github.com/routerd/routerd/dataplane"
)

// Device is the name of the tunnel device, as Calico's users know it.
const Device = "vxlan.calico"

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
func (Driver) Name() string { return "vxlan" }

// Overhead implements [dataplane.Driver]. The family is that of the underlay.
func (Driver) Overhead(f dataplane.Family) int {
	if f == dataplane.IPv6 {
		return overheadIPv6
	}
	return overheadIPv4
}

// Requires implements [dataplane.Driver].
func (Driver) Requires() []dataplane.Requirement {
	return []dataplane.Requirement{{Link: dataplane.LinkVXLAN, Module: "vxlan"}}
}

// Host implements [dataplane.Driver]: the device and, once it is known, its
// address.
func (d Driver) Host(h dataplane.Host) ([]dataplane.Object, error) {
	if !h.Addr.IsValid() || h.Uplink == "" {
		return nil, fmt.Errorf("underlay address: %w", dataplane.ErrIncomplete)
	}
	mtu := h.VXLANMTU
	if mtu == 0 {
		mtu = h.UplinkMTU - d.Overhead(dataplane.FamilyOf(h.Addr.Addr()))
	}
	objs := []dataplane.Object{dataplane.Link{
		Name: Device, Type: dataplane.LinkVXLAN, MTU: mtu, MAC: h.VXLANMAC,
		VNI: h.VXLANVNI, Port: h.VXLANPort, Local: h.Addr.Addr(), Parent: h.Uplink,
	}}
	if h.VXLANAddr.IsValid() {
		objs = append(objs, dataplane.Address{Link: Device, Prefix: netip.PrefixFrom(h.VXLANAddr, h.VXLANAddr.BitLen())})
	}
	return objs, nil
}

// Peer implements [dataplane.Driver]: the peer's VTEP as next hop, the
// neighbour entry that gives it a MAC, and the FDB entry that gives the MAC an
// underlay address.
func (Driver) Peer(_ dataplane.Host, p dataplane.Peer) ([]dataplane.Object, error) {
	switch {
	case !p.Addr.IsValid():
		return nil, fmt.Errorf("underlay address of %s: %w", p.Name, dataplane.ErrIncomplete)
	case !p.VXLANAddr.IsValid():
		return nil, fmt.Errorf("VXLAN tunnel address of %s: %w", p.Name, dataplane.ErrIncomplete)
	case p.VXLANMAC.IsZero():
		return nil, fmt.Errorf("VXLAN MAC of %s: %w", p.Name, dataplane.ErrIncomplete)
	}
	return []dataplane.Object{
		dataplane.Neighbour{Link: Device, Addr: p.VXLANAddr, MAC: p.VXLANMAC},
		dataplane.FDBEntry{Link: Device, MAC: p.VXLANMAC, Dst: p.Addr},
		dataplane.NextHop{ID: p.NextHop, Link: Device, Gateway: p.VXLANAddr, OnLink: true},
	}, nil
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
