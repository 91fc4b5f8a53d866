package engine

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/routerd/routerd/control/bgp/engine/wire"
	"github.com/routerd/routerd/integration/await"
)

// TestCallers: a connection from an address that no peer has waits for one if it is to have one, and for no other; a second one
// replaces it, and the end of the engine closes it.
func TestCallers(t *testing.T) {
	t.Parallel()
	wanted, asked := netip.MustParseAddr("127.0.99.2"), atomic.Int32{}
	n := newNode(t, "127.0.99.1", 65000, func(o *Options) {
		o.Call = func(from netip.Addr) bool { asked.Add(1); return from == wanted }
	})
	dial := func(from string) net.Conn {
		t.Helper()
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
		c, err := d.DialContext(t.Context(), "tcp", n.at.String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		if err := c.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		return c
	}
	closed := func(c net.Conn) {
		t.Helper()
		b, err := io.ReadAll(c)
		if len(b) > 0 || isTimeout(err) {
			t.Errorf("read %d bytes, %v: want the end", len(b), err)
		}
	}
	closed(dial("127.0.99.3"))
	held := func(want int32) {
		t.Helper()
		await.True(t, "the call", func() bool { return asked.Load() == want })
	}
	first := dial("127.0.99.2")
	held(2)
	second := dial("127.0.99.2")
	held(3)
	closed(first)
	if err := n.SetPeers([]Peer{{Addr: wanted, Port: 179, AS: 65001, Passive: true, HoldTime: 90 * time.Second, Families: [wire.Families]Family{{Enabled: true}}}}); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(second, make([]byte, 19)); err != nil { // its OPEN
		t.Errorf("the connection that was held: %v", err)
	}
	second.Close()
	if err := n.SetPeers(nil); err != nil {
		t.Fatal(err)
	}
	third := dial("127.0.99.2")
	held(4)
	if err := n.Stop(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	closed(third)
}

func isTimeout(err error) bool {
	var e net.Error
	return errors.As(err, &e) && e.Timeout()
}
