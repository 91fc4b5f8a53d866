package bgp

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestBIRDSwitch peers by eBGP with BIRD as a top-of-rack switch.
func TestBIRDSwitch(t *testing.T) {
	t.Parallel()
	h := hosts(t, 2)
	b := startBIRD(t, birdConf(h[1], 64999, h[0], 64512, "", "203.0.113.0/24", "0.0.0.0/0", "198.51.100.7/32"))
	r := newRun(t, SpeakerOptions{})
	r.apply(testConfig(h[0], 64512, []string{"192.168.1.0/26", "192.168.9.5/32"}, tor(h[0], h[1], 64999)))
	r.waitUp(h[1])
	if p := r.waitPath("203.0.113.0/24"); p.ASPath != "64999" || p.IBGP || p.NextHop != h[1] || p.Peer != "tor-"+h[1].String() {
		t.Errorf("path %+v", p)
	}
	r.waitPath("198.51.100.7/32")
	poll(t, r.dump, func() bool { st := r.status(h[1]); return st.Received == 3 && st.Accepted == 2 })
	b.waitFor("192.168.9.5/32", "show", "route")
	out := b.birdc("show", "route", "192.168.1.0/26", "all")
	for _, says := range []string{"BGP.as_path: 64512\n", "BGP.next_hop: " + h[0].String() + "\n", "BGP.origin: IGP"} {
		if !strings.Contains(out, says) {
			t.Errorf("BIRD has no %q in\n%s", says, out)
		}
	}
	if strings.Contains(out, "203.0.113") {
		t.Errorf("BIRD got its own route back:\n%s", out)
	}
	protocol := b.birdc("show", "protocols", "all", "host")
	for _, says := range []string{"Graceful restart", "Restart time: 120"} {
		if !strings.Contains(protocol, says) {
			t.Errorf("BIRD sees no %q in\n%s", says, protocol)
		}
	}
}

// TestBIRDMesh peers by iBGP with BIRD, as Calico's nodes do, and looks at the
// preference that carries the metric.
func TestBIRDMesh(t *testing.T) {
	t.Parallel()
	h := hosts(t, 2)
	b := startBIRD(t, birdConf(h[1], 64512, h[0], 64512, "passive off;", "192.168.2.0/26", "10.9.0.0/16"))
	r := newRun(t, SpeakerOptions{})
	r.apply(testConfig(h[0], 64512, []string{"192.168.1.0/26"}, to(h[0], h[1], 64512)))
	if p := r.waitPath("192.168.2.0/26"); p.ASPath != "" || !p.IBGP || p.LocalPref != 100 {
		t.Errorf("path %+v", p)
	}
	b.waitFor(fmt.Sprintf("BGP.local_pref: %d\n", LocalPref), "show", "route", "192.168.1.0/26", "all")
	if _, ok := r.path("10.9.0.0/16"); ok {
		t.Error("a prefix outside the pools was accepted from a node")
	}
	c := testConfig(h[0], 64512, []string{"192.168.1.0/26"}, to(h[0], h[1], 64512))
	c.LocalPref = localPref(500)
	r.apply(c)
	b.waitFor(fmt.Sprintf("BGP.local_pref: %d\n", localPref(500)), "show", "route", "192.168.1.0/26", "all")
	// A withdrawal.
	r.apply(testConfig(h[0], 64512, nil, to(h[0], h[1], 64512)))
	poll(t, func() string { return b.birdc("show", "route") },
		func() bool { return !strings.Contains(b.birdc("show", "route"), "192.168.1.0/26") })
}

// TestBIRDRestarts kills BIRD and starts it again with its recovery flag: its
// routes stay, those it does not announce again go.
func TestBIRDRestarts(t *testing.T) {
	t.Parallel()
	h := hosts(t, 2)
	b := startBIRD(t, birdConf(h[1], 64999, h[0], 64512, "", "203.0.113.0/24", "198.51.100.0/24"))
	r := newRun(t, SpeakerOptions{})
	r.apply(testConfig(h[0], 64512, []string{"192.168.1.0/26"}, tor(h[0], h[1], 64999)))
	r.waitPath("203.0.113.0/24")
	r.waitPath("198.51.100.0/24")
	from := r.mark()
	b.kill()
	r.waitInfo(h[1], "kept while it restarts")
	routes, err := r.Routes(t.Context())
	if err != nil || len(routes) != 2 || !routes[0].Stale || !routes[1].Stale {
		t.Errorf("while BIRD is away there are %v, %v; want two stale ones", routes, err)
	}
	if err := os.WriteFile(b.conf, []byte(birdConf(h[1], 64999, h[0], 64512, "", "203.0.113.0/24")), 0o644); err != nil {
		t.Fatal(err)
	}
	b.start("-R")
	r.waitUp(h[1])
	r.waitNoPath("198.51.100.0/24") // with End-of-RIB
	routes, err = r.Routes(t.Context())
	if err != nil || len(routes) != 1 || routes[0].Stale {
		t.Errorf("after the restart there are %v, %v; want a fresh one", routes, err)
	}
	if n := r.happened(from, "del 203.0.113.0/24"); n != 0 {
		t.Errorf("the route went %d times\n%s", n, r.dump())
	}
	b.waitFor("192.168.1.0/26", "show", "route")
}

