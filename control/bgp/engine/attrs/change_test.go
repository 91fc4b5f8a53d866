package attrs

import (
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// text is a set as people read it, by the view and as GoBGP's codec has it.
func text(t *testing.T, v View) string {
	t.Helper()
	var b strings.Builder
	fmt.Fprintf(&b, "via %s", v.NextHopAddr())
	if len(v.hop) == 32 { // the second is link-local (RFC 2545)
		fmt.Fprintf(&b, " and %s", netip.AddrFrom16([16]byte(v.hop[16:])))
	}
	fmt.Fprintf(&b, " path [%s] length %d first %d", v.PathText(), v.PathLen, v.FirstAS)
	if v.Flags&HasLocalPref != 0 {
		fmt.Fprintf(&b, " pref %d", v.Summary.LocalPref)
	}
	if v.Flags&HasMED != 0 {
		fmt.Fprintf(&b, " med %d", v.MED)
	}
	if v.Flags&HasOriginator != 0 {
		fmt.Fprintf(&b, " originator %d clusters %v", v.Originator, slices.Collect(v.Clusters()))
	}
	if c := slices.Collect(v.Communities()); len(c) > 0 {
		fmt.Fprintf(&b, " communities %v", c)
	}
	if c := slices.Collect(v.LargeCommunities()); len(c) > 0 {
		fmt.Fprintf(&b, " large %v", c)
	}
	return b.String()
}

func unhex(s string) []byte {
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	if err != nil {
		panic(err)
	}
	return b
}

// learned is a set with an attribute of each kind that a change is about, not in
// order: AS path 65001 {7,8}, communities 1:1 and NO_EXPORT, large 1:2:3.
const learned = "400101 00 c00808 00010001ffffff01 400210 0201 0000fde9 0102 00000007 00000008 8004 04 00000005 400504 000000c8 c0200c 000000010000000200000003 8009 04 00000009 800a04 0000000b"

func interned(t *testing.T, table *Table, attrs string, hop ...byte) Handle {
	t.Helper()
	h, r, err := table.Intern(Context{AS4: true, Reachable: true}, unhex(attrs), hop)
	if err != nil || h == 0 || r.Verdict != Accept {
		t.Fatal(h, r, err)
	}
	return h
}

func TestChange(t *testing.T) {
	t.Parallel()
	const as = "via 10.0.0.1 path [65001 {7,8}] length 2 first 65001 pref 200 med 5 originator 9 clusters [11] communities [65537 4294967041] large [[1 2 3]]"
	pref := uint32(7)
	for _, c := range []struct {
		name   string
		from   string
		change Change
		want   string
	}{
		{"nothing", learned, Change{}, as},
		{
			"to another AS", learned,
			Change{Drop: InternalAttributes, PrependAS: 65000},
			"via 10.0.0.1 path [65000 65001 {7,8}] length 3 first 65000 med 5 communities [65537 4294967041] large [[1 2 3]]",
		},
		{
			"reflected", learned,
			Change{Originator: 3, Cluster: 4, LocalPref: true},
			"via 10.0.0.1 path [65001 {7,8}] length 2 first 65001 pref 200 med 5 originator 9 clusters [4 11] communities [65537 4294967041] large [[1 2 3]]",
		},
		{
			"reflected the first time", "400101 00 400200",
			Change{Originator: 3, Cluster: 4, LocalPref: true},
			"via 10.0.0.1 path [] length 0 first 0 pref 100 originator 3 clusters [4]",
		},
		{
			"edited", learned,
			Change{Edit: &Edit{LocalPref: &pref, Communities: []uint32{65537, 5}, Large: []Large{{4, 5, 6}, {1, 2, 3}}, Prepend: []uint32{1, 2}}, Drop: MED},
			"via 10.0.0.1 path [1 2 65001 {7,8}] length 4 first 1 pref 7 originator 9 clusters [11] communities [65537 4294967041 5] large [[1 2 3] [4 5 6]]",
		},
		{
			"edited from nothing", "400101 00 400200",
			Change{Edit: &Edit{LocalPref: &pref, Communities: []uint32{5}, Large: []Large{{4, 5, 6}}, Prepend: []uint32{1, 2}}},
			"via 10.0.0.1 path [1 2] length 2 first 1 pref 7 communities [5] large [[4 5 6]]",
		},
		{"edit before the own AS", "400101 00 400200", Change{Edit: &Edit{Prepend: []uint32{1}}, PrependAS: 65000}, "via 10.0.0.1 path [65000 1] length 2 first 65000"},
		{"next hop", learned, Change{NextHop: append(make([]byte, 15), 1)}, strings.Replace(as, "10.0.0.1", "::1", 1)},
		{"two next hops", learned, Change{NextHop: append(append(make([]byte, 15), 2), 0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1)}, strings.Replace(as, "10.0.0.1", "::2 and fe80::1", 1)},
		{"tagged", learned, Change{Communities: []uint32{0xffff0006}}, strings.Replace(as, "4294967041]", "4294967041 4294901766]", 1)},
	} {
		table := NewTable()
		h := interned(t, table, c.from, 10, 0, 0, 1)
		for _, make := range []func(Handle, *Change) Handle{table.Derive, table.Advertise} {
			got := make(h, &c.change)
			if again := make(h, &c.change); again != got {
				t.Errorf("%s: %d, then %d", c.name, got, again)
			}
			if s := text(t, table.View(got)); s != c.want {
				t.Errorf("%s:\n got %s\nwant %s", c.name, s, c.want)
			}
			_, list := table.Canonical(got)
			for last := uint8(0); len(list) > 0; {
				_, typ, _, rest, ok := wire.Attribute(list)
				if !ok || typ <= last {
					t.Fatalf("%s: attribute %d after %d", c.name, typ, last)
				}
				last, list = typ, rest
			}
		}
	}
}

// TestSentTwoOctets: what a peer with AS numbers of two octets is sent comes back as it was.
func TestSentTwoOctets(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(r *rapid.T) {
		var path []byte
		for range rapid.IntRange(0, 3).Draw(r, "segments") {
			as := rapid.SliceOfN(rapid.SampledFrom([]uint32{1, 65000, 70000, 4200000000}), 1, 4).Draw(r, "as")
			s := packet.NewAs4PathParam(rapid.SampledFrom([]uint8{1, 2}).Draw(r, "kind"), as)
			b, err := s.Serialize()
			if err != nil {
				r.Fatal(err)
			}
			path = append(path, b...)
		}
		in := append(unhex("400101 00"), appendAttribute(nil, transitive, asPath, path)...)
		in = append(in, unhex("c00708")...)
		in = append(in, 0, byte(rapid.IntRange(0, 1).Draw(r, "aggregator")), 0, 1, 9, 9, 9, 9)
		table := NewTable()
		h, _, err := table.Intern(Context{AS4: true, Reachable: true}, in, []byte{10, 0, 0, 1})
		if err != nil {
			r.Fatal(err)
		}
		_, sent := table.Canonical(table.Advertise(h, &Change{TwoOctet: true}))
		back, result, err := table.Intern(Context{Reachable: true}, slices.Clone(sent), []byte{10, 0, 0, 1})
		if err != nil || result.Verdict != Accept {
			r.Fatal(result, err)
		}
		_, want := table.Canonical(h)
		_, got := table.Canonical(back)
		if !slices.Equal(got, want) {
			r.Fatalf("%x\nsent %x\nback %x", want, sent, got)
		}
	})
}

