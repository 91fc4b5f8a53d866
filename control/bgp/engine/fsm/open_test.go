package fsm

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"

	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/control/bgp/engine/wire"
)

func anyOpen(t *rapid.T) *Open {
	flag := func(name string) bool { return rapid.Bool().Draw(t, name) }
	seconds := func(name string, most uint32) time.Duration {
		return time.Duration(rapid.Uint32Range(0, most).Draw(t, name)) * time.Second
	}
	o := &Open{ID: rapid.Uint32().Draw(t, "id"), HoldTime: seconds("hold time", 0xffff)}
	o.ExtendedNextHop, o.ExtendedMessages, o.Refresh, o.EnhancedRefresh = flag("next hop"), flag("messages"), flag("refresh"), flag("enhanced")
	if o.AS4 = flag("AS4"); o.AS4 {
		o.AS = rapid.Uint32().Draw(t, "AS")
	} else {
		o.AS = uint32(rapid.Uint16().Draw(t, "AS"))
	}
	if o.GracefulRestart = flag("restart"); o.GracefulRestart {
		o.Restarting, o.Notification, o.RestartTime = flag("R"), flag("N"), seconds("restart time", 4095)
	}
	o.Family[rapid.IntRange(0, 1).Draw(t, "family")].Enabled = true
	for i := range o.Family {
		f := &o.Family[i]
		f.Enabled = f.Enabled || flag("family")
		f.AddPathReceive, f.AddPathSend = flag("receive"), flag("send")
		if o.GracefulRestart && flag("restart of it") {
			f.Restart, f.Forwarding = true, flag("F")
		}
		if f.StaleTime = seconds("stale", 1<<24-1); f.StaleTime > 0 {
			f.LongLivedForwarding = flag("long-lived F")
		}
	}
	return o
}

// TestOpen: what is sent is read as it was meant, by GoBGP's codec too.
func TestOpen(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		o := anyOpen(t)
		msg, err := o.Append([]byte{1, 2, 3})
		if err != nil {
			t.Fatal(err)
		}
		typ, body, n, err := wire.Frame(msg[3:], wire.MaxLen)
		if err != nil || typ != wire.Open || n != len(msg)-3 {
			t.Fatalf("type %d, %d bytes, %v", typ, n, err)
		}
		got, err := ParseOpen(body)
		if err != nil || !reflect.DeepEqual(got, o) {
			t.Fatalf("%+v\nread as %+v (%v)", o, got, err)
		}
		theirs, err := packet.ParseBGPMessage(msg[3:])
		if err != nil {
			t.Fatalf("GoBGP's codec: %v", err)
		}
		p := theirs.Body.(*packet.BGPOpen)
		if id := p.ID.As4(); binary.BigEndian.Uint32(id[:]) != o.ID || time.Duration(p.HoldTime)*time.Second != o.HoldTime || len(p.OptParams) != 1 {
			t.Fatalf("GoBGP's codec has %+v of %+v", p, o)
		}
	})
}

// openBody is the body of an OPEN of AS 65001 with parameters.
func openBody(params ...byte) []byte {
	return append([]byte{4, 0xfd, 0xe9, 0, 90, 10, 0, 0, 1, byte(len(params))}, params...)
}

func with(b []byte, at int, v ...byte) []byte {
	b = bytes.Clone(b)
	copy(b[at:], v)
	return b
}

