package store

import (
	"net/netip"
	"strings"
	"testing"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"pgregory.net/rapid"
)

// TestCheckListenRange: each mistake is named by its field, with the cure.
func TestCheckListenRange(t *testing.T) {
	t.Parallel()
	of := func(kv ...string) map[string]string {
		m := map[string]string{}
		for i := 0; i < len(kv); i += 2 {
			m[kv[i]] = kv[i+1]
		}
		return m
	}
	some := of(AnnotationListenRange, "10.9.0.0/24")
	for _, c := range []struct {
		name  string
		notes map[string]string
		spec  v3.BGPPeerSpec
		want  string // empty: right
	}{
		{"nothing", nil, v3.BGPPeerSpec{PeerIP: "10.1.0.1"}, ""},
		{"a range", some, v3.BGPPeerSpec{ASNumber: 1}, ""},
		{"a range of IPv6", of(AnnotationListenRange, "2001:db8::/64", AnnotationListenLimit, "10000", AnnotationExtendedNextHop, "true"), v3.BGPPeerSpec{ASNumber: 1}, ""},
		{"one address", of(AnnotationListenRange, "10.9.0.7/32"), v3.BGPPeerSpec{ASNumber: 1}, ""},
		{"no prefix", of(AnnotationListenRange, "10.9.0.7"), v3.BGPPeerSpec{ASNumber: 1}, "must be one prefix, such as 10.9.0.0/24"},
		{"two prefixes", of(AnnotationListenRange, "10.9.0.0/24,10.8.0.0/24"), v3.BGPPeerSpec{ASNumber: 1}, "of two there are two BGPPeers"},
		{"empty", of(AnnotationListenRange, ""), v3.BGPPeerSpec{ASNumber: 1}, "must be one prefix"},
		{"IPv4 in IPv6", of(AnnotationListenRange, "::ffff:10.9.0.0/120"), v3.BGPPeerSpec{ASNumber: 1}, "must be one prefix"},
		{"bits beyond", of(AnnotationListenRange, "10.9.0.7/24"), v3.BGPPeerSpec{ASNumber: 1}, "give 10.9.0.0/24, or the address alone as spec.peerIP"},
		{"everybody", of(AnnotationListenRange, "::/0"), v3.BGPPeerSpec{ASNumber: 1}, "is the whole internet"},
		{"link-local inside", of(AnnotationListenRange, "fe00::/7"), v3.BGPPeerSpec{ASNumber: 1}, "overlaps the link-local range"},
		{"link-local", of(AnnotationListenRange, "fe80::/10"), v3.BGPPeerSpec{ASNumber: 1}, "in the annotation routerd.io/peerInterface"},
		{"multicast", of(AnnotationListenRange, "224.0.0.0/4"), v3.BGPPeerSpec{ASNumber: 1}, "overlaps the multicast range"},
		{"loopback", of(AnnotationListenRange, "127.0.0.0/8"), v3.BGPPeerSpec{ASNumber: 1}, "overlaps the loopback range"},
		{"loopback inside", of(AnnotationListenRange, "96.0.0.0/3"), v3.BGPPeerSpec{ASNumber: 1}, "overlaps the loopback range"},
		{"an address too", some, v3.BGPPeerSpec{ASNumber: 1, PeerIP: "10.9.0.7"}, "spec.peerIP"},
		{"nodes too", some, v3.BGPPeerSpec{ASNumber: 1, PeerSelector: "all()"}, "spec.peerSelector"},
		{"workloads too", some, v3.BGPPeerSpec{ASNumber: 1, LocalWorkloadSelector: "all()"}, "spec.localWorkloadSelector"},
		{"a gateway", some, v3.BGPPeerSpec{ASNumber: 1, ReachableBy: "10.1.0.1"}, "spec.reachableBy"},
		{"a device", of(AnnotationListenRange, "10.9.0.0/24", AnnotationPeerInterface, "eth1"), v3.BGPPeerSpec{ASNumber: 1}, "metadata.annotations[routerd.io/peerInterface]"},
		{"no AS", some, v3.BGPPeerSpec{}, "spec.asNumber"},
		{"IPv6 next hops over IPv4", of(AnnotationListenRange, "10.9.0.0/24", AnnotationExtendedNextHop, "true"), v3.BGPPeerSpec{ASNumber: 1}, "is for sessions over IPv6"},
		{"a limit alone", of(AnnotationListenLimit, "10"), v3.BGPPeerSpec{PeerIP: "10.1.0.1"}, "is for a BGPPeer with the annotation routerd.io/listenRange"},
		{"no number", of(AnnotationListenRange, "10.9.0.0/24", AnnotationListenLimit, "many"), v3.BGPPeerSpec{ASNumber: 1}, "from 1 to 10000"},
		{"none", of(AnnotationListenRange, "10.9.0.0/24", AnnotationListenLimit, "0"), v3.BGPPeerSpec{ASNumber: 1}, "from 1 to 10000"},
		{"too many", of(AnnotationListenRange, "10.9.0.0/24", AnnotationListenLimit, "10001"), v3.BGPPeerSpec{ASNumber: 1}, "from 1 to 10000"},
	} {
		err := CheckListenRange(c.notes, c.spec)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want %q", c.name, err, c.want)
		}
	}
}

// TestListenRangeOf: what is read is what a session can be had with, whatever stands there.
func TestListenRangeOf(t *testing.T) {
	t.Parallel()
	if got, want := ListenRangeOf(map[string]string{AnnotationListenRange: "10.9.0.0/24"}), (ListenRange{netip.MustParsePrefix("10.9.0.0/24"), DefaultListenLimit}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	rapid.Check(t, func(t *rapid.T) {
		notes := map[string]string{AnnotationListenRange: rapid.StringMatching(`[0-9a-f.:]{0,12}(/[0-9]{1,3})?`).Draw(t, "range")}
		if rapid.Bool().Draw(t, "limited") {
			notes[AnnotationListenLimit] = rapid.StringMatching(`-?[0-9]{0,6}`).Draw(t, "limit")
		}
		r := ListenRangeOf(notes)
		if wrong := CheckListenRange(notes, v3.BGPPeerSpec{ASNumber: 1}) != nil; wrong != (r == ListenRange{}) {
			t.Fatalf("%v: %+v, wrong: %t", notes, r, wrong)
		}
		if r != (ListenRange{}) && (!r.Prefix.IsValid() || r.Prefix != r.Prefix.Masked() || r.Prefix.Bits() == 0 || r.Limit < 1 || r.Limit > maxListenLimit) {
			t.Fatalf("%v: %+v", notes, r)
		}
	})
}
