package operator

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/control/doctor"
	"github.com/routerd/routerd/control/probe"
	"github.com/routerd/routerd/dataplane/survey"
	"github.com/routerd/routerd/dataplane/workload"
)

// How hosts that do not answer are asked for an ICMP echo reply: nobody says when the watch for it has begun, so several are sent.
const (
	repliesWithin = 300 * time.Millisecond
	requestEvery  = 50 * time.Millisecond
)

// barred finds out whether packets of hosts from which no answer comes arrive, and are dropped because the way back is by another
// device than that by which they come in. Packet filters leave ICMP alone more often than the rest, and routers send it the same way.
func (e *examination) barred(ctx context.Context, echoes []probe.Echo) error {
	local, err := netip.ParsePrefix(e.facts.Node.GetIpv4Address())
	if err != nil {
		return nil //nolint:nilerr // the source of IPv6 packets is not checked by a setting
	}
	suspects := e.suspects(echoes)
	if len(suspects) == 0 {
		return nil
	}
	asker, err := survey.Open()
	if err != nil {
		return err
	}
	defer asker.Close()
	errs := make([]error, len(suspects))
	var asking sync.WaitGroup
	for i, b := range suspects {
		asking.Go(func() {
			b.Device, errs[i] = comesIn(ctx, local.Addr(), b.Addr)
			if b.Device == "" {
				return
			}
			_, err := asker.Ask(survey.Packet{From: b.Addr, To: local.Addr(), In: b.Device})
			b.By = survey.Strict(e.s.cfg.Sysctls, b.Device)
			if !errors.Is(err, survey.ErrSource) || b.By == "" {
				return
			}
			if b.Back, errs[i] = asker.Ask(survey.Packet{To: b.Addr}); errs[i] == nil {
				e.set(func() { e.facts.Barred = append(e.facts.Barred, b) })
			}
		})
	}
	asking.Wait()
	e.set(func() {
		slices.SortFunc(e.facts.Barred, func(a, b doctor.Barred) int { return a.Addr.Compare(b.Addr) })
	})
	return errors.Join(errs...)
}

// suspects returns those from whom no answer comes: through a tunnel, or as a BGP peer.
func (e *examination) suspects(echoes []probe.Echo) (out []doctor.Barred) {
	add := func(node string, a netip.Addr) {
		known := slices.ContainsFunc(out, func(b doctor.Barred) bool { return b.Addr == a })
		if a.Is4() && !known && len(out) < heardMost {
			out = append(out, doctor.Barred{Node: node, Addr: a})
		}
	}
	for _, x := range echoes {
		if x.Err == nil && !x.Answered && !x.Refused {
			add(x.Node, x.Addr)
		}
	}
	for _, p := range e.facts.Node.GetPeers() {
		a, err := netip.ParseAddr(p.GetAddress())
		if err == nil && p.GetState() != "up" {
			add(cmp.Or(e.facts.Nodes[a], p.GetName()), a)
		}
	}
	return out
}

// comesIn returns the device by which a host's answers to echo requests come in; empty: none comes. Of several that see the same
// packet, as a VLAN and what it is on, the last one is whose it is.
func comesIn(ctx context.Context, local, peer netip.Addr) (device string, err error) {
	p := workload.Packet{Src: local, Dst: peer, Protocol: unix.IPPROTO_ICMP, ICMPType: 8, ICMPID: uint16(rand.N(1 << 16))} //nolint:gosec // to be told from others, no secret
	ctx, cancel := context.WithTimeout(ctx, repliesWithin)
	defer cancel()
	var sending sync.WaitGroup
	sending.Go(func() {
		for async.Sleep(ctx, requestEvery) == nil {
			if workload.SendHere(p) != nil {
				return // there is no way: which is said elsewhere
			}
		}
	})
	seen, err := survey.Watch(ctx, survey.Connection{Src: local, Dst: peer, Protocol: p.Protocol, ICMPID: p.ICMPID})
	cancel()
	sending.Wait()
	for _, s := range seen {
		if s.Back && !s.Out {
			device = s.Device
		}
	}
	return device, err
}
