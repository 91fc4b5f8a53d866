// Package direct carries packets between hosts as they are: the pod's own
// addresses on the wire.
package direct

import (
	"fmt"

	"github.com/routerd/routerd/dataplane"
)

// Driver is the direct driver. Its zero value is ready to use.
type Driver struct{}

var _ dataplane.Driver = Driver{}

// Name implements [dataplane.Driver].
func (Driver) Name() string { return dataplane.DriverDirect }

// Overhead implements [dataplane.Driver]: nothing is added to a packet.
func (Driver) Overhead(dataplane.Family) int { return 0 }

// Requires implements [dataplane.Driver]: any kernel will do.
func (Driver) Requires(dataplane.Family) []dataplane.Requirement { return nil }

// Encaps implements [dataplane.Driver].
func (Driver) Encaps(h dataplane.Host) []dataplane.Encap {
	if carries(h) != nil {
		return nil
	}
	return []dataplane.Encap{{Driver: dataplane.DriverDirect}}
}

// Encap implements [dataplane.Driver]: the plain packet.
func (Driver) Encap(h dataplane.Host, _ dataplane.Peer) (dataplane.Encap, error) {
	if err := carries(h); err != nil {
		return dataplane.Encap{}, err
	}
	return dataplane.Encap{Driver: dataplane.DriverDirect}, nil
}

// carries says why packets cannot go plain over the host's underlay: the
// kernel sends IPv4 packets to an IPv6 gateway (RFC 8950), but not the reverse.
func carries(h dataplane.Host) error {
	if h.Inner() == dataplane.IPv6 && h.Outer() == dataplane.IPv4 {
		return fmt.Errorf("IPv6 packets without a tunnel need IPv6 addresses of the hosts, and this one has %s: %w", h.Addr.Addr(), dataplane.ErrNoPath)
	}
	return nil
}

// Host implements [dataplane.Driver]: there is no device of its own.
func (Driver) Host(dataplane.Host) ([]dataplane.Object, error) { return nil, nil }

// Peer implements [dataplane.Driver]. A neighbour is its own gateway. Any
// other peer is reached through the gateway that the caller found in the
// underlay; without one there is no path, because routers in between need not
// know where the prefix behind the peer lies.
//
// The gateway is marked onlink, as Calico does: the route must not depend on
// whether the connected route of the subnet is there yet.
func (Driver) Peer(h dataplane.Host, p dataplane.Peer) ([]dataplane.Object, error) {
	if err := carries(h); err != nil {
		return nil, err
	}
	nh := dataplane.NextHop{ID: p.NextHop, OnLink: true}
	switch {
	case p.Gateway.IsValid():
		nh.Gateway, nh.Link = p.Gateway, p.Link
	case p.IsNear(h):
		nh.Gateway, nh.Link = p.Addr, h.Uplink
	case p.Near == dataplane.No:
		return nil, fmt.Errorf("%s does not answer on this host's subnet %s: %w", p.Addr, h.Addr.Masked(), dataplane.ErrNoPath)
	default:
		return nil, fmt.Errorf("%s is not in this host's subnet %s: %w", p.Addr, h.Addr.Masked(), dataplane.ErrNoPath)
	}
	if nh.Link == "" {
		return nil, fmt.Errorf("device towards %s: %w", p.Addr, dataplane.ErrIncomplete)
	}
	return []dataplane.Object{nh}, nil
}