// TestOpenRefused: each fault leads to the NOTIFICATION that the RFCs name, whether
// the message is malformed or just not acceptable here.
func TestOpenRefused(t *testing.T) {
	t.Parallel()
	local := &Open{AS: 65000, ID: 0x0a000002, HoldTime: 90 * time.Second}
	local.Family[wire.IPv4].Enabled, local.AS4 = true, true
	wide := append(openBody(), 255, 0, 11, 2, 0, 8, 65, 4, 0, 0, 0xfd, 0xe9, 2, 0)
	wide[9] = 255
	for _, c := range []struct {
		name string
		body []byte
		as   uint32 // the peer's, as configured
		code [2]uint8
		data string
	}{
		{"plain", openBody(), 65001, [2]uint8{}, ""},
		{"RFC 9072", wide, 65001, [2]uint8{}, ""},
		{"RFC 9072, cut short", wide[:len(wide)-1], 65001, [2]uint8{2, 0}, ""},
		{"version", with(openBody(), 0, 3), 65001, [2]uint8{2, 1}, "0004"},
		{"another AS", openBody(), 65002, [2]uint8{2, 2}, ""},
		{"AS 0", with(openBody(), 1, 0, 0), 0, [2]uint8{2, 2}, ""},
		{"AS 0 of four octets", openBody(2, 6, 65, 4, 0, 0, 0, 0), 65001, [2]uint8{2, 2}, ""},
		{"no identifier", with(openBody(), 5, 0, 0, 0, 0), 65001, [2]uint8{2, 3}, ""},
		{"own identifier, other AS", with(openBody(), 5, 10, 0, 0, 2), 65001, [2]uint8{}, ""},
		{"own identifier, own AS", with(openBody(), 1, 0xfd, 0xe8, 0, 90, 10, 0, 0, 2), 65000, [2]uint8{2, 3}, ""},
		{"parameter of another type", openBody(1, 1, 0), 65001, [2]uint8{2, 4}, ""},
		{"parameter cut short", openBody(2), 65001, [2]uint8{2, 0}, ""},
		{"parameter too long", openBody(2, 2, 65), 65001, [2]uint8{2, 0}, ""},
		{"capability too long", openBody(2, 2, 65, 4), 65001, [2]uint8{2, 0}, ""},
		{"capability of a wrong size", openBody(2, 5, 65, 3, 0, 0, 1), 65001, [2]uint8{2, 0}, ""},
		{"capability that is not used, of a wrong size", openBody(2, 3, 73, 1, 9), 65001, [2]uint8{}, ""},
		{"hold time of 1 s", with(openBody(), 3, 0, 1), 65001, [2]uint8{2, 6}, ""},
		{"hold time of 2 s", with(openBody(), 3, 0, 2), 65001, [2]uint8{2, 6}, ""},
		{"no hold time", with(openBody(), 3, 0, 0), 65001, [2]uint8{}, ""},
		{"other families only", openBody(2, 6, 1, 4, 0, 2, 0, 1), 65001, [2]uint8{2, 7}, "010400010001"},
		{"parameters longer than the message", with(openBody(2, 2, 2, 0), 9, 5), 65001, [2]uint8{2, 0}, ""},
	} {
		o, err := ParseOpen(c.body)
		if err == nil {
			_, err = negotiate(local, o, c.as, 0)
		}
		var e *wire.Error
		got, data := [2]uint8{}, ""
		if errors.As(err, &e) {
			got, data = [2]uint8{e.Code, e.Subcode}, hex.EncodeToString(e.Data)
		}
		if got != c.code || data != c.data {
			t.Errorf("%s: NOTIFICATION %v with %q (%v)", c.name, got, data, err)
		}
	}
}

// TestNegotiate: a session has what both sides offered, from each side's view.
func TestNegotiate(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		a, b := anyOpen(t), anyOpen(t)
		b.ID = a.ID + 1
		x, err1 := negotiate(a, b, b.AS, 0)
		y, err2 := negotiate(b, a, a.AS, 0)
		if err1 != nil || err2 != nil {
			return
		}
		if x.HoldTime != y.HoldTime || x.AS4 != y.AS4 || x.Refresh != y.Refresh || x.EnhancedRefresh != y.EnhancedRefresh ||
			x.GracefulRestart != y.GracefulRestart || x.Notification != y.Notification || x.Wire.ExtendedNextHop != y.Wire.ExtendedNextHop {
			t.Fatalf("%+v\n%+v", x, y)
		}
		if x.LongestSent > y.LongestReceived || y.LongestSent > x.LongestReceived {
			t.Fatalf("messages of %d for who reads %d; %d for %d", x.LongestSent, y.LongestReceived, y.LongestSent, x.LongestReceived)
		}
		for f := range wire.Families {
			if x.Wire.Family[f].Enabled != y.Wire.Family[f].Enabled || x.AddPathSend[f] != y.Wire.Family[f].AddPath || y.AddPathSend[f] != x.Wire.Family[f].AddPath {
				t.Fatalf("family %d: %+v %v\n%+v %v", f, x.Wire, x.AddPathSend, y.Wire, y.AddPathSend)
			}
		}
	})
}

