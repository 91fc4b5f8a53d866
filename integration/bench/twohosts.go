package bench

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/lab/ns"
)

// MeasureTwoHosts returns rows for packets of one established flow between pods of two
// hosts, there and back, routed and in VXLAN: the smallest that there are, so that a
// packet's own cost is all of it. All kinds of rules have hosts of their own, which take
// turns of a few milliseconds; a row is the median of the turns.
func MeasureTwoHosts(ctx context.Context, log *slog.Logger) (rows []Row, err error) {
	for _, tunnel := range []bool{false, true} {
		more, err := twoHostsRows(ctx, tunnel, log)
		if err != nil {
			return nil, err
		}
		rows = append(rows, more...)
	}
	return rows, nil
}

func twoHostsRows(ctx context.Context, tunnel bool, log *slog.Logger) (rows []Row, err error) {
	const rounds = 300
	var ways [underKinds]*way
	for under := range ways {
		w, open := openWay(ctx, fmt.Sprintf("bench-two-%d-%d", os.Getpid(), under), tunnel, underWhat(under), log) //nolint:gosec // one of four
		defer func() { err = errors.Join(err, w.close()) }()
		switch {
		case errors.Is(open, errors.ErrUnsupported):
		case open != nil:
			return nil, open
		default:
			ways[under] = w
		}
	}
	var took [underKinds][]time.Duration
	for round := range rounds {
		for turn := range ways {
			under := (round + turn) % len(ways) // nobody is always behind the same
			if ways[under] == nil {
				continue
			}
			d, err := ways[under].burst(ctx)
			if err != nil {
				return nil, err
			}
			took[under] = append(took[under], d)
		}
	}
	rate := func(u underWhat) float64 { return 2 * burstPackets / Percentile(took[u], 50).Seconds() }
	what := "packets of a flow between pods of two hosts, Direct"
	if tunnel {
		what = "packets of a flow between pods of two hosts, VXLAN"
	}
	return underRows(what, rate, func(u underWhat) bool { return ways[u] != nil }, PerSecond), nil
}

// burstPackets is how many packets wait at most: fewer than net.core.netdev_max_backlog.
const burstPackets = 500

// way is two hosts with a pod each.
type way struct {
	hosts  [2]streamHost
	fds    [2]int
	frames [2][]byte
	ends   []func() error
}

// close undoes what openWay did, the last first.
func (w *way) close() error {
	var err error
	for _, end := range slices.Backward(w.ends) {
		err = errors.Join(err, end())
	}
	return err
}

// openWay makes two hosts with rules and establishes a flow. What it returns is to be
// closed also after an error.
func openWay(ctx context.Context, name string, tunnel bool, under underWhat, log *slog.Logger) (*way, error) {
	w := &way{hosts: streamHosts(name)}
	if err := w.connect(ctx, tunnel, under, log); err != nil {
		return w, err
	}
	const port = 7000
	for i, h := range w.hosts {
		err := ns.Do(h.podSpace, func() error {
			// Where nobody listens, the pod would answer with an error each time.
			l, err := new(net.ListenConfig).ListenPacket(ctx, "udp4", netip.AddrPortFrom(h.pod, port).String())
			if err != nil {
				return err
			}
			w.ends = append(w.ends, l.Close)
			w.fds[i], err = sender("eth0")
			return err
		})
		if err != nil {
			return w, err
		}
		w.ends = append(w.ends, func() error { return unix.Close(w.fds[i]) })
		w.frames[i] = udpFrame(h.pod, w.hosts[1-i].pod, port)
		copy(w.frames[i], gatewayMAC())
		copy(w.frames[i][sourcePortAt:], w.frames[i][sourcePortAt+2:sourcePortAt+4])
	}
	return w, until(ctx, "the pods hear each other", func() (bool, error) {
		for i := range w.hosts {
			if ok, err := w.heard(i); !ok || err != nil {
				return false, err
			}
		}
		return true, nil
	})
}

// heard reports whether a packet of pod i arrives now.
func (w *way) heard(i int) (ok bool, err error) {
	err = ns.Do(w.hosts[1-i].podSpace, func() error {
		before, err := received("eth0")
		if err != nil {
			return err
		}
		const tries = 10
		for range tries {
			if _, err := unix.Write(w.fds[i], w.frames[i]); err != nil {
				return err
			}
		}
		now, err := received("eth0")
		ok = now >= before+tries
		return err
	})
	return ok, err
}

// burst sends packets there, then back, and returns how long it took until all had
// arrived.
func (w *way) burst(ctx context.Context) (took time.Duration, err error) {
	for i := range w.hosts {
		err := ns.Do(w.hosts[1-i].podSpace, func() error {
			before, err := received("eth0")
			if err != nil {
				return err
			}
			start := time.Now()
			for range burstPackets {
				if _, err := unix.Write(w.fds[i], w.frames[i]); err != nil {
					return err
				}
			}
			err = awaitPackets(ctx, "eth0", before+burstPackets)
			took += time.Since(start)
			return err
		})
		if err != nil {
			return 0, err
		}
	}
	return took, nil
}
