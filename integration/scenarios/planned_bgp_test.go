package scenarios

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

// plannedBGP is the sessions of a lab.
type plannedBGP struct {
	since map[plannedSession]time.Time // zero: it is not up
	hosts map[string]string            // by the addresses by which their sessions are known
}

// plannedSession is a session on one of its sides.
type plannedSession struct{ host, peer string }

// sessions asks every host for its sessions.
func (p *planned) sessions(t *testing.T) (plannedBGP, error) {
	t.Helper()
	out := plannedBGP{since: map[plannedSession]time.Time{}, hosts: map[string]string{}}
	for _, h := range p.Hosts() {
		o, err := p.store.Get(await.Context(t), store.ResourceKey(store.KindNode, h))
		if err != nil {
			return out, err
		}
		n, _ := o.Value.(*store.Node)
		for _, addr := range []string{n.Spec.BGP.IPv4Address, n.Spec.BGP.IPv6Address} {
			addr, _, _ = strings.Cut(addr, "/")
			out.hosts[addr] = h
		}
		r, err := p.Node(await.Context(t), h)
		if err != nil {
			return out, err // a busy machine may have no answer for a moment
		}
		for _, s := range r.GetPeers() {
			var since time.Time
			if s.GetState() == "up" {
				since = s.GetSince().AsTime()
			}
			out.since[plannedSession{h, withoutPort(s.GetAddress())}] = since
		}
	}
	return out, nil
}

// others are the other side of a session: another host's with an address of this one.
func (b plannedBGP) others(s plannedSession) []plannedSession {
	var out []plannedSession
	for addr, host := range b.hosts {
		// A session over IPv4 is none over IPv6.
		if host == s.host && strings.Contains(addr, ":") == strings.Contains(s.peer, ":") && b.hosts[s.peer] != "" {
			out = append(out, plannedSession{b.hosts[s.peer], addr})
		}
	}
	return out
}

// down names a session that both its hosts have and that is not up.
func (b plannedBGP) down() string {
	for s, since := range b.since {
		for _, o := range b.others(s) {
			if _, has := b.since[o]; has && since.IsZero() {
				return fmt.Sprintf("the session of %s with %s is not up", s.host, s.peer)
			}
		}
	}
	return ""
}

// fates says of each session what became of it; of those that stayed up, or were and are not up, nothing. Whether
// a switch takes the new one is not this side's to say: it expects the AS number of before.
func (b plannedBGP) fates(after plannedBGP) []string {
	var out []string
	say := func(s plannedSession, fate string) { out = append(out, s.host+" "+s.peer+" "+fate) }
	for s, since := range b.since {
		now, there := after.since[s]
		switch {
		case !there:
			say(s, "ends")
		case since.IsZero():
		case now.IsZero() && b.hosts[s.peer] != "":
			say(s, "goes down")
		case !now.Equal(since):
			say(s, "starts anew")
		}
	}
	for s := range after.since {
		if _, there := b.since[s]; !there {
			say(s, "comes")
		}
	}
	return inOrder(out)
}

// planned says the same by a plan. A session that one of its hosts starts anew starts anew for the other
// too, and where only one ends it the other's goes down.
func (b plannedBGP) planned(text string) []string {
	fates := plannedFates(text)
	var out []string
	say := func(s plannedSession, fate string) { out = append(out, s.host+" "+s.peer+" "+fate) }
	for s, fate := range fates {
		if fate == "comes" || fate == "ends" {
			say(s, fate)
		}
	}
	for s, since := range b.since {
		if since.IsZero() || fates[s] == "ends" {
			continue
		}
		fate := fates[s]
		for _, o := range b.others(s) {
			switch {
			case fates[o] == "ends":
				fate = "goes down"
			case fates[o] == "starts anew":
				fate = fates[o]
			}
		}
		if fate == "goes down" || fate == "starts anew" {
			say(s, fate)
		}
	}
	return inOrder(out)
}

// plannedFates is what a plan says of sessions.
func plannedFates(text string) map[plannedSession]string {
	_, text, _ = strings.Cut(text, "\nBGP:\n")
	text, _, _ = strings.Cut(text, "\nHosts:\n")
	line := regexp.MustCompile(`^    session with \S+ (\S+), AS \d+ \(.*?\) (comes|ends|starts anew|changes|cannot run)(:|$)`)
	out, in := map[plannedSession]string{}, ""
	for l := range strings.Lines(text) {
		l = strings.TrimRight(l, "\n")
		if m := line.FindStringSubmatch(l); m != nil {
			out[plannedSession{in, withoutPort(m[1])}] = m[2]
		} else if f := strings.Fields(l); len(f) == 1 {
			in = f[0]
		}
	}
	return out
}

// withoutPort is an address: no two peers here share one.
func withoutPort(s string) string {
	if ap, err := netip.ParseAddrPort(s); err == nil {
		return ap.Addr().String()
	}
	return s
}

// noLateSession ends the test if a session has come, gone or started anew since the last change was through.
func (p *planned) noLateSession(t *testing.T, what string) {
	t.Helper()
	poll(t, "ask for the sessions before "+what, func() string {
		now, err := p.sessions(t)
		if err != nil {
			return err.Error()
		}
		if late := p.bgp.fates(now); len(late) > 0 {
			t.Fatalf("before %s: of sessions something changed late: %q", what, late)
		}
		p.bgp = now
		return ""
	})
}

func inOrder(list []string) []string { return slices.Sorted(slices.Values(list)) }
