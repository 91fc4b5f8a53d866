package operator

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/doctor"
	"github.com/routerd/routerd/control/doctor/gather"
	"github.com/routerd/routerd/control/probe"
)

// What an examination asks other hosts.
const (
	clocksWithin = 3 * time.Second
	heardWithin  = 1500 * time.Millisecond
	// heardMost bounds how many peers without answers are asked what they heard: where
	// there are more, it is this host that is wrong, or they are down.
	heardMost = 8
)

// clocks asks the hosts whose daemons are there for the time.
func (e *examination) clocks(ctx context.Context) error {
	listing, done := context.WithTimeout(ctx, listWithin)
	defer done()
	c, err := gather.Members(listing, e.s.cfg.Store, e.s.cfg.Presences)
	if err != nil {
		return err
	}
	_, hosts := e.s.members(c)
	list, unknown := e.s.askClocks(ctx, hosts)
	e.set(func() {
		e.facts.Clocks = list
		e.unknown = append(e.unknown, unknown...)
	})
	return nil
}

// clocked is what the latest answers to probes of the underlay say of other hosts' clocks.
func clocked(paths []*apiv1.Path) []doctor.Clock {
	var out []doctor.Clock
	for _, p := range paths {
		if p.GetClockAtLeast() != nil {
			out = withClocks(out, []doctor.Clock{{Node: p.GetNode(), AtLeast: p.GetClockAtLeast().AsDuration(), AtMost: p.GetClockAtMost().AsDuration()}})
		}
	}
	return out
}

// withClocks adds clocks of hosts of which nothing is known yet.
func withClocks(known, more []doctor.Clock) []doctor.Clock {
	for _, c := range more {
		if !slices.ContainsFunc(known, func(k doctor.Clock) bool { return k.Node == c.Node }) {
			known = append(known, c)
		}
	}
	return known
}

// askClocks asks hosts for the time. unknown says of which there is no answer, and why.
func (s *Server) askClocks(ctx context.Context, hosts []string) (list []doctor.Clock, unknown []string) {
	if len(hosts) == 0 {
		return nil, nil
	}
	silent := map[string][]string{}
	asked := time.Now()
	s.askAll(ctx, clocksWithin, hosts, &apiv1.Question{Clock: &apiv1.ClockRequest{}}, func(node string, a *apiv1.Answer, err error) {
		if err != nil {
			silent[err.Error()] = append(silent[err.Error()], node)
			return
		}
		before := asked.Round(0) // the wall clock's; what went by since is the monotonic clock's
		list = append(list, doctor.ClockOf(node, before, a.GetClock().GetTime().AsTime(), before.Add(time.Since(asked))))
	})
	slices.SortFunc(list, func(a, b doctor.Clock) int { return strings.Compare(a.Node, b.Node) })
	for _, why := range slices.Sorted(maps.Keys(silent)) {
		names := silent[why]
		slices.Sort(names)
		unknown = append(unknown, fmt.Sprintf("the clock of %s: %s", someOf(names), why))
	}
	return list, unknown
}

// heardBy asks the peers of tunnels without answers whether they heard the echoes. It returns what they said, echo by echo.
func (s *Server) heardBy(ctx context.Context, list []probe.Echo) []doctor.Known {
	out := make([]doctor.Known, len(list))
	if s.cfg.Ask == nil {
		return out
	}
	ctx, cancel := context.WithTimeoutCause(ctx, heardWithin, fmt.Errorf("no answer within %v", heardWithin))
	defer cancel()
	var asking sync.WaitGroup
	asked := 0
	for i, x := range list {
		if x.Err != nil || x.Answered || x.Refused || asked == heardMost {
			continue
		}
		asked++
		asking.Go(func() {
			a, err := s.ask(ctx, x.Node, &apiv1.Question{Heard: &apiv1.HeardRequest{Device: x.Device, Address: x.Local.String()}})
			switch h := a.GetHeard(); {
			case err != nil: // it is not there, or of an older version
			case h.GetAgo() != nil && h.GetAgo().AsDuration() < time.Since(x.Sent):
				out[i] = doctor.Yes
			default:
				out[i] = doctor.No
			}
		})
	}
	asking.Wait()
	return out
}

// heard answers when a peer's echoes came in last.
func (s *Server) heard(req *apiv1.HeardRequest) (*apiv1.HeardResponse, error) {
	peer, err := netip.ParseAddr(req.GetAddress())
	if err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "heard: address %q: %v", req.GetAddress(), err)
	}
	out := &apiv1.HeardResponse{}
	if ago, ok := s.Heard(req.GetDevice(), peer); ok {
		out.Ago = durationpb.New(ago)
	}
	return out, nil
}
