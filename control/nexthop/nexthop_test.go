package nexthop

import (
	"net/netip"
	"slices"
	"testing"
)

// TestSet: a set does not depend on order and repetition, and equal sets are
// the same value.
func TestSet(t *testing.T) {
	t.Parallel()
	a, b, c := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("fe80::1%eth1")
	s := SetOf(c, a, b, a)
	if s != SetOf(a, b, c) || s == SetOf(a, b) || s == SetOf(a, b, c.WithZone("eth2")) {
		t.Error("sets do not compare by their members")
	}
	if got := slices.Collect(s.All()); !slices.Equal(got, []netip.Addr{a, b, c}) || s.Len() != 3 {
		t.Errorf("%d members %v", s.Len(), got)
	}
	if !s.Contains(c) || s.Contains(netip.MustParseAddr("10.0.0.3")) {
		t.Error("membership")
	}
	if got := s.Join(" "); got != "10.0.0.1 10.0.0.2 fe80::1%eth1" {
		t.Errorf("joined: %q", got)
	}
	if SetOf(b, b).Single() != b || s.Single().IsValid() || SetOf() != (Set{}) || (Set{}).Len() != 0 || (Set{}).Single().IsValid() {
		t.Error("sets of one and of none")
	}
	for range s.All() {
		break
	}
}

// TestAnnounce: what is announced twice is one value; each part counts.
func TestAnnounce(t *testing.T) {
	t.Parallel()
	a, b := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
	first := Announce(0, "tor", a, b)
	if again := Announce(0, "tor", a, b); again != first {
		t.Error("equal announcements differ")
	}
	for _, other := range []Announced{Announce(0, "tor", a), Announce(0, "tor", b, a), Announce(0, "other", a, b), Announce(32, "tor", a, b)} {
		if other == first {
			t.Errorf("%+v is taken for another", other.Value())
		}
	}
}
