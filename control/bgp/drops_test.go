package bgp

import (
	"fmt"
	"log/slog"
	"net/netip"
	"testing"
	"time"
)

func noDrops() drops { return drops{} }

// TestDropsAreReadOnce: what a look at all sessions costs does not grow with the kernel's
// table times their number. It reads no counters for sessions that are up.
func TestDropsAreReadOnce(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		up   bool
		want int
	}{{false, 1}, {true, 0}} {
		s := NewSpeaker(SpeakerOptions{Log: slog.New(slog.DiscardHandler)})
		reads := 0
		s.readDrops = func() drops { reads++; return drops{wrong: 3} }
		for i := range 1000 {
			p := Peer{Name: fmt.Sprintf("node-%d", i), Addr: netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}), Port: 179, ASN: 64512, Password: Password{"secret"}}
			s.cfg.Peers = append(s.cfg.Peers, p)
			ss := newSession(p, 64512, time.Time{}, drops{})
			ss.up = tt.up
			s.sessions[p.id()] = ss
		}
		_, states := s.states()
		if reads != tt.want {
			t.Errorf("up %t: the counters were read %d times, want %d", tt.up, reads, tt.want)
		}
		const suspected = "connecting; MD5 suspected: 3 segments came signed with another password"
		if got := states[999].Info; !tt.up && got != suspected {
			t.Errorf("info %q, want %q", got, suspected)
		}
	}
}