// TestExternal: of extended communities only those that go beyond an AS do.
func TestExternal(t *testing.T) {
	t.Parallel()
	const target, bandwidth = "0002fde800000001", "4004fde84e6e6b28"
	for _, c := range []struct{ in, want string }{{target + bandwidth, target}, {bandwidth, ""}, {"", ""}, {target, target}} {
		table := NewTable()
		list := "400101 00 400200"
		if c.in != "" {
			list += fmt.Sprintf("c010%02x%s", len(c.in)/2, c.in)
		}
		h := interned(t, table, list, 10, 0, 0, 1)
		if got := hex.EncodeToString(table.View(table.Advertise(h, &Change{External: true})).value(extended)); got != c.want {
			t.Errorf("%s: %s, want %s", c.in, got, c.want)
		}
		if got := hex.EncodeToString(table.View(table.Advertise(h, &Change{})).value(extended)); got != c.in {
			t.Errorf("%s within the AS: %s", c.in, got)
		}
	}
}

// TestBase: a derived set keeps what it was made of, and only as long as it is there.
func TestBase(t *testing.T) {
	t.Parallel()
	table := NewTable()
	raw := interned(t, table, learned, 10, 0, 0, 1)
	pref := uint32(9)
	edited := table.Derive(raw, &Change{Edit: &Edit{LocalPref: &pref}})
	stale := table.Derive(edited, &Change{Communities: []uint32{0xffff0006}})
	table.Release(raw)
	table.Release(edited)
	if table.Base(stale) != raw || table.Base(raw) != raw || table.Len() != 3 {
		t.Fatalf("base %d of %d, where %d is; %d sets", table.Base(stale), stale, raw, table.Len())
	}
	if got := table.View(table.Base(stale)).Summary.LocalPref; got != 200 {
		t.Errorf("LOCAL_PREF %d", got)
	}
	if table.View(stale).Flags&LLGRStale == 0 {
		t.Error("the community is not seen")
	}
	table.Release(stale)
	if table.Len() != 0 {
		t.Errorf("%d sets are left", table.Len())
	}
}

// TestView: what is asked of a view.
func TestView(t *testing.T) {
	t.Parallel()
	table := NewTable()
	v := table.View(interned(t, table, learned, 10, 0, 0, 1))
	for what, got := range map[string]bool{
		"begins with itself": v.BeginsWith([]uint32{65001, 7}), "begins with nothing": v.BeginsWith(nil), "begins with another": !v.BeginsWith([]uint32{65001, 8}),
		"begins with more": !v.BeginsWith([]uint32{65001, 7, 8, 9}),
		"has":              v.HasCommunity(65537) && v.HasLarge(Large{1, 2, 3}), "has not": !v.HasCommunity(1) && !v.HasLarge(Large{1, 2, 4}), "counts": v.CountAS(7) == 1 && v.CountAS(9) == 0,
	} {
		if !got {
			t.Error(what)
		}
	}
}
