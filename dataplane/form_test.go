package dataplane_test

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/dataplane"
)

func TestParseForm(t *testing.T) {
	for s, want := range map[string]dataplane.Encap{
		"direct":           {Driver: "direct"},
		"ipip":             {Driver: "ipip", Outer: dataplane.IPv4},
		"ip6tnl":           {Driver: "ipip", Outer: dataplane.IPv6},
		"vxlan/4096/4789":  {Driver: "vxlan", Outer: dataplane.IPv4, VNI: 4096, Port: 4789},
		"vxlan6/1/65535":   {Driver: "vxlan", Outer: dataplane.IPv6, VNI: 1, Port: 65535},
		"vxlan/16777215/1": {Driver: "vxlan", Outer: dataplane.IPv4, VNI: 1<<24 - 1, Port: 1},
	} {
		got, err := dataplane.ParseEncap(s)
		if err != nil || got != want || got.String() != s {
			t.Errorf("ParseForm(%q) = %+v (%s), %v; want %+v", s, got, got, err, want)
		}
	}
	for _, s := range []string{
		"", "Direct", "vxlan", "vxlan/4096", "vxlan/0/4789", "vxlan/16777216/4789", "vxlan/1/0", "vxlan/1/65536", "vxlan/1/2/3",
		"vxlan/+1/2", "vxlan/01/2", "vxlan4/1/2", "direct/1/2", "ipip/1/2", " direct",
	} {
		if f, err := dataplane.ParseEncap(s); err == nil {
			t.Errorf("ParseForm(%q) = %s, want an error", s, f)
		}
	}
}

func TestCompareForms(t *testing.T) {
	want := []string{"vxlan/1/4789", "vxlan/4096/4788", "vxlan/4096/4789", "vxlan6/1/1", "ipip", "ip6tnl", "direct"}
	var encaps []dataplane.Encap
	for _, s := range want {
		f, err := dataplane.ParseEncap(s)
		if err != nil {
			t.Fatal(err)
		}
		encaps = append(encaps, f)
	}
	slices.Reverse(encaps)
	slices.SortFunc(encaps, dataplane.CompareEncaps)
	var got []string
	for _, f := range encaps {
		got = append(got, f.String())
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("order (-want +got):\n%s", diff)
	}
}

// FuzzParseForm: whatever a node publishes, an encapsulation that is read is one that
// is written the same.
func FuzzParseForm(f *testing.F) {
	for _, s := range []string{"direct", "ip6tnl", "vxlan/4096/4789", "vxlan6/1/1", "vxlan/-1/4789", "vxlan//"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		encap, err := dataplane.ParseEncap(s)
		if err != nil {
			return
		}
		if encap.String() != s || encap.Driver == dataplane.DriverVXLAN && (encap.VNI == 0 || encap.VNI >= 1<<24 || encap.Port == 0) {
			t.Errorf("ParseForm(%q) = %+v, which is written %s", s, encap, encap)
		}
	})
}
