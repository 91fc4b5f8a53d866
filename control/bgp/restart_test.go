package bgp

import (
	"context"
	"fmt"
	"net/netip"
	"testing"
	"time"
)

// TestKilledSpeakerKeepsItsRoutes is graceful restart between two of ours: one
// is killed with -9 and comes back; the other never loses the route.
func TestKilledSpeakerKeepsItsRoutes(t *testing.T) {
	t.Parallel()
	h := hosts(t, 2)
	helper := newRun(t, SpeakerOptions{})
	helper.apply(testConfig(h[1], 64512, []string{"192.168.2.0/26"}, waiting(tor(h[1], h[0], 64512))))
	c := startChild(t, h[0], 64512, h[1], 64512, false, "192.168.1.0/26", "192.168.1.64/26")
	helper.waitPath("192.168.1.0/26")
	helper.waitPath("192.168.1.64/26")
	from := helper.mark()
	c.kill()
	helper.waitInfo(h[0], "kept while it restarts")
	startChild(t, h[0], 64512, h[1], 64512, true, "192.168.1.0/26")
	helper.waitNoPath("192.168.1.64/26") // with End-of-RIB
	routes, err := helper.Routes(t.Context())
	if err != nil || len(routes) != 1 || routes[0].Stale {
		t.Errorf("after the restart there are %v, %v; want a fresh one", routes, err)
	}
	if n := helper.happened(from, "del 192.168.1.0/26"); n != 0 {
		t.Errorf("the route went %d times\n%s", n, helper.dump())
	}
}

// TestRestartTimeEnds: a peer that does not come back loses its routes.
func TestRestartTimeEnds(t *testing.T) {
	t.Parallel()
	h := hosts(t, 2)
	helper, gone := newRun(t, SpeakerOptions{}), newRun(t, SpeakerOptions{})
	helper.apply(testConfig(h[1], 64512, nil, waiting(tor(h[1], h[0], 64512))))
	p := tor(h[0], h[1], 64512)
	p.RestartTime = 3 * time.Second
	gone.apply(testConfig(h[0], 64512, []string{"192.168.1.0/26"}, p))
	helper.waitPath("192.168.1.0/26")
	if err := gone.Stop(context.Background(), true); err != nil {
		t.Fatal(err)
	}
	helper.waitInfo(h[0], "kept while it restarts")
	if _, ok := helper.path("192.168.1.0/26"); !ok {
		t.Error("the route went before the restart time was over")
	}
	helper.waitNoPath("192.168.1.0/26")
}

// TestRestartingSpeakerWithADeadPeer: a peer that never answers does not hold
// up what is announced to the others.
func TestRestartingSpeakerWithADeadPeer(t *testing.T) {
	t.Parallel()
	h := hosts(t, 3)
	us, mate := newRun(t, SpeakerOptions{Restarting: true}), newRun(t, SpeakerOptions{})
	mate.apply(testConfig(h[1], 64512, nil, waiting(tor(h[1], h[0], 64512))))
	us.apply(testConfig(h[0], 64512, []string{"192.168.1.0/26"}, tor(h[0], h[1], 64512), tor(h[0], h[2], 64512)))
	us.waitUp(h[1])
	up := time.Now()
	mate.waitPath("192.168.1.0/26")
	if d := time.Since(up); d > 10*time.Second {
		t.Errorf("announced %s after the session was up", d)
	}
	us.waitInfo(h[2], "connection refused by "+h[2].String()+":179")
}

// TestStopWithoutGrace takes the routes along.
func TestStopWithoutGrace(t *testing.T) {
	t.Parallel()
	a, b, h := pair(t, []string{"192.168.1.0/26"}, nil)
	b.waitPath("192.168.1.0/26")
	poll(t, a.dump, func() bool { return a.happened(0, "synced") == 1 }) // the last that it has to tell
	from := a.mark()
	if err := a.Stop(context.Background(), false); err != nil {
		t.Fatal(err)
	}
	b.waitNoPath("192.168.1.0/26")
	b.waitInfo(h[0], "notification received: cease, administrative shutdown")
	if n := a.mark() - from; n != 0 {
		t.Errorf("stopping told the reader %d changes", n)
	}
}

// TestRestartWaitsForAllPeers: by the peers that have announced all they have while another one is being configured anew, or is
// yet to be found on its link, a restart is not over: End-of-RIB would have peers drop what that announces.
func TestRestartWaitsForAllPeers(t *testing.T) {
	t.Parallel()
	for name, absent := range map[string]func(self, addr netip.Addr) Peer{
		"changed": func(self, addr netip.Addr) Peer { return waiting(tor(self, addr, 64999)) },
		"on a link": func(self, _ netip.Addr) Peer {
			p := tor(self, netip.Addr{}, 64999)
			p.Interface, p.Found, p.Waiting = "eth9", true, "no neighbour has been heard on eth9 yet"
			return p
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := hosts(t, 3)
			us, mate := newRun(t, SpeakerOptions{Restarting: true}), newRun(t, SpeakerOptions{})
			mate.apply(testConfig(h[1], 64512, nil, waiting(tor(h[1], h[0], 64512))))
			from := time.Now()
			p := absent(h[0], h[2])
			config := func() Config { return testConfig(h[0], 64512, []string{"192.168.1.0/26"}, tor(h[0], h[1], 64512), p) }
			us.apply(config())
			poll(t, us.dump, func() bool { return us.inSync()[h[1]] })
			for range 50 {
				p.HoldTime += time.Second
				us.apply(config())
			}
			poll(t, func() string { return fmt.Sprintf("no End-of-RIB: %+v", mate.status(h[0])) }, func() bool { return mate.inSync()[h[0]] })
			if took := time.Since(from); took < restartDeferral {
				t.Errorf("End-of-RIB came after %s", took)
			}
		})
	}
}

// TestSyncedWaitsForChangedPeers: while a peer that has not announced its routes yet is being configured anew, it is not reported
// that all is there: routes of before the restart would go.
func TestSyncedWaitsForChangedPeers(t *testing.T) {
	t.Parallel()
	now := time.Now()
	there, changed := to(netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2"), 64512), to(netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.3"), 64512)
	s := NewSpeaker(SpeakerOptions{Log: testLog(t)})
	s.engine, s.deadline, s.cfg.Peers = &backend{}, now.Add(time.Minute), []Peer{there, changed}
	s.sessions[there.id()] = &session{peer: there, up: true, canGR: true, eor: true}
	if wait := s.checkSync(now); wait != time.Minute || s.deadline.IsZero() {
		t.Errorf("looked at again after %s; all is said to be there: %t", wait, s.deadline.IsZero())
	}
	s.sessions[changed.id()] = &session{peer: changed, eor: true}
	if s.checkSync(now); !s.deadline.IsZero() {
		t.Error("it is waited for what is there")
	}
}
