package encap

import (
	"fmt"
	"iter"
	"maps"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/desired"
	"github.com/routerd/routerd/control/topology"
	"github.com/routerd/routerd/dataplane"
)

type set[K comparable] map[K]struct{}

func (s set[K]) add(ks iter.Seq[K]) {
	for k := range ks {
		s[k] = struct{}{}
	}
}

// Key is a node as reached for the workloads of one pool.
type Key struct {
	Pool, Node string
	Family     dataplane.Family // of the workloads
}

// Plan is how a next hop is reached: the driver and the objects it takes.
type Plan struct {
	Driver  string
	Objects []dataplane.Object
	Hop     dataplane.NextHop
	MTU     uint32 // of the routes; 0: the device's
	Err     error
}

func planWith(d dataplane.Driver, h dataplane.Host, p dataplane.Peer) Plan {
	objs, err := d.Peer(h, p)
	pl := Plan{Driver: d.Name(), Objects: objs, Err: err}
	for _, o := range objs {
		if nh, ok := o.(dataplane.NextHop); ok {
			pl.Hop = nh
		}
	}
	return pl
}

// Planner plans how packets travel between this host and the others.
type Planner struct {
	*probeTargets
}

// New returns a planner that decides by what is known of nodes, pools, blocks and
// the network. Who changes these says so to the planner afterwards.
func New(n *topology.Nodes, p *topology.Pools, b *topology.Blocks, u *topology.Network, o *desired.Objects) *Planner {
	e := newEnds(n, p, b, u)
	return &Planner{newProbeTargets(newSender(newReceiver(e, newPublishing(e), o)))}
}

// Ready reports whether the planner knows enough of this host for the desired state to
// be complete, and what is missing otherwise.
func (p *Planner) Ready() error {
	self := p.nodes.Self
	switch {
	case p.network.Underlay == nil:
		return fmt.Errorf("the host's links: %w", dataplane.ErrIncomplete)
	case p.nodes.Own() == nil:
		return fmt.Errorf("node %s is not registered: %w", self, dataplane.ErrIncomplete)
	case len(p.hosts) == 0:
		return fmt.Errorf("no device of this host holds the address of node %s: %w", self, dataplane.ErrIncomplete)
	}
	return nil
}

// Host is this host's place on the underlay in a family; the zero value: it has none.
func (p *Planner) Host(f dataplane.Family) dataplane.Host {
	if !p.hasHost(f) {
		return dataplane.Host{}
	}
	return p.hostFor(f, f, p.pools.Settings.VNI, p.pools.Settings.Port)
}

// SetNode follows a node that was old and is n now; nil: there was or is none. It
// reports whether that is news of this host itself, on which every next hop depends: what it
// publishes is none, for a next hop follows its path.
func (p *Planner) SetNode(name string, old, n *cluster.Node) bool {
	same := topology.SameNode(n, old)
	sameEncaps := same && (n == nil || sameEncaps(n.Encaps.NodeEncaps, old.Encaps.NodeEncaps))
	if !same {
		p.vteps.replaceNode(name, old, n, p.touched)
	}
	if name == p.nodes.Self {
		p.seeOwn(n)
		if settled := p.settleInflight(); sameEncaps && !settled {
			return false
		}
		p.Changed()
		return !same
	}
	p.countPeer(old, n)
	if n == nil {
		p.dropNode(name)
	}
	if !sameEncaps {
		p.touched[name] = struct{}{}
	}
	return false
}

// SetPool follows a pool that has changed; gone says that its next hops are, for it is
// no more or has the other family.
func (p *Planner) SetPool(name string, gone bool) {
	if gone {
		p.dropPool(name)
	}
	p.Changed()
}

// SetBlock follows what a block assigns to tunnels that was old and is b now; nil: there
// was or is none.
func (p *Planner) SetBlock(old, b *cluster.Block) {
	p.vteps.setBlock(old, b, p.touched)
}

// Place follows the network around the host. It reports whether the host has another
// place on it.
func (p *Planner) Place() bool {
	p.devicesDirty = true
	if !p.place() {
		return false
	}
	p.replanAll = true
	return true
}

// Changed has everything planned anew.
func (p *Planner) Changed() {
	p.devicesDirty = true
	p.replanAll = true
}

// Replan derives what accepts packets on this host, and plans anew what is marked. It
// returns the nodes whose next hops and routes are to follow, and whether all next
// hops are.
func (p *Planner) Replan() (nodes map[string]struct{}, all bool) {
	follow := p.replan()
	if p.devicesDirty && p.rebuildDevices() {
		p.replanAll, all = true, true
		maps.Copy(follow, p.replan())
	}
	return follow, all
}

// Unsettled reports whether the last [Planner.Replan] changed what it began with: a
// device that takes another's place moves next hops, once.
func (p *Planner) Unsettled() bool { return p.devicesDirty }

// SetWorkloadMTU notes how large packets workloads send.
func (p *Planner) SetWorkloadMTU(f dataplane.Family, mtu int) {
	if p.podMTU[f] != mtu {
		p.podMTU[f] = mtu
		p.Changed()
	}
}

// Devices yields what accepts each encapsulation.
func (p *Planner) Devices() map[dataplane.Encap]Devices { return p.devices }

// SetKernel notes how far the kernel is with what accepts encapsulations, and whether
// it has left every next hop that is not wanted any more. It reports whether either is
// new.
func (p *Planner) SetKernel(now map[dataplane.Encap]State, left bool) bool {
	changed := p.confirmed != left
	p.confirmed = left
	if p.setKernel(now) {
		p.replanAll = true
		changed = true
	}
	return changed
}

// Conflicts says which nodes' VTEPs are left out, for another node has their
// address or MAC. Nobody changes the list.
func (p *Planner) Conflicts() []string { return p.vteps.conflicts() }
