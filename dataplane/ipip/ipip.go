// Package ipip carries IPv4 packets between hosts inside IPv4 packets of
// protocol 4 (RFC 2003), over the kernel module's own device tunl0.
package ipip

import (
	"fmt"
	"net/netip"

	"github.com/routerd/routerd/dataplane"
)

// Device is the name of the tunnel device: the one that the kernel's ipip
// module makes in every network namespace, and that Calico's users know.
const Device = "tunl0"

// overhead is one IPv4 header without options.
const overhead = 20

// Driver is the IPIP driver. Its zero value is ready to use.
type Driver struct{}

var _ dataplane.Driver = Driver{}

// Name implements [dataplane.Driver].
func (Driver) Name() string { return "ipip" }

// Overhead implements [dataplane.Driver].
func (Driver) Overhead(dataplane.Family) int { return overhead }

// Requires implements [dataplane.Driver].
func (Driver) Requires() []dataplane.Requirement {
	return []dataplane.Requirement{{Link: dataplane.LinkIPIP, Module: "ipip"}}
}

// Host implements [dataplane.Driver]: the device and, once it is known, its
// address, which becomes the source of what the host itself sends to pods.
func (Driver) Host(h dataplane.Host) ([]dataplane.Object, error) {
	if err := family(h.Addr.Addr()); err != nil {
		return nil, err
	}
	mtu := h.IPIPMTU
	if mtu == 0 {
		mtu = h.UplinkMTU - overhead
	}
	objs := []dataplane.Object{dataplane.Link{Name: Device, Type: dataplane.LinkIPIP, MTU: mtu}}
	if h.IPIPAddr.IsValid() {
		objs = append(objs, dataplane.Address{Link: Device, Prefix: netip.PrefixFrom(h.IPIPAddr, h.IPIPAddr.BitLen())})
	}
	return objs, nil
}

// Peer implements [dataplane.Driver]. The gateway on tunl0 is the outer
// destination, so it must be taken as on-link.
func (Driver) Peer(_ dataplane.Host, p dataplane.Peer) ([]dataplane.Object, error) {
	if err := family(p.Addr); err != nil {
		return nil, err
	}
	return []dataplane.Object{dataplane.NextHop{ID: p.NextHop, Link: Device, Gateway: p.Addr, OnLink: true}}, nil
}

func family(a netip.Addr) error {
	switch {
	case !a.IsValid():
		return fmt.Errorf("underlay address: %w", dataplane.ErrIncomplete)
	case !a.Is4():
		return fmt.Errorf("IPIP carries IPv4 over IPv4 only, and %s is IPv6: %w", a, dataplane.ErrNoPath)
	}
	return nil
}
