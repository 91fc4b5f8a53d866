package reach

import (
	"bytes"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func testKey() []byte { return bytes.Repeat([]byte{7}, 32) }

func cmpMessages() cmp.Option {
	return cmp.Options{cmp.AllowUnexported(message{}), cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })}
}

func genMessage(t *rapid.T) message {
	name := rapid.StringMatching(`[a-z0-9.-]{1,253}`)
	m := message{from: name.Draw(t, "from"), to: name.Draw(t, "to"), nonce: rapid.Uint64().Draw(t, "nonce"), time: rapid.Int64().Draw(t, "time")}
	if m.answer = rapid.Bool().Draw(t, "answer"); m.answer {
		n := rapid.SampledFrom([]int{4, 16}).Draw(t, "family")
		a, _ := netip.AddrFromSlice(rapid.SliceOfN(rapid.Byte(), n, n).Draw(t, "addr"))
		m.seen = netip.AddrPortFrom(a, rapid.Uint16().Draw(t, "port"))
	} else {
		m.anyPort = rapid.Bool().Draw(t, "any port")
	}
	return m
}

func TestMessageRoundTrip(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		want := genMessage(t)
		b := appendMessage(nil, want, testKey())
		if len(b) > maxMessage {
			t.Fatalf("%d bytes, want at most %d", len(b), maxMessage)
		}
		b = append(b, make([]byte, rapid.IntRange(0, 9000).Draw(t, "padding"))...)
		got, err := decode(b, testKey())
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got, cmpMessages()); diff != "" {
			t.Fatalf("-want +got:\n%s", diff)
		}
	})
}

// One bit that changed anywhere in the message is refused.
func TestMessageIsAuthenticated(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		b := appendMessage(nil, genMessage(t), testKey())
		bit := rapid.IntRange(0, 8*len(b)-1).Draw(t, "bit")
		b[bit/8] ^= 1 << (bit % 8)
		if m, err := decode(b, testKey()); err == nil {
			t.Fatalf("decoded %+v after bit %d was flipped", m, bit)
		}
	})
	b := appendMessage(nil, message{from: "a", to: "b"}, testKey())
	if _, err := decode(b, []byte("another key")); !errors.Is(err, errMAC) {
		t.Errorf("decode with another key: %v, want %v", err, errMAC)
	}
}

// A message of another version is no forgery, and every shorter piece of a
// message is garbage.
func TestMessageGarbage(t *testing.T) {
	t.Parallel()
	good := appendMessage(nil, message{from: "a", to: "b"}, testKey())
	other := bytes.Clone(good)
	other[4] = 2
	if _, err := decode(other, testKey()); !errors.Is(err, errGarbage) || !strings.Contains(err.Error(), "version 2") {
		t.Errorf("decode version 2: %v", err)
	}
	for n := range good {
		if _, err := decode(good[:n], testKey()); err == nil {
			t.Errorf("%d of %d bytes were decoded", n, len(good))
		}
	}
}

func FuzzDecode(f *testing.F) {
	key := testKey()
	f.Add(appendMessage(nil, message{from: "node1", to: "node2", nonce: 1}, key))
	f.Add(appendMessage(nil, message{answer: true, from: "node1", to: "node2", seen: netip.MustParseAddrPort("192.0.2.1:4789")}, key))
	f.Add(appendMessage(nil, message{answer: true, from: "node1", to: "node2", seen: netip.MustParseAddrPort("[2001:db8::1]:4789")}, key))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := decode(b, key)
		if err != nil {
			return
		}
		again, err := decode(appendMessage(nil, m, key), key)
		if err != nil || cmp.Diff(m, again, cmpMessages()) != "" {
			t.Errorf("%+v came back as %+v, %v", m, again, err)
		}
	})
}
