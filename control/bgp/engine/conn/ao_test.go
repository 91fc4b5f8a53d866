package conn

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

func keysOfList(list ...Key) (k Keys) {
	k.N = copy(k.List[:], list)
	return k
}

func key(id uint8, secret string) Key {
	return Key{Send: id, Receive: id, Algorithm: "hmac(sha1)", Secret: secret}
}

// TestKeyLayout: the structures are as long as the kernel's, which has no other use for what is behind them than to refuse it.
func TestKeyLayout(t *testing.T) {
	t.Parallel()
	if a, d, i, k := unsafe.Sizeof(aoAdd{}), unsafe.Sizeof(aoDelete{}), unsafe.Sizeof(aoInfo{}), unsafe.Sizeof(aoKey{}); a != 288 || d != 144 || i != 48 || k != 304 {
		t.Errorf("tcp_ao_add %d, tcp_ao_del %d, tcp_ao_info_opt %d, tcp_ao_getsockopt %d", a, d, i, k)
	}
	if a, n, f := unsafe.Offsetof(aoAdd{}.key), unsafe.Offsetof(aoKey{}.n), unsafe.Offsetof(aoKey{}.prefix); a != 208 || n != 272 || f != 280 {
		t.Errorf("tcp_ao_add.key at %d, tcp_ao_getsockopt.nkeys at %d, prefix at %d", a, n, f)
	}
}

// socketModel is what a kernel does with the keys of a connection.
type socketModel struct {
	keys          []Key
	current, next Key
}

func (m *socketModel) installed(to netip.Prefix) (out []installed) {
	for _, k := range m.keys {
		out = append(out, installed{to, k.Send, k.Receive, k == m.current, k == m.next})
	}
	return out
}

var errModel = errors.New("the kernel refuses it")

func (m *socketModel) do(s step, connection bool) error {
	find := func(send, receive uint8) int {
		return slices.IndexFunc(m.keys, func(k Key) bool { return k.Send == send && k.Receive == receive })
	}
	switch none := (Key{}); {
	case s.add != none:
		if slices.ContainsFunc(m.keys, func(k Key) bool { return k.clashes(s.add.Send, s.add.Receive) }) {
			return errModel
		}
		m.keys = append(m.keys, s.add)
	case s.ask != none:
		if !slices.Contains(m.keys, s.ask) {
			return errModel
		}
		m.next = s.ask
	default:
		i := find(s.remove.send, s.remove.receive)
		if i < 0 {
			return errModel
		}
		k := m.keys[i]
		if connection {
			if !slices.Contains(m.keys, s.heir) || s.heir == k {
				return errModel
			}
			m.next = s.heir
			if s.remove.current {
				m.current = s.heir
			}
			if m.current == k {
				return errModel
			}
		}
		m.keys = slices.Delete(m.keys, i, i+1)
	}
	return nil
}

