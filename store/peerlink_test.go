package store

import (
	"strings"
	"testing"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
)

// TestCheckPeerLink: each mistake is named by its field, with the cure.
func TestCheckPeerLink(t *testing.T) {
	t.Parallel()
	device := func(name string) map[string]string { return map[string]string{AnnotationPeerInterface: name} }
	extended := func(v string) map[string]string { return map[string]string{AnnotationExtendedNextHop: v} }
	for _, c := range []struct {
		name  string
		notes map[string]string
		spec  v3.BGPPeerSpec
		want  string // empty: right
	}{
		{"nothing", nil, v3.BGPPeerSpec{PeerIP: "10.1.0.1"}, ""},
		{"a device", device("eth1"), v3.BGPPeerSpec{ASNumber: 1}, ""},
		{"a device and its neighbour", device("eth1"), v3.BGPPeerSpec{ASNumber: 1, PeerIP: "[fe80::1]:1790"}, ""},
		{"an empty device", device(""), v3.BGPPeerSpec{ASNumber: 1}, "such as eth1"},
		{"no device's name", device("a/b"), v3.BGPPeerSpec{ASNumber: 1}, "network interface's name"},
		{"a global neighbour", device("eth1"), v3.BGPPeerSpec{ASNumber: 1, PeerIP: "fd00::1"}, "spec.peerIP"},
		{"an IPv4 neighbour", device("eth1"), v3.BGPPeerSpec{ASNumber: 1, PeerIP: "169.254.0.1"}, "spec.peerIP"},
		{"no AS", device("eth1"), v3.BGPPeerSpec{}, "spec.asNumber"},
		{"nodes", device("eth1"), v3.BGPPeerSpec{ASNumber: 1, PeerSelector: "all()"}, "spec.peerSelector"},
		{"a gateway", device("eth1"), v3.BGPPeerSpec{ASNumber: 1, ReachableBy: "10.1.0.1"}, "spec.reachableBy"},
		{"IPv4 over IPv6", extended("true"), v3.BGPPeerSpec{ASNumber: 1, PeerIP: "fd00::1"}, ""},
		{"IPv4 over IPv4", extended("true"), v3.BGPPeerSpec{ASNumber: 1, PeerIP: "10.1.0.1"}, "leave it out"},
		{"neither true nor false", extended("yes"), v3.BGPPeerSpec{}, `must be "true" or "false"`},
	} {
		err := CheckPeerLink(c.notes, c.spec)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want %q", c.name, err, c.want)
		}
	}
}
