// Package crosssubnet composes two drivers: one for neighbours, another for
// all other peers.
package crosssubnet

import (
	"github.com/routerd/routerd/dataplane"
)

// Driver uses Near for this host's neighbours and Far for the rest. The
// judgement is local, as Calico's is; see [dataplane.Peer.IsNear]. Far is also
// for neighbours whom Near cannot carry packets to.
type Driver struct {
	Near, Far dataplane.Driver
}

var _ dataplane.Driver = Driver{}

// Name implements [dataplane.Driver].
func (d Driver) Name() string { return d.Far.Name() + "-cross-subnet" }

// Overhead implements [dataplane.Driver]: the larger of the two, because a
// workload has one MTU for all its peers.
func (d Driver) Overhead(outer dataplane.Family) int {
	return max(d.Near.Overhead(outer), d.Far.Overhead(outer))
}

// Requires implements [dataplane.Driver].
func (d Driver) Requires(outer dataplane.Family) []dataplane.Requirement {
	return append(d.Near.Requires(outer), d.Far.Requires(outer)...)
}

// Encaps implements [dataplane.Driver].
func (d Driver) Encaps(h dataplane.Host) []dataplane.Encap {
	return append(d.Near.Encaps(h), d.Far.Encaps(h)...)
}

// Encap implements [dataplane.Driver].
func (d Driver) Encap(h dataplane.Host, p dataplane.Peer) (dataplane.Encap, error) {
	return d.Choose(h, p).Encap(h, p)
}

// Host implements [dataplane.Driver].
func (d Driver) Host(h dataplane.Host) ([]dataplane.Object, error) {
	near, err := d.Near.Host(h)
	if err != nil {
		return nil, err
	}
	far, err := d.Far.Host(h)
	if err != nil {
		return nil, err
	}
	return append(near, far...), nil
}

// Peer implements [dataplane.Driver].
func (d Driver) Peer(h dataplane.Host, p dataplane.Peer) ([]dataplane.Object, error) {
	return d.Choose(h, p).Peer(h, p)
}

// Choose returns the driver that carries packets to p.
func (d Driver) Choose(h dataplane.Host, p dataplane.Peer) dataplane.Driver {
	if !p.IsNear(h) {
		return d.Far
	}
	if _, err := d.Near.Encap(h, p); err != nil {
		return d.Far
	}
	return d.Near
}
