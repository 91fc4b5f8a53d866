package lab

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/lab/traffic"
)

// Ping asks once from HOST or HOST/POD to another's address of the family that
// the options name, and waits a second for the answer.
func (l *Lab) Ping(ctx context.Context, from, to string, o traffic.Options) (traffic.Reply, error) {
	if err := l.checkWhere(from); err != nil {
		return traffic.Reply{}, err
	}
	dst, err := l.target(to, o)
	if err != nil {
		return traffic.Reply{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	return traffic.Ping(ctx, l.Space(from), dst, o)
}

// Flow sends rate requests a second from HOST or HOST/POD to another until it
// is stopped.
func (l *Lab) Flow(ctx context.Context, from, to string, rate int, o traffic.Options) (*traffic.Flow, error) {
	if err := l.checkWhere(from); err != nil {
		return nil, err
	}
	dst, err := l.target(to, o)
	if err != nil {
		return nil, err
	}
	return traffic.StartFlow(ctx, l.Space(from), dst, rate, o)
}

// Matrix says who reaches whom.
type Matrix struct {
	Places  []string          // HOST or HOST/POD; hosts first
	Replies [][]traffic.Reply // from row to column; nobody asks himself
}

// OK reports whether every place reaches every other.
func (m Matrix) OK() bool { return len(m.Failures()) == 0 }

// Pairs returns the number of pairs asked and of those that answered.
func (m Matrix) Pairs() (asked, answered int) {
	for i, row := range m.Replies {
		for j, r := range row {
			if i != j {
				asked++
			}
			if i != j && r.OK {
				answered++
			}
		}
	}
	return asked, answered
}

// Failures lists the pairs that do not reach each other and why.
func (m Matrix) Failures() []string {
	var out []string
	for i, row := range m.Replies {
		for j, r := range row {
			if i != j && !r.OK {
				out = append(out, fmt.Sprintf("%s → %s: %s", m.Places[i], m.Places[j], r))
			}
		}
	}
	return out
}

// target returns the address that requests with these options go to.
func (l *Lab) target(where string, o traffic.Options) (netip.Addr, error) {
	if o.IPv6 {
		return l.AddrOf(where, dataplane.IPv6)
	}
	return l.AddrOf(where, dataplane.IPv4)
}

// ReachabilityMatrix asks from every pod and every host to every other that has
// an address of the family, again and again until all have answered or ctx
// ends.
func (l *Lab) ReachabilityMatrix(ctx context.Context, o traffic.Options) (Matrix, error) {
	pods, err := l.Pods()
	if err != nil {
		return Matrix{}, err
	}
	places := l.Hosts()
	if u := l.topology.Underlay; o.IPv6 && !u.has6() || !o.IPv6 && !u.has4() {
		places = nil
	}
	for _, p := range pods {
		places = append(places, p.String())
	}
	return l.Reachability(ctx, places, o)
}

// Reachability is ReachabilityMatrix for some of the hosts and pods.
func (l *Lab) Reachability(ctx context.Context, places []string, o traffic.Options) (Matrix, error) {
	addrs := make([]netip.Addr, len(places))
	for i, p := range places {
		a, err := l.target(p, o)
		if err != nil {
			return Matrix{}, err
		}
		addrs[i] = a
	}
	m := Matrix{Places: places, Replies: make([][]traffic.Reply, len(places))}
	var g errgroup.Group
	for i, from := range places {
		g.Go(func() error {
			targets := append(append([]netip.Addr{}, addrs[:i]...), addrs[i+1:]...)
			replies, err := traffic.Probe(ctx, l.Space(from), targets, o)
			if err != nil {
				return err
			}
			row := make([]traffic.Reply, len(places))
			for j, a := range addrs {
				if j != i {
					row[j] = replies[a]
				}
			}
			m.Replies[i] = row
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return Matrix{}, err
	}
	return m, nil
}
