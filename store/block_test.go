package store_test

import (
	"maps"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/store"
)

func TestBlockHolder(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		affinity *string
		holder   string
		virtual  bool
	}{
		"none":          {nil, "", false},
		"empty":         {new(""), "", false},
		"node":          {new("host:node-a"), "node-a", false},
		"no name":       {new("host:"), "", false},
		"load balancer": {new("virtual:load-balancer"), "", true},
		"node alone":    {new("node-a"), "", true},
	} {
		b := &store.Block{Affinity: tc.affinity}
		if b.Holder() != tc.holder || b.Virtual() != tc.virtual {
			t.Errorf("%s: holder %q, virtual %t", name, b.Holder(), b.Virtual())
		}
	}
	b := &store.Block{}
	if b.SetHolder("node-b"); b.Holder() != "node-b" || *b.Affinity != "host:node-b" {
		t.Errorf("affinity %q", *b.Affinity)
	}
}

func TestBlockBorrowed(t *testing.T) {
	t.Parallel()
	node := func(name string) store.Attribute { return store.Attribute{Secondary: map[string]string{"node": name}} }
	released := node("b")
	released.ReleasedAt = &metav1.Time{}
	b := &store.Block{
		CIDR:        "10.0.0.252/29",
		Attributes:  []store.Attribute{node("a"), node("b"), released, {}, node("c")},
		Allocations: []*int{new(0), nil, new(1), new(2), new(3), new(4), new(9), new(-1), new(1)}, // one more than addresses
	}
	for name, tc := range map[string]struct {
		holder string
		want   map[string]string
	}{
		"held":    {"a", map[string]string{"10.0.0.250": "b", "10.0.0.253": "c"}},
		"by none": {"", map[string]string{"10.0.0.248": "a", "10.0.0.250": "b", "10.0.0.253": "c"}},
	} {
		if tc.holder != "" {
			b.SetHolder(tc.holder)
		} else {
			b.Affinity = nil
		}
		got := map[string]string{}
		for a, n := range b.Borrowed() {
			got[a.String()] = n
		}
		if d := cmp.Diff(tc.want, got); d != "" {
			t.Errorf("%s (-want +got):\n%s", name, d)
		}
		for range b.Borrowed() {
			break // an iteration may end early
		}
	}
	b.CIDR = "nonsense"
	if got := maps.Collect(b.Borrowed()); len(got) > 0 {
		t.Errorf("a block without a range: %v", got)
	}
	if b.Allocated() != 8 || b.Attribute(1) != nil || b.Attribute(6) != nil || b.Attribute(9) != nil || b.Attribute(-1) != nil || b.Attribute(2) != &b.Attributes[1] {
		t.Errorf("%d allocated, attributes %v", b.Allocated(), b.Attributes)
	}
}

func TestBlockAddr(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		cidr string
		n    int
		want string // empty: outside
	}{
		{"192.168.1.64/26", 0, "192.168.1.64"},
		{"192.168.1.64/26", 63, "192.168.1.127"},
		{"192.168.1.64/26", 64, ""},
		{"192.168.1.64/26", -1, ""},
		{"192.168.0.0/20", 257, "192.168.1.1"},
		{"10.255.240.0/20", 4095, "10.255.255.255"},
		{"10.1.255.254/31", 1, "10.1.255.255"},
		{"1.2.3.4/32", 0, "1.2.3.4"},
		{"1.2.3.4/32", 1, ""},
		{"255.255.255.192/26", 64, ""},
		{"255.255.255.255/32", 1, ""},
		{"fd00::1:0/116", 4095, "fd00::1:fff"},
		{"fd00::1:0/116", 4096, ""},
		{"fd00::/48", 1 << 62, "fd00::4000:0:0:0"},
		{"fd00:0:0:1:ffff:ffff:ffff:ff00/120", 256, ""},
		{"ffff:ffff:ffff:ffff:ffff:ffff:ffff:fff0/124", 16, ""},
		{"", 0, ""},
	} {
		b := store.Block{CIDR: tc.cidr}
		a, ok := b.Addr(tc.n)
		if ok != (tc.want != "") || ok && a.String() != tc.want {
			t.Errorf("address %d of %s is %s, %t; want %q", tc.n, tc.cidr, a, ok, tc.want)
		}
		if n, is := b.Ordinal(a); ok && (!is || n != tc.n) {
			t.Errorf("the ordinal of %s in %s is %d, %t", a, tc.cidr, n, is)
		}
	}
	for _, a := range []string{"10.0.0.8", "10.0.0.3", "::ffff:10.0.0.4", "fd00::4"} {
		b := store.Block{CIDR: "10.0.0.4/30"}
		if n, ok := b.Ordinal(netip.MustParseAddr(a)); ok {
			t.Errorf("%s is address %d of %s", a, n, b.CIDR)
		}
	}
	// An address further away than an int can say.
	if n, ok := store.OrdinalOf(netip.MustParsePrefix("fd00::/48"), netip.MustParseAddr("fd00:0:0:1::")); ok {
		t.Errorf("ordinal %d", n)
	}
	if n, ok := store.OrdinalOf(netip.MustParsePrefix("fd00::/64"), netip.MustParseAddr("fd00::8000:0:0:0")); ok {
		t.Errorf("ordinal %d", n)
	}
}

// Addr and Ordinal are inverse to each other wherever a block lies, and Addr
// counts as [netip.Addr.Next] does.
func TestBlockAddrProperty(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		length := rapid.SampledFrom([]int{4, 16}).Draw(t, "length")
		raw := rapid.SliceOfN(rapid.SampledFrom([]byte{0, 1, 0x7f, 0x80, 0xfe, 0xff}), length, length).Draw(t, "address")
		first, _ := netip.AddrFromSlice(raw)
		size := rapid.IntRange(0, 12).Draw(t, "size")
		p := netip.PrefixFrom(first, first.BitLen()-size).Masked()
		b := store.Block{CIDR: p.String()}
		n := rapid.IntRange(0, 1<<size-1).Draw(t, "ordinal")
		a, ok := b.Addr(n)
		if back, is := b.Ordinal(a); !ok || !is || back != n || !p.Contains(a) {
			t.Fatalf("address %d of %s is %s, %t, whose ordinal is %d, %t", n, p, a, ok, back, is)
		}
		if next, ok := b.Addr(n + 1); ok != (n+1 < 1<<size) || ok && next != a.Next() {
			t.Fatalf("address %d of %s is %s, %t; after %s", n+1, p, next, ok, a)
		}
	})
}
