package ipam

import (
	"net/netip"
	"testing"

	"pgregory.net/rapid"
)

// TestFirstBlock holds the place where the search begins to Calico's: these
// were seen in stores that Calico wrote.
func TestFirstBlock(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		pool, node string
		bits       int
		want       string
	}{
		{"192.168.0.0/16", "node-a", 26, "192.168.174.128/26"},
		{"fd00:10::/48", "node-a", 122, "fd00:10:0:6d15:74ba:80e:4835:8080/122"},
		{"10.0.0.0/26", "node-a", 26, "10.0.0.0/26"},
	} {
		if got := firstBlock(netip.MustParsePrefix(tc.pool), tc.bits, tc.node, 1); got.String() != tc.want {
			t.Errorf("%s of %s: got %s, want %s", tc.node, tc.pool, got, tc.want)
		}
	}
	pool := netip.MustParsePrefix("10.0.0.0/16")
	if a, b := firstBlock(pool, 32, "node-a", 1), firstBlock(pool, 32, "node-a", 2); a == b {
		t.Errorf("blocks of one address begin at %s whatever the clock says", a)
	}
}

// TestRing goes round pools and must meet every block once.
func TestRing(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		pool := netip.MustParsePrefix(rapid.SampledFrom([]string{"10.0.0.0/24", "255.255.255.0/24", "fd00::/120", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ff00/120"}).Draw(t, "pool"))
		bits := pool.Bits() + rapid.IntRange(0, 8).Draw(t, "bits")
		first := firstBlock(pool, bits, rapid.StringN(1, 8, -1).Draw(t, "node"), rapid.Int64().Draw(t, "clock"))
		seen := map[netip.Prefix]bool{}
		for c := first; ; {
			if !pool.Contains(c.Addr()) || c != c.Masked() || seen[c] {
				t.Fatalf("%s, after %d blocks", c, len(seen))
			}
			seen[c] = true
			next := after(pool, c, bits)
			if passed(c, next, first) {
				break
			}
			c = next
		}
		if want := 1 << (bits - pool.Bits()); len(seen) != want {
			t.Fatalf("met %d blocks of %d", len(seen), want)
		}
	})
}

func TestOrdinals(t *testing.T) {
	t.Parallel()
	for _, cidr := range []string{"10.0.0.64/26", "10.255.240.0/20", "fd00::1:f000/116", "1.2.3.4/32"} {
		p := netip.MustParsePrefix(cidr)
		for _, o := range []int{0, 1, blockLen(p) / 2, blockLen(p) - 1} {
			if o >= blockLen(p) {
				continue
			}
			a := addrAt(p, o)
			if !p.Contains(a) || ordinalOf(p, a) != o {
				t.Errorf("%s: ordinal %d is %s, which is ordinal %d", cidr, o, a, ordinalOf(p, a))
			}
		}
	}
}
