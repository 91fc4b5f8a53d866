package policy

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/dataplane/filter"
)

// The members that a set publishes never overlap, cover what was given, and their
// changes add up.
func TestSetMembership(t *testing.T) {
	t.Parallel()
	all := []string{
		"0.0.0.0/0", "10.0.0.0/8", "10.0.0.0/24", "10.0.0.0/30", "10.0.0.1/32", "10.0.0.2/32", "10.0.1.0/24", "192.0.2.1/32",
		"::/0", "fd00::/64", "fd00::/126", "fd00::1/128", "2001:db8::1/128",
	}
	addrs := []string{"10.0.0.1", "10.0.0.2", "10.0.0.9", "10.0.1.1", "10.9.9.9", "192.0.2.1", "198.51.100.1", "fd00::1", "fd00::9", "2001:db8::1"}
	rapid.Check(t, func(t *rapid.T) {
		s := newSet(filter.Set{ID: "x", Type: filter.Nets})
		r := filter.NewRuleset()
		if err := r.Apply(&filter.Delta{PutSets: []filter.Set{s.def}}); err != nil {
			t.Fatal(err)
		}
		given := make(map[netip.Prefix]int)
		for range rapid.IntRange(1, 8).Draw(t, "steps") {
			for range rapid.IntRange(1, 8).Draw(t, "changes") {
				p := netip.MustParsePrefix(rapid.SampledFrom(all).Draw(t, "net"))
				if given[p] > 0 && rapid.Bool().Draw(t, "remove") {
					given[p]--
					s.remove(filter.Member{Prefix: p})
				} else {
					given[p]++
					s.insert(filter.Member{Prefix: p})
				}
			}
			if err := r.Apply(&filter.Delta{Members: []filter.MemberChange{s.take()}}); err != nil {
				t.Fatal(err)
			}
			want := make(map[filter.Member]struct{})
			for _, m := range s.visible() {
				want[m] = struct{}{}
			}
			if diff := cmp.Diff(want, r.Members["x"], cmpopts.EquateEmpty()); diff != "" {
				t.Fatalf("changes do not add up (-set +sum):\n%s", diff)
			}
			for m := range want {
				for o := range want {
					if m != o && m.Prefix.Overlaps(o.Prefix) {
						t.Fatalf("%s and %s overlap", m, o)
					}
				}
			}
			for _, text := range addrs {
				a := netip.MustParseAddr(text)
				in := false
				for p, n := range given {
					in = in || n > 0 && p.Contains(a)
				}
				if got := r.Contains("x", a, 0, 0); got != in {
					t.Fatalf("%s is a member: %v, want %v", a, got, in)
				}
			}
		}
	})
}

func TestSetIDsAreValidNames(t *testing.T) {
	t.Parallel()
	id := setID("anything")
	if len(id) > 24 {
		t.Errorf("%q has %d characters", id, len(id))
	}
	for _, r := range id {
		if (r < 'a' || r > 'z') && (r < '0' || r > '9') && r != '-' {
			t.Errorf("%q holds %q", id, r)
		}
	}
	if id == setID("something else") || id != setID("anything") {
		t.Errorf("%q does not follow from what the set holds", id)
	}
}
