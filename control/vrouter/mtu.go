package vrouter

import (
	"sync/atomic"

	"github.com/routerd/routerd/dataplane"
)

// mtus is what the pools leave for workloads of each family.
type mtus struct {
	ipv4, ipv6 atomic.Int64  // bytes; 0: not known
	changed    chan struct{} // size one
}

func (m *mtus) of(f dataplane.Family) *atomic.Int64 {
	if f == dataplane.IPv4 {
		return &m.ipv4
	}
	return &m.ipv6
}

// set follows what the table says.
func (m *mtus) set(of func(dataplane.Family) int) {
	for _, f := range []dataplane.Family{dataplane.IPv4, dataplane.IPv6} {
		mtu := int64(of(f))
		if m.of(f).Swap(mtu) == mtu {
			continue
		}
		select {
		case m.changed <- struct{}{}:
		default:
		}
	}
}

// MTU is what the pools of a family leave for workloads, in bytes: the
// smallest that anything in use or wanted takes. It is 0 while the underlay is
// not known, and where this host reaches no peer in the family. Where it falls,
// tunnels wait until [Core.WorkloadMTU] says that the workloads follow; where
// it rises, tunnels are larger already.
func (c *Core) MTU(f dataplane.Family) int { return int(c.mtus.of(f).Load()) }

// MTUChanged delivers when [Core.MTU] has changed since the last delivery. It
// is for one reader.
func (c *Core) MTUChanged() <-chan struct{} { return c.mtus.changed }
