package probe

import (
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
)

// refusing is a socket by which the kernel sends nothing.
type refusing struct{ packetSocket }

func (refusing) send(netip.AddrPort, []byte, int) error { return unix.ENOBUFS }

// TestRefusals: that the kernel does not send to a thousand silent hosts is one line of the log, and the
// next one a minute later says how many it was.
func TestRefusals(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var out strings.Builder
		s := ends{
			log:  slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug})),
			open: map[localEnd]*openEnd{{}: {own: refusing{}}},
		}
		key := make([]byte, 32)
		round := func() {
			for range 1000 {
				s.send(packet{msg: message{kind: kindRequest, from: "node1", to: "node2"}}, key)
			}
		}
		round()
		if got := out.String(); strings.Count(got, "\n") != 1 || !strings.Contains(got, "probes=1 ") || !strings.Contains(got, "no buffer space available") {
			t.Errorf("the first round is logged as %q", got)
		}
		out.Reset()
		<-time.After(refusalsEvery)
		round()
		if got := out.String(); strings.Count(got, "\n") != 1 || !strings.Contains(got, "probes=1000 ") {
			t.Errorf("the round a minute later is logged as %q", got)
		}
	})
}
