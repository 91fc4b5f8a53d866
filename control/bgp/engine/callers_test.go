package engine

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/routerd/routerd/control/bgp/engine/conn"
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

// TestOneAddressRange: the kernel has one password for a peer and for a range of its address alone; neither end of the two takes the
// other's away.
func TestOneAddressRange(t *testing.T) {
	t.Parallel()
	wanted := netip.MustParseAddr("127.0.98.2")
	n := newNode(t, "127.0.98.1", 65000, nil)
	ranges := func(r map[netip.Prefix]conn.Auth) {
		t.Helper()
		if err := n.SetRanges(r); err != nil {
			t.Fatal(err)
		}
	}
	peers := func(passwords ...string) {
		t.Helper()
		var list []Peer
		for _, p := range passwords {
			list = append(list, Peer{Addr: wanted, Port: 179, AS: 65001, Passive: true, HoldTime: 90 * time.Second, Auth: conn.Auth{Password: p}, Families: [wire.Families]Family{{Enabled: true}}})
		}
		if err := n.SetPeers(list); err != nil {
			t.Fatal(err)
		}
	}
	opens := func(password string) {
		t.Helper()
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: wanted.AsSlice()}, Timeout: time.Minute, Control: func(_, _ string, raw syscall.RawConn) (err error) {
			cerr := raw.Control(func(fd uintptr) { err = conn.SetPassword(int(fd), n.at.Addr(), password) })
			return errors.Join(cerr, err)
		}}
		c, err := d.DialContext(t.Context(), "tcp", n.at.String())
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
	}
	one := map[netip.Prefix]conn.Auth{netip.PrefixFrom(wanted, 32): {Password: "range"}}
	ranges(one)
	opens("range")
	peers("peer")
	opens("peer")
	peers()
	opens("range")
	ranges(nil)
	peers("peer")
	ranges(one)
	opens("peer")
	ranges(nil)
	opens("peer")
	peers()
	opens("")
}

func isTimeout(err error) bool {
	var e net.Error
	return errors.As(err, &e) && e.Timeout()
}
