// Package crosssubnet composes two drivers: one for peers in this host's own
// subnet, another for all others.
package crosssubnet

import (
	"github.com/routerd/routerd/dataplane"
)

// Driver uses Near for peers whose address lies in the host's own subnet and
// Far for the rest. The judgement is local, as Calico's is: a host whose
// address is recorded with a full-length prefix has no near peers.
type Driver struct {
	Near, Far dataplane.Driver
}

var _ dataplane.Driver = Driver{}

// Name implements [dataplane.Driver].
func (d Driver) Name() string { return d.Far.Name() + "-cross-subnet" }

// Overhead implements [dataplane.Driver]: the larger of the two, because a
// workload has one MTU for all its peers.
func (d Driver) Overhead(f dataplane.Family) int {
	return max(d.Near.Overhead(f), d.Far.Overhead(f))
}

// Requires implements [dataplane.Driver].
func (d Driver) Requires() []dataplane.Requirement {
	return append(d.Near.Requires(), d.Far.Requires()...)
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
	if h.Addr.IsValid() && h.Addr.Contains(p.Addr) {
		return d.Near
	}
	return d.Far
}
