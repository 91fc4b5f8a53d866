package bgp

import (
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// TestPast: the end of a session with its link is counted and told, and what was
// counted goes on with the next one unless the configuration has changed.
func TestPast(t *testing.T) {
	t.Parallel()
	up := Peer{Name: "uplink", Interface: "eth1", Found: true, Addr: netip.MustParseAddr("fe80::1%eth1"), Source: netip.MustParseAddr("fe80::a%eth1"), ASN: 64998}
	down, other, changed, wrong, mesh := up, up, up, up, up
	down.Addr, down.Source, down.Waiting = netip.Addr{}, netip.Addr{}, "device eth1 is down or without carrier"
	other.Addr = netip.MustParseAddr("fe80::2%eth1")
	changed.ASN, wrong.Problem, mesh.Interface = 64997, "something", ""
	for _, c := range []struct {
		name string
		next []Peer
		want int // ends that are counted on
		told []string
	}{
		{"the link goes", []Peer{down}, 1, []string{StateStart + " " + down.Waiting}},
		{"another neighbour", []Peer{other}, 1, []string{StateStart + " connecting"}},
		{"other settings", []Peer{changed}, 0, nil},
		{"a problem", []Peer{wrong}, 0, nil},
		{"not there any more", nil, 0, nil},
		{"a node of this name", []Peer{mesh}, 0, nil},
	} {
		var told []string
		s := NewSpeaker(SpeakerOptions{Log: slog.New(slog.DiscardHandler), OnState: func(_ Peer, state, info string) { told = append(told, state+" "+info) }})
		s.readDrops = noDrops // the kernel's are of what other tests do besides
		ss := newSession(up, 64512, time.Now(), drops{})
		ss.up = true
		ss.tally.rose()
		cfg := Config{Peers: c.next}
		s.archive(ss, &cfg)
		s.forget(&cfg)
		p := up
		if len(c.next) > 0 {
			p = c.next[0]
		}
		if got := s.tallyOf(p); got.resets[ResetLost] != c.want || got.established != c.want {
			t.Errorf("%s: counted %+v, want %d", c.name, got, c.want)
		}
		if diff := cmp.Diff(c.told, told); diff != "" {
			t.Errorf("%s: told (-want +got):\n%s", c.name, diff)
		}
		s.forget(&Config{})
		if len(s.archived) != 0 {
			t.Errorf("%s: of a peer that is gone there is %+v", c.name, s.archived)
		}
	}
}
