package encap

import (
	"cmp"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// PoolStatus says how a pool is carried and what keeps it from being so.
type PoolStatus struct {
	Name          string
	CIDR          netip.Prefix
	Encapsulation store.Encapsulation
	Mode          store.Mode
	Driver        dataplane.Driver
	Host          []dataplane.Key // what must be on this host to carry it: the device, its address
	Err           error           // why that is not known

	// Behind names the peers to which packets do not travel as the pool asks
	// for, with the reason; the first few, by name.
	Behind      []Delay
	BehindTotal int
}

// Delay says why packets to a node do not travel as a pool asks for.
type Delay struct {
	Node   string
	Encap  dataplane.Encap // in which they travel; zero: not at all
	Reason string
}

// maxDelays bounds how many peers a status names.
const maxDelays = 5

// Status returns how each pool is carried, by name.
func (p *Planner) Status() []PoolStatus {
	var out []PoolStatus
	for _, pool := range p.pools.ByName {
		m := p.pools.Mode(pool)
		st := PoolStatus{Name: pool.Name, CIDR: pool.CIDR, Encapsulation: pool.Encap, Mode: m, Driver: driverFor(pool.Encap), BehindTotal: p.behind[pool.Name]}
		encaps := p.encapsOf(m, pool.Family())
		for _, f := range encaps {
			st.Host = append(st.Host, p.devices[f].Keys...)
			if err := p.devices[f].Err; err != nil {
				st.Err = fmt.Errorf("pool %s (%s): %w", pool.Name, pool.Encap, err)
			}
		}
		if len(encaps) == 0 && len(p.hosts) > 0 {
			_, err := driverFor(pool.Encap).Host(p.hostFor(pool.Family(), p.outers(pool.Family())[0], m.VNI, m.Port))
			st.Err = fmt.Errorf("pool %s (%s): %w", pool.Name, pool.Encap, cmp.Or(err, dataplane.ErrNoPath))
		}
		st.Behind = p.delays(pool)
		out = append(out, st)
	}
	slices.SortFunc(out, func(a, b PoolStatus) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

// sortedNodes yields the nodes' names in order.
func (s *sender) sortedNodes() iter.Seq[string] {
	return slices.Values(slices.Sorted(maps.Keys(s.nodes.ByName)))
}

// delays lists the first nodes by name to which packets do not travel as a pool asks
// for.
func (s *sender) delays(p *cluster.Pool) []Delay {
	if s.behind[p.Name] == 0 {
		return nil
	}
	var out []Delay
	for name := range s.sortedNodes() {
		w, ok := s.paths[Key{p.Name, name, p.Family()}]
		if !ok || w.settled() {
			continue
		}
		reason := w.Reason
		if reason == "" && w.Err != nil {
			reason = w.Err.Error()
		}
		if out = append(out, Delay{name, w.Encap, reason}); len(out) == maxDelays {
			break
		}
	}
	return out
}
