package probe

import (
	"bytes"
	"encoding/hex"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func cmpMessages() cmp.Option {
	return cmp.Options{cmp.AllowUnexported(message{}), cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })}
}

func genMessage(t *rapid.T) message {
	m := message{
		kind:  rapid.SampledFrom([]kind{kindRequest, kindAnswer, kindAnyPort, kindEcho, kindReply, kindTransfer, kindReceipt, kindPlain, kindPlainReply}).Draw(t, "kind"),
		nonce: rapid.Uint64().Draw(t, "nonce"),
	}
	if m.kind.tunnel() {
		m.index, m.size = rapid.Uint32().Draw(t, "index"), rapid.Uint32().Draw(t, "size")
		return m
	}
	name := rapid.StringMatching(`[a-z0-9.-]{1,253}`)
	m.from, m.to, m.time = name.Draw(t, "from"), name.Draw(t, "to"), rapid.Int64().Draw(t, "time")
	if m.kind == kindAnswer {
		n := rapid.SampledFrom([]int{4, 16}).Draw(t, "family")
		a, _ := netip.AddrFromSlice(rapid.SliceOfN(rapid.Byte(), n, n).Draw(t, "addr"))
		m.seen = netip.AddrPortFrom(a, rapid.Uint16().Draw(t, "port"))
	}
	return m
}

func TestMessageRoundTrip(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		want := genMessage(t)
		length := rapid.IntRange(0, 9000).Draw(t, "length")
		b := appendMessage([]byte("before"), want, testKey, length)[len("before"):]
		least := len(appendMessage(nil, want, testKey, 0))
		if least > maxMessage || len(b) != max(least, length) {
			t.Fatalf("%d bytes without padding and %d for %d", least, len(b), length)
		}
		if !want.kind.tunnel() {
			// Zeros that a socket appends are padding.
			b = append(b, make([]byte, rapid.IntRange(0, 100).Draw(t, "zeros"))...)
		}
		got, err := decode(b, testKey)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got, cmpMessages()); diff != "" {
			t.Fatalf("-want +got:\n%s", diff)
		}
	})
}

// One bit that changed anywhere in the message, or in the padding of one through
// a tunnel, is refused, and so is one whose end is missing.
func TestMessageIsAuthenticated(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		m := genMessage(t)
		length := 0
		if m.kind.tunnel() {
			length = rapid.IntRange(0, 2000).Draw(t, "length")
		}
		b := appendMessage(nil, m, testKey, length)
		if _, err := decode(b, []byte("another key")); !errors.Is(err, errMAC) {
			t.Fatalf("decode with another key: %v, want %v", err, errMAC)
		}
		if _, err := decode(b[:len(b)-1], testKey); err == nil {
			t.Fatal("decoded without the last byte")
		}
		bit := rapid.IntRange(0, 8*len(b)-1).Draw(t, "bit")
		b[bit/8] ^= 1 << (bit % 8)
		if m, err := decode(b, testKey); err == nil {
			t.Fatalf("decoded %+v after bit %d was flipped", m, bit)
		}
	})
}

