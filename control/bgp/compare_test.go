package bgp

import (
	"fmt"
	"net/netip"
	"testing"
	"time"
)

// TestCompare spoils what the reader was told, and the comparison with GoBGP's
// table puts it right; where nothing is wrong it tells nothing.
func TestCompare(t *testing.T) {
	t.Parallel()
	h := hosts(t, 2)
	here, there := newRun(t, SpeakerOptions{}), newRun(t, SpeakerOptions{})
	there.apply(testConfig(h[1], 64999, []string{"172.20.1.0/24", "172.20.2.0/24", "172.20.3.0/24"}, waiting(tor(h[1], h[0], 64512))))
	here.apply(testConfig(h[0], 64512, []string{"192.168.9.0/26"}, tor(h[0], h[1], 64999)))
	for i := 1; i <= 3; i++ {
		here.waitPath(fmt.Sprintf("172.20.%d.0/24", i))
	}
	quiet := func(what string) {
		t.Helper()
		if n := here.compare(); n != 0 {
			t.Errorf("%s: %d prefixes differ", what, n)
		}
	}
	quiet("nothing is wrong")
	// A way that is configured and nobody announced.
	configured := netip.MustParsePrefix("10.9.9.9/32")
	here.rib.add(configured, Hop{NextHop: h[1], Peer: "configured"})
	quiet("a configured way")

	gone, phantom, other := netip.MustParsePrefix("172.20.1.0/24"), netip.MustParsePrefix("172.21.0.0/24"), netip.MustParsePrefix("172.20.2.0/24")
	here.rib.remove(gone, h[1])
	here.rib.add(phantom, Hop{NextHop: h[1], PeerAddr: h[1]})
	here.rib.add(other, Hop{NextHop: h[0], PeerAddr: h[0]})
	here.waitNoPath(gone.String())
	here.waitPath(phantom.String())
	n := 0
	poll(t, here.dump, func() bool { n += here.compare(); return n >= 3 }) // what changes just now is left out
	if n != 3 {
		t.Errorf("%d prefixes put right, want 3", n)
	}
	here.waitPath(gone.String())
	here.waitNoPath(phantom.String())
	poll(t, here.dump, func() bool {
		p, ok := here.path(other.String())
		return ok && p.NextHop == h[1] && len(p.More) == 0
	})
	if _, ok := here.path(configured.String()); !ok {
		t.Error("the configured way is gone")
	}
	quiet("all is put right")
}

// TestCompareBesideChanges: a table of which something always changes is compared
// all the same, and what changes is left alone.
func TestCompareBesideChanges(t *testing.T) {
	t.Parallel()
	h := hosts(t, 2)
	here, there := newRun(t, SpeakerOptions{}), newRun(t, SpeakerOptions{})
	announce := []string{"172.20.1.0/24", "172.20.2.0/24"}
	there.apply(testConfig(h[1], 64999, announce, waiting(tor(h[1], h[0], 64512))))
	here.apply(testConfig(h[0], 64512, nil, tor(h[0], h[1], 64999)))
	here.waitPath("172.20.1.0/24")
	here.waitPath("172.20.2.0/24")

	done, n := make(chan struct{}), 0
	here.rib.add(netip.MustParsePrefix("172.21.0.0/24"), Hop{NextHop: h[1], PeerAddr: h[1]})
	here.waitPath("172.21.0.0/24")
	go func() {
		defer close(done)
		n = here.compare()
	}()
	for changes := 0; ; changes++ {
		there.apply(testConfig(h[1], 64999, announce[:1+changes%2], waiting(tor(h[1], h[0], 64512))))
		select {
		case <-done:
			if n != 1 {
				t.Errorf("beside %d changes %d prefixes put right, want 1", changes, n)
			}
			here.waitNoPath("172.21.0.0/24")
			return
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// TestJudge: when this host has another address, paths with it as their next hop
// lead nowhere, and are found again when it has it no more.
func TestJudge(t *testing.T) {
	t.Parallel()
	four, six := hosts6(t, 2)
	here, there := newRun(t, SpeakerOptions{}), newRun(t, SpeakerOptions{})
	there.apply(testConfig6(four[1], six[1], 64999, []string{"2001:db8:1::/64"}, waiting(tor(six[1], six[0], 64512))))
	with := func(own netip.Addr) Config {
		c := testConfig6(four[0], six[0], 64512, nil, tor(six[0], six[1], 64999))
		c.NextHop6 = own
		return c
	}
	here.apply(with(six[0]))
	here.waitPath("2001:db8:1::/64")
	poll(t, here.dump, func() bool { return here.happened(0, "synced") == 1 })
	here.apply(with(six[1]))
	here.waitNoPath("2001:db8:1::/64")
	here.apply(with(six[0]))
	here.waitPath("2001:db8:1::/64")
}

// TestCorrectKeepsNoSets: sets of several paths go with their last prefix.
func TestCorrectKeepsNoSets(t *testing.T) {
	t.Parallel()
	r, p := newRIB(), netip.MustParsePrefix("172.20.1.0/24")
	var hops []Hop
	for i := range 4 {
		a := netip.AddrFrom4([4]byte{10, 0, 0, byte(4 - i)})
		hops = append(hops, Hop{NextHop: a, PeerAddr: a})
	}
	configured := Hop{NextHop: hops[0].NextHop, Peer: "configured"}
	r.add(p, configured)
	r.correct(p, hops)
	if got := r.known[p]; got == nil || len(got.hops) != 5 || !got.is(hops) {
		t.Errorf("paths %+v", got)
	}
	r.correct(p, nil)
	r.remove(p, netip.Addr{})
	if len(r.sets.singles)+len(r.sets.several)+len(r.known) != 0 {
		t.Errorf("kept %v and %v", r.sets.singles, r.sets.several)
	}
}
