package store_test

import (
	"strings"
	"testing"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/store"
)

func TestRefused(t *testing.T) {
	node := func(name, ipv4, ipv6 string, refuses ...string) *store.Node {
		n := &store.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
		n.Spec.BGP = &store.NodeBGPSpec{IPv4Address: ipv4, IPv6Address: ipv6}
		f := store.NodeEncaps{Published: true, Refuses: map[string]string{}}
		for _, r := range refuses {
			f.Refuses[r] = "no such module"
		}
		store.SetNodeEncaps(n, f)
		return n
	}
	nodes := []*store.Node{
		node("four", "10.0.0.1/24", "", "ipip"),
		node("six", "", "fd00::1/64", "ip6tnl"),
		node("dual", "10.0.0.2/24", "fd00::2/64", "ip6tnl"),
		{ObjectMeta: metav1.ObjectMeta{Name: "calico"}},
	}
	for _, tt := range []struct {
		cidr  string
		encap store.Encapsulation
		want  string
	}{
		{"192.168.0.0/16", store.IPIP, "four six"},
		{"192.168.0.0/16", store.IPIPCrossSubnet, "four six"},
		{"192.168.0.0/16", store.VXLAN, ""},
		{"192.168.0.0/16", store.Direct, ""},
		{"fd10::/48", store.IPIP, "four six dual"},
		{"not a CIDR", store.IPIP, ""},
	} {
		p := &v3.IPPool{Spec: v3.IPPoolSpec{CIDR: tt.cidr}}
		var got []string
		for _, err := range store.Refused(p, store.NewMode(tt.encap, 4096, 4789), nodes) {
			if !strings.Contains(err.Error(), "no such module") {
				t.Errorf("%v does not say why", err)
			}
			got = append(got, strings.Fields(err.Error())[1])
		}
		if strings.Join(got, " ") != tt.want {
			t.Errorf("%s of %s is refused by %v, want %q", tt.encap, tt.cidr, got, tt.want)
		}
	}
}