// TestBIRDKeepsOurRoutes kills a speaker with -9 and starts it again: BIRD
// keeps its routes as stale meanwhile and never removes one.
func TestBIRDKeepsOurRoutes(t *testing.T) {
	t.Parallel()
	h := hosts(t, 2)
	b := startBIRD(t, birdConf(h[1], 64999, h[0], 64512, "", "203.0.113.0/24"))
	c := startChild(t, h[0], 64512, h[1], 64999, false, "192.168.1.0/26", "192.168.1.64/26")
	b.waitFor("192.168.1.64/26", "show", "route")
	c.kill()
	b.waitFor("192.168.1.0/26", "show", "route")
	b.waitFor(" start ", "show", "protocols", "host") // BIRD has seen the end of the session
	b.waitFor("192.168.1.0/26", "show", "route")
	c = startChild(t, h[0], 64512, h[1], 64999, true, "192.168.1.0/26")
	b.waitFor("Established", "show", "protocols", "host")
	// What did not come again goes with our End-of-RIB, so it is the sign that
	// the recovery is over.
	poll(t, func() string { return b.birdc("show", "route") + b.log.String() + c.log.String() },
		func() bool { return removals(b.log.String(), "192.168.1.64/26") > 0 })
	if out := b.birdc("show", "route"); !strings.Contains(out, "192.168.1.0/26") {
		t.Errorf("BIRD lost the route:\n%s", out)
	}
	if n := removals(b.log.String(), "192.168.1.0/26"); n != 0 {
		t.Errorf("BIRD removed the route %d times:\n%s", n, b.log)
	}
	if n := removals(b.log.String(), "192.168.1.64/26"); n != 1 {
		t.Errorf("BIRD removed the route that did not come again %d times, want 1:\n%s", n, b.log)
	}
	// A graceful stop says nothing: the same holds.
	if err := c.stdin.Close(); err != nil {
		t.Fatal(err)
	}
	<-c.done
	b.waitFor(" start ", "show", "protocols", "host")
	startChild(t, h[0], 64512, h[1], 64999, true, "192.168.1.0/26")
	b.waitFor("Established", "show", "protocols", "host")
	if n := removals(b.log.String(), "192.168.1.0/26"); n != 0 {
		t.Errorf("BIRD removed the route %d times:\n%s", n, b.log)
	}
	if log := b.log.String(); strings.Contains(log, "Cease") || strings.Contains(log, "Received:") {
		t.Errorf("BIRD was sent a notification:\n%s", log)
	}
}

// removals counts the lines in which BIRD logs that a route of ours went.
func removals(log, prefix string) int {
	n := 0
	for line := range strings.Lines(log) {
		if strings.Contains(line, "host.ipv4 > removed") && strings.Contains(line, prefix+" ") {
			n++
		}
	}
	return n
}

// TestBIRDWrongAS: both numbers are said, whoever is wrong, and the session
// comes up when the wish is mended.
func TestBIRDWrongAS(t *testing.T) {
	t.Parallel()
	h := hosts(t, 2)
	startBIRD(t, birdConf(h[1], 64998, h[0], 64512, ""))
	r := newRun(t, SpeakerOptions{})
	r.apply(testConfig(h[0], 64512, nil, tor(h[0], h[1], 64999)))
	st := r.waitInfo(h[1], fmt.Sprintf("wrong AS: %s has AS 64998, but AS 64999 is configured for it", h[1]))
	if st.State != StateStart {
		t.Errorf("state %q", st.State)
	}
	r.apply(testConfig(h[0], 64512, nil, tor(h[0], h[1], 64998)))
	r.waitUp(h[1])
}

func TestBIRDExpectsAnotherAS(t *testing.T) {
	t.Parallel()
	h := hosts(t, 2)
	startBIRD(t, birdConf(h[1], 64999, h[0], 64511, ""))
	r := newRun(t, SpeakerOptions{})
	r.apply(testConfig(h[0], 64512, nil, tor(h[0], h[1], 64999)))
	r.waitInfo(h[1], fmt.Sprintf("wrong AS: %s expects another one of this node than 64512 (notification received: OPEN message error, bad peer AS)", h[1]))
}

// TestBIRDHoldTimer freezes BIRD: the session ends when nothing is heard, and
// says so.
func TestBIRDHoldTimer(t *testing.T) {
	t.Parallel()
	h := hosts(t, 2)
	b := startBIRD(t, birdConf(h[1], 64999, h[0], 64512, "", "203.0.113.0/24"))
	r := newRun(t, SpeakerOptions{})
	p := tor(h[0], h[1], 64999)
	p.HoldTime, p.RestartTime = 3*time.Second, 3*time.Second
	r.apply(testConfig(h[0], 64512, nil, p))
	r.waitPath("203.0.113.0/24")
	if err := b.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	r.waitInfo(h[1], "hold timer expired: nothing was received from the peer")
	if err := b.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	r.waitUp(h[1])
}

// TestBIRDStopsInOrder: a peer that takes its leave takes its routes along,
// and the status says what it said.
func TestBIRDStopsInOrder(t *testing.T) {
	t.Parallel()
	h := hosts(t, 2)
	b := startBIRD(t, strings.Replace(birdConf(h[1], 64999, h[0], 64512, "", "203.0.113.0/24"), "debug { states", "disabled off; debug { states", 1))
	r := newRun(t, SpeakerOptions{})
	r.apply(testConfig(h[0], 64512, nil, tor(h[0], h[1], 64999)))
	r.waitPath("203.0.113.0/24")
	if err := b.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	r.waitInfo(h[1], "notification received: cease, administrative shutdown")
	r.waitNoPath("203.0.113.0/24")
	r.waitInfo(h[1], "connection refused by "+h[1].String()+":179")
}