// TestNotification: RFC 9003's text is sent and shown, inside a hard reset too, and
// can do nothing to a terminal.
func TestNotification(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("ä", 200)
	for _, c := range []struct {
		n    Notification
		want string
	}{
		{Cease(CeaseShutdown, "maintenance"), "maintenance"},
		{Cease(CeaseReset, "new keys").harden(), "new keys"},
		{Cease(CeaseDeconfigured, "not sent"), ""},
		{Cease(CeaseShutdown, long), long[:254]},
		{Cease(CeaseShutdown, "a\x1b[2J\nb\u202ec\u0085"), "a [2J b c "},
		{Notification{CodeCease, CeaseShutdown, []byte{3, 'a', 'b'}}, ""},
		{Notification{CodeCease, CeaseShutdown, []byte{2, 0xff, 0xfe}}, ""},
		{Notification{CodeCease, CeaseHardReset, []byte{6}}, ""},
	} {
		typ, body, _, err := wire.Frame(c.n.Append(nil), wire.MaxLen)
		if err != nil || typ != wire.Notification {
			t.Fatalf("%v: type %d, %v", c.n, typ, err)
		}
		if got := ParseNotification(body); got.Communication() != c.want || got.String() != c.n.String() {
			t.Errorf("%v: says %q, not %q", got, got.Communication(), c.want)
		}
	}
	if n := (Notification{CodeCease, CeaseHardReset, make([]byte, 1<<16)}).Append(nil); len(n) != wire.MaxLen {
		t.Errorf("NOTIFICATION of %d bytes", len(n))
	}
}

// FuzzOpen: no OPEN makes the reader panic, what it accepts it can say again, and it
// reads what GoBGP's codec reads.
func FuzzOpen(f *testing.F) {
	f.Add(openBody())
	f.Add(openBody(2, 6, 65, 4, 0, 0, 0xfd, 0xe9))
	f.Add(openBody(2, 8, 64, 6, 0x40, 120, 0, 1, 1, 0x80))
	f.Add(openBody(2, 9, 71, 7, 0, 1, 1, 0x80, 0, 14, 16))
	f.Add(openBody(2, 6, 69, 4, 0, 1, 1, 3))
	f.Fuzz(func(t *testing.T, body []byte) {
		o, err := ParseOpen(body)
		if err != nil {
			return
		}
		msg, err := o.Append(nil)
		if err != nil {
			t.Fatal(err)
		}
		again, err := ParseOpen(msg[wire.HeaderLen:])
		if err != nil {
			t.Fatalf("%+v cannot be read again: %v", o, err)
		}
		for i := range o.Family { // no capability says these
			o.Family[i].LongLivedForwarding = o.Family[i].LongLivedForwarding && o.Family[i].StaleTime > 0
		}
		if enabled := o.Family[0].Enabled || o.Family[1].Enabled; enabled && !reflect.DeepEqual(o, again) {
			t.Fatalf("%+v\nis again %+v", o, again)
		}
		p := &packet.BGPOpen{}
		if body[9] == 255 || p.DecodeFromBytes(body) != nil {
			return // longer parameters, and capabilities that are not used here
		}
		id := p.ID.As4()
		if binary.BigEndian.Uint32(id[:]) != o.ID || time.Duration(p.HoldTime)*time.Second != o.HoldTime || !o.AS4 && uint32(p.MyAS) != o.AS {
			t.Fatalf("GoBGP's codec has %+v of %+v", p, o)
		}
	})
}