// What hosts of earlier versions sent, byte by byte, and what they understand.
func TestEarlierVersions(t *testing.T) {
	t.Parallel()
	key := bytes.Repeat([]byte{7}, 32)
	seen := netip.MustParseAddrPort("192.0.2.1:4789")
	for name, tt := range map[string]struct {
		msg    message
		length int
		want   string
	}{
		"request":  {message{kind: kindRequest, from: "node1", to: "n2", nonce: 1, time: 2}, 0, "727444520101050200000000000000010000000000000002000000006e6f6465316e32d1c9919c2ce3423978e81e1762d0176f"},
		"answer":   {message{kind: kindAnswer, from: "node1", to: "n2", nonce: 3, time: 4, seen: seen}, 0, "72744452010205020000000000000003000000000000000412b504006e6f6465316e32c00002018eba47b30c95cb7020743ee719039cd2"},
		"any port": {message{kind: kindAnyPort, from: "node1", to: "n2", nonce: 5, time: 6}, 0, "727444520103050200000000000000050000000000000006000000006e6f6465316e322a7611b48c3c9d3f578efb20f14fbf8e"},
		"echo":     {message{kind: kindEcho, nonce: 7, index: 8}, 52, "7264706201010000000000000000000700000008000000009ff433b91c210615976e8b63e1d841380550f5ab07935b87501fa8bb"},
		"reply":    {message{kind: kindReply, nonce: 7, index: 8}, 0, "7264706201020000000000000000000700000008000000007789de1383ecb8d1b8b35dbc9d692590"},
		"transfer": {message{kind: kindTransfer, nonce: 9, size: 262144}, 0, "72647062010300000000000000000009000000000004000060100e8033ed210b66da641d04c9ea83"},
		"receipt":  {message{kind: kindReceipt, nonce: 10, size: 262144}, 0, "7264706201040000000000000000000a0000000000040000d28a5d99e485d1a89b77f6bce1f14665"},
	} {
		b := appendMessage(nil, tt.msg, key, tt.length)
		if got := hex.EncodeToString(b); got != tt.want {
			t.Errorf("%s: %s, want %s", name, got, tt.want)
		}
		if got, err := decode(b, key); err != nil || cmp.Diff(tt.msg, got, cmpMessages()) != "" {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
}

// A message of another version is no forgery, and every shorter piece of a
// message is garbage.
func TestMessageGarbage(t *testing.T) {
	t.Parallel()
	good := appendMessage(nil, message{kind: kindRequest, from: "a", to: "b"}, testKey, 0)
	other := bytes.Clone(good)
	other[4] = 2
	if _, err := decode(other, testKey); !errors.Is(err, errGarbage) || !strings.Contains(err.Error(), "version 2") {
		t.Errorf("decode version 2: %v", err)
	}
	for n := range good {
		if _, err := decode(good[:n], testKey); err == nil {
			t.Errorf("%d of %d bytes were decoded", n, len(good))
		}
	}
}

func FuzzDecode(f *testing.F) {
	seen4, seen6 := netip.MustParseAddrPort("192.0.2.1:4789"), netip.MustParseAddrPort("[2001:db8::1]:4789")
	for _, m := range []message{
		{kind: kindRequest, from: "node1", to: "node2", nonce: 1},
		{kind: kindAnswer, from: "node1", to: "node2", seen: seen4},
		{kind: kindAnswer, from: "node1", to: "node2", seen: seen6},
		{kind: kindEcho, nonce: 1},
		{kind: kindReceipt, nonce: 1, size: 2},
		{kind: kindPlain, nonce: 1, index: 2},
		{kind: kindPlainReply, nonce: 1, index: 2},
	} {
		f.Add(appendMessage(nil, m, testKey, 0))
		f.Add(appendMessage(nil, m, testKey, 100))
	}
	f.Add([]byte("rdpb"))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := decode(b, testKey)
		if err != nil {
			return
		}
		coded := appendMessage(nil, m, testKey, len(b))
		again, err := decode(coded, testKey)
		if err != nil || cmp.Diff(m, again, cmpMessages()) != "" {
			t.Errorf("%+v came back as %+v, %v", m, again, err)
		}
		// Nothing but padding is left out of a message.
		if n := len(appendMessage(nil, m, testKey, 0)) - macLen; !bytes.Equal(coded[:n], b[:n]) {
			t.Errorf("%x is taken for %+v", b, m)
		}
	})
}

// One that is used again makes the same codes as a new one, whatever keys it had before, and
// takes no memory for the next. Not parallel: it counts what is allocated.
func TestAuthenticatorAgain(t *testing.T) {
	var again authenticator
	other := []byte("another key, of whatever length")
	for _, key := range [][]byte{testKey, testKey, other, testKey, nil, other} {
		for _, text := range []string{"", "a message", "another"} {
			got := bytes.Clone(again.sum(key, []byte(text), []byte("padding")))
			if want := new(authenticator).sum(key, []byte(text), []byte("padding")); !bytes.Equal(got, want) {
				t.Errorf("key %q: the code of %q is %x, want %x", key, text, got, want)
			}
		}
	}
	b := make([]byte, 0, maxMessage)
	m := message{kind: kindRequest, from: "this-host", to: "another-host", nonce: 1, time: 2}
	if n := testing.AllocsPerRun(100, func() { again.appendMessage(b, m, testKey, 0) }); n > 1 {
		t.Errorf("%v allocations for a message", n)
	}
}
