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
func (Driver) Name() string { return "direct" }

// Overhead implements [dataplane.Driver]: nothing is added to a packet.
func (Driver) Overhead(dataplane.Family) int { return 0 }

// Requires implements [dataplane.Driver]: any kernel will do.
func (Driver) Requires() []dataplane.Requirement { return nil }

// Host implements [dataplane.Driver]: there is no device of its own.
func (Driver) Host(dataplane.Host) ([]dataplane.Object, error) { return nil, nil }

// Peer implements [dataplane.Driver]. A peer in the host's own subnet is its
// own gateway. Any other peer is reached through the gateway that the caller
// found in the underlay; without one there is no path, because routers in
// between need not know where the prefix behind the peer lies.
//
// The gateway is marked onlink, as Calico does: the route must not depend on
// whether the connected route of the subnet is there yet.
func (Driver) Peer(h dataplane.Host, p dataplane.Peer) ([]dataplane.Object, error) {
	nh := dataplane.NextHop{ID: p.NextHop, OnLink: true}
	switch {
	case p.Gateway.IsValid():
		nh.Gateway, nh.Link = p.Gateway, p.Link
	case h.Addr.IsValid() && h.Addr.Contains(p.Addr):
		nh.Gateway, nh.Link = p.Addr, h.Uplink
	default:
		return nil, fmt.Errorf("%s is not in this host's subnet %s: %w", p.Addr, h.Addr.Masked(), dataplane.ErrNoPath)
	}
	if nh.Link == "" {
		return nil, fmt.Errorf("device towards %s: %w", p.Addr, dataplane.ErrIncomplete)
	}
	return []dataplane.Object{nh}, nil
}
