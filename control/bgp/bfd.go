package bgp

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os/exec"
	"slices"

	"github.com/routerd/routerd/control/bfd"
	"github.com/routerd/routerd/store"
)

// bfdOf reads the BFD that annotations ask for. The error names the annotation.
func bfdOf(notes map[string]string) (store.BFD, error) {
	v, ok := notes[store.AnnotationBFD]
	if !ok {
		return store.BFD{}, nil
	}
	b, err := store.ParseBFD(v)
	if err != nil {
		return store.BFD{}, fmt.Errorf("annotation %s is %q: %w", store.AnnotationBFD, v, err)
	}
	return b, nil
}

// bfdSessions returns the BFD sessions that a configuration asks for: one for each peer that runs with one. The peer is one
// hop away if it is in a subnet of one of the host's devices, as BIRD and FRR have it; links are these
// subnets, and adjacent the own addresses on the links of sessions over link-local addresses.
func bfdSessions(c *Config, adjacent map[string]Link) (all []bfd.Session) {
	for _, p := range c.Peers {
		local := p.bfdSource(c, adjacent)
		if p.BFD == (store.BFD{}) || !p.runs() || !local.IsValid() {
			continue
		}
		key := bfd.Key{Local: local, Remote: p.Addr, Multihop: p.Interface == "" && !inSubnet(c.Links, p.Addr)}
		if slices.ContainsFunc(all, func(s bfd.Session) bool { return s.Key == key }) {
			continue // another peer has the address
		}
		all = append(all, bfd.Session{
			Key:    key,
			Timing: bfd.Timing{MinTx: p.BFD.Interval, MinRx: p.BFD.Interval, Multiplier: p.BFD.Multiplier},
		})
	}
	return all
}

// bfdSource is the address that a peer's BFD session has on this side: that of the BGP session.
func (p Peer) bfdSource(c *Config, adjacent map[string]Link) netip.Addr {
	switch {
	case p.Interface != "":
		if a := adjacent[p.Interface].Addr; a.IsValid() {
			return a.WithZone(p.Interface)
		}
		return netip.Addr{}
	case p.Source.IsValid():
		return p.Source
	case p.Addr.Is4():
		return c.NextHop
	}
	return c.NextHop6
}

func inSubnet(links map[string][]netip.Prefix, a netip.Addr) bool {
	for _, subnets := range links {
		for _, s := range subnets {
			if s.Contains(a) {
				return true
			}
		}
	}
	return false
}

// bfdInfo says what is known of a session, for people.
func bfdInfo(s bfd.Status) string {
	switch {
	case s.Fault != "":
		return fmt.Sprintf("%v: %s", s.State, s.Fault)
	case s.State == bfd.Up:
		return fmt.Sprintf("Up (%v, down after %v)", s.Interval, s.Detection)
	case s.State == bfd.AdminDown || s.RemoteState == bfd.AdminDown && s.Received > 0:
		return fmt.Sprintf("%v: administratively down", s.State)
	case s.Failed:
		return fmt.Sprintf("%v: %v", s.State, s.Diagnostic)
	case s.Received == 0:
		return fmt.Sprintf("%v: nothing was received; enable BFD on the peer too", s.State)
	}
	return s.State.String()
}

// watchdog has BFD watch peers, and reports those that are not reached any more.
type watchdog struct {
	log         *slog.Logger
	supervisor  *bfd.Supervisor
	unreachable func(netip.Addr) error
	down        chan netip.Addr
	watched     []bfd.Session // of the one goroutine that calls watch
}

// unreachedAtOnce is how many peers may go at one moment without BFD's reader having to wait: all of a large mesh.
const unreachedAtOnce = 1024

func newWatchdog(log *slog.Logger, command func() *exec.Cmd, unreachable func(netip.Addr) error) *watchdog {
	w := &watchdog{log: log, unreachable: unreachable, down: make(chan netip.Addr, unreachedAtOnce)}
	w.supervisor = bfd.NewSupervisor(log, command, w.changed)
	return w
}

func (w *watchdog) run(ctx context.Context) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		w.supervisor.Run(ctx)
	}()
	for {
		select {
		case <-ctx.Done():
			<-done
			return
		case peer := <-w.down:
			if err := w.unreachable(peer); err != nil {
				w.log.Warn("a peer unreachable by BFD keeps its session", "peer", peer, "error", err)
			}
		}
	}
}

// changed hears of each change of a session. A peer that took its session down is not one that is not reached.
func (w *watchdog) changed(s bfd.Status) {
	w.log.Info("bfd session", "peer", s.Key.Remote, "state", s.State.String(), "peer_state", s.RemoteState.String(), "diagnostic", s.Diagnostic.String(), "late", s.Late)
	if s.State == bfd.Down && s.Failed {
		select {
		case w.down <- s.Key.Remote:
		default:
			w.log.Error("too many peers are unreachable at once; this one is left to its hold time", "peer", s.Key.Remote)
		}
	}
}

// watch makes the sessions those that are wanted.
func (w *watchdog) watch(want []bfd.Session) {
	if slices.Equal(want, w.watched) {
		return
	}
	w.watched = want
	w.supervisor.Set(want)
}

// describe fills in what BFD knows of peers.
func (w *watchdog) describe(ctx context.Context, peers []PeerStatus) {
	all, err := w.supervisor.Status(ctx)
	known := make(map[netip.Addr]string, len(all))
	for _, s := range all {
		known[s.Key.Remote] = bfdInfo(s)
	}
	for i := range peers {
		p := &peers[i]
		p.BFD = known[p.Addr]
		if p.BFD == "" && p.bfd && err != nil {
			p.BFD = err.Error()
		}
	}
}
