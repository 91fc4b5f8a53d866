package probe

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/routerd/routerd/dataplane"
)

func TestMessages(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		m := message{
			Kind: kind(rapid.IntRange(1, 4).Draw(t, "kind")), Nonce: rapid.Uint64().Draw(t, "nonce"),
			Index: rapid.Uint32().Draw(t, "index"), Size: rapid.Uint32().Draw(t, "size"),
		}
		b := make([]byte, rapid.IntRange(messageLen, 2000).Draw(t, "length"))
		m.encode(b, testKey)
		if got, err := decode(b, testKey); err != nil || got != m {
			t.Fatalf("decode = %+v, %v; want %+v", got, err, m)
		}
		if _, err := decode(b, []byte("another key")); !errors.Is(err, errForeign) {
			t.Fatalf("decode with another key: %v", err)
		}
		// A spoilt bit anywhere, or a missing end, is not a message.
		i := rapid.IntRange(0, len(b)*8-1).Draw(t, "bit")
		b[i/8] ^= 1 << (i % 8)
		// The two bytes of zero after the kind are signed too.
		if _, err := decode(b, testKey); !errors.Is(err, errForeign) {
			t.Fatalf("decode with bit %d spoilt: %v", i, err)
		}
		b[i/8] ^= 1 << (i % 8)
		if _, err := decode(b[:len(b)-1], testKey); !errors.Is(err, errForeign) {
			t.Fatalf("decode without the last byte: %v", err)
		}
	})
}

func FuzzDecode(f *testing.F) {
	b := make([]byte, 100)
	message{Kind: kindEcho, Nonce: 1}.encode(b, testKey)
	f.Add(b)
	f.Add(b[:messageLen])
	f.Add([]byte("rdpb"))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := decode(b, testKey)
		if err != nil {
			return
		}
		again := make([]byte, len(b))
		m.encode(again, testKey)
		if !bytes.Equal(again[:headerLen], b[:headerLen]) {
			t.Errorf("%x is taken for %+v", b, m)
		}
	})
}

func FuzzRecords(f *testing.F) {
	f.Add([]byte(`{"kernel":"6.1","paths":{"x":{"path":"y","result":1,"off":["checksum off"],"at":5}}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var in file
		if json.Unmarshal(b, &in) != nil {
			return
		}
		out, err := json.Marshal(in)
		if err != nil {
			t.Fatal(err)
		}
		var again file
		if err := json.Unmarshal(out, &again); err != nil {
			t.Errorf("%s cannot be read again: %v", out, err)
		}
	})
}

func TestSettings(t *testing.T) {
	t.Parallel()
	for s := range NoChecksum | NoTCPSegments | NoUDPSegments + 1 {
		b, err := json.Marshal(s)
		var back Setting
		if err != nil || json.Unmarshal(b, &back) != nil || back != s {
			t.Errorf("%v: %s, %v", s, b, err)
		}
		for _, o := range s.features(device) {
			f := o.(dataplane.Feature)
			if s&NoChecksum != 0 && f.On {
				t.Errorf("%v wants %s on, which the kernel refuses without checksums", s, f.Name)
			}
		}
		if (s == 0) != (s.Cure(device) == "") || s != 0 && !strings.HasPrefix(s.Cure(device), "ethtool -K "+device+" tx-") {
			t.Errorf("cure of %v: %q", s, s.Cure(device))
		}
	}
	var s Setting
	if err := json.Unmarshal([]byte(`["everything off"]`), &s); err == nil || !strings.Contains(err.Error(), "everything off") {
		t.Errorf("a setting that is not known: %v", err)
	}
}

func TestBucket(t *testing.T) {
	t.Parallel()
	now := time.Unix(0, 0)
	b := &bucket{tokens: echoBurst, at: now}
	n := 0
	for b.take(now) {
		n++
	}
	if n != echoBurst {
		t.Errorf("a burst of %d, want %d", n, echoBurst)
	}
	for range 5 * echoRate {
		now = now.Add(100 * time.Millisecond / echoRate * 10)
		if b.take(now) {
			n++
		}
	}
	if got, want := n-echoBurst, 5*echoRate; got > want+1 || got < want-1 {
		t.Errorf("%d more in five seconds, want %d", got, want)
	}
}
