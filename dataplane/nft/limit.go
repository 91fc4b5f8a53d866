package nft

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane/filter"
)

// limitSource drops what is beyond the limits of one workload in one direction. The
// kernel counts in the rules themselves, so each workload has a chain of its own, and one
// whose limits change another one.
type limitSource struct {
	iface     string
	direction filter.Direction
	filter.Limit
}

func (s limitSource) name() string {
	return fmt.Sprintf("limit-%.2s-%s", s.direction, hashName(fmt.Sprint(s.iface, s.Limit)))
}

func (s limitSource) comment() string { return fmt.Sprintf("%s of %s", s.direction, s.iface) }

// mostBytes is the largest rate, in bytes per second, that the kernel can count: it
// multiplies the rate and the burst, of four bytes, by the nanoseconds of a second. What
// is allowed more is not counted.
const mostBytes = 14e9

func (s limitSource) rules(w *chainWriter) {
	add := func(wanted bool, match func(*matcher)) {
		if wanted {
			m := new(matcher)
			match(m)
			w.drop(m, filter.ByLimit)
		}
	}
	bucket := func(of uint32, rate uint64, burst uint32) func(*matcher) {
		return func(m *matcher) { m.expr("limit", func() { m.limit(of, rate, burst, true) }) }
	}
	add(s.Connections > 0, func(m *matcher) {
		m.state(stateNew)
		m.expr("connlimit", func() { m.connectionLimit(s.Connections) })
	})
	add(s.Packets > 0, bucket(unix.NFT_LIMIT_PKTS, uint64(s.Packets), s.PacketBurst))
	add(s.Peak > 0 && s.Peak <= mostBytes, bucket(unix.NFT_LIMIT_PKT_BYTES, s.Peak, s.PeakBurst))
	add(s.Bandwidth > 0 && s.Bandwidth <= mostBytes, bucket(unix.NFT_LIMIT_PKT_BYTES, s.Bandwidth, s.Burst))
}

// placeLimits places a workload's limits.
func (w *desired) placeLimits(p *placed) {
	for _, s := range []limitSource{{p.Interface, filter.Egress, p.Limits.Egress}, {p.Interface, filter.Ingress, p.Limits.Ingress}} {
		if s.Limit == (filter.Limit{}) {
			continue
		}
		set := limitFromMap
		if s.direction == filter.Ingress {
			set = limitToMap
		}
		p.roots = append(p.roots, s)
		p.elem(set, ifname(p.Interface), s.name())
		p.needs.limited = 1
	}
}