// TestReplaceKeys: whatever keys a socket has and is to have, it comes to them by steps that the kernel takes, and keeps those that
// stay; a connection is refused only what it cannot have, and signs at each moment with a key that it has.
func TestReplaceKeys(t *testing.T) {
	t.Parallel()
	to := netip.MustParsePrefix("10.0.0.1/32")
	list := rapid.Custom(func(t *rapid.T) []Key {
		var out []Key
		for range rapid.IntRange(1, MaxKeys).Draw(t, "keys") {
			k := Key{Send: rapid.Uint8Range(0, 5).Draw(t, "send"), Receive: rapid.Uint8Range(0, 5).Draw(t, "receive"), Secret: rapid.SampledFrom([]string{"a", "b"}).Draw(t, "secret")}
			if !slices.ContainsFunc(out, func(q Key) bool { return q.clashes(k.Send, k.Receive) }) {
				out = append(out, k)
			}
		}
		return out
	})
	rapid.Check(t, func(t *rapid.T) {
		connection := rapid.Bool().Draw(t, "connection")
		m := socketModel{keys: list.Draw(t, "have")}
		m.current, m.next = rapid.SampledFrom(m.keys).Draw(t, "current"), rapid.SampledFrom(m.keys).Draw(t, "next")
		known, want := slices.Clone(m.keys), list.Draw(t, "want")
		steps, err := replace(m.installed(to), known, want, connection)
		if can := keysOfList(want...).Follow(keysOfList(known...)); (err == nil) != (can || !connection) {
			t.Fatalf("error %v, and Follow says %v", err, can)
		}
		if err != nil {
			return
		}
		for _, s := range steps {
			if s.remove != (installed{}) && slices.ContainsFunc(want, func(k Key) bool {
				return slices.Contains(known, k) && k.Send == s.remove.send && k.Receive == s.remove.receive
			}) {
				t.Fatalf("a key that stays is removed: %+v", s)
			}
			if err := m.do(s, connection); err != nil {
				t.Fatalf("%+v of %+v: %v", s, steps, err)
			}
			if connection && !slices.Contains(m.keys, m.current) {
				t.Fatalf("after %+v it signs with what it has not", s)
			}
		}
		for _, k := range want {
			if !slices.Contains(m.keys, k) {
				t.Fatalf("%s is missing from %v", k, m.keys)
			}
		}
		if len(m.keys) != len(want) {
			t.Fatalf("%v is left, want %v", m.keys, want)
		}
		if connection && m.next != want[0] {
			t.Fatalf("it asks for %s, want %s", m.next, want[0])
		}
	})
}

func TestFollowKeys(t *testing.T) {
	t.Parallel()
	old, new1 := key(1, "old"), key(2, "new")
	for _, c := range []struct {
		name     string
		from, to Keys
		can      bool
	}{
		{"none", Keys{}, Keys{}, true},
		{"the first", Keys{}, keysOfList(old), false},
		{"no more", keysOfList(old), Keys{}, false},
		{"one more", keysOfList(old), keysOfList(new1, old), true},
		{"the old one goes", keysOfList(new1, old), keysOfList(new1), true},
		{"another at once", keysOfList(old), keysOfList(new1), true},
		{"another secret", keysOfList(old), keysOfList(key(1, "other")), false},
		{"another secret of one of two", keysOfList(old, new1), keysOfList(key(1, "other"), new1), true},
		{"half of the ids", keysOfList(old), keysOfList(Key{Send: 1, Receive: 3, Secret: "x"}), false},
	} {
		if got := c.to.Follow(c.from); got != c.can {
			t.Errorf("%s: %v, want %v", c.name, got, c.can)
		}
	}
}

// TestKeyAttempts: attempts to connect begin with each key in turn.
func TestKeyAttempts(t *testing.T) {
	t.Parallel()
	o := Options{Auth: Auth{Keys: keysOfList(key(3, "c"), key(2, "b"), key(1, "a"))}}
	var ids []uint8
	for n := range 4 {
		a := o.auth(n)
		ids = append(ids, a.Keys.List[0].Send)
		if got := a.Keys.all(); len(got) != 3 || !slices.Contains(got, key(3, "c")) || !slices.Contains(got, key(1, "a")) {
			t.Errorf("attempt %d has the keys %v", n, got)
		}
	}
	if !slices.Equal(ids, []uint8{3, 2, 1, 3}) || o.ways() != 3 {
		t.Errorf("they begin with %v, in %d ways", ids, o.ways())
	}
}

// TestTryKey: what the kernel does not take is said, with what is wrong.
func TestTryKey(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		key  Key
		says string
	}{
		{Key{Algorithm: "hmac(none)", Secret: "x"}, "algorithm hmac(none)"},
		{key(1, strings.Repeat("x", 81)), "key 1 of 81 bytes, where the kernel has room for 80"},
	} {
		err := TryKey(c.key)
		if err == nil || !strings.Contains(err.Error(), c.says) && !errors.Is(err, unix.ENOPROTOOPT) {
			t.Errorf("%s: %v, want %q", c.key, err, c.says)
		}
	}
	if err := TryKey(key(1, "x")); err != nil && !(errors.Is(err, unix.ENOPROTOOPT) && strings.Contains(err.Error(), "CONFIG_TCP_AO")) {
		t.Errorf("a key: %v", err)
	}
}
