package filter

import (
	"net/netip"
	"testing"

	"github.com/routerd/routerd/dataplane"
)

func TestDescribe(t *testing.T) {
	t.Parallel()
	r := NewRuleset()
	r.Sets["s1"] = Set{ID: "s1", Origin: `app == "web"`}
	r.Sets["s2"] = Set{ID: "s2", Type: Ports, Origin: "http of all()"}
	nets := []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("192.0.2.0/24")}
	for _, tt := range []struct {
		rule Rule
		want string
	}{
		{Rule{}, "everything"},
		{Rule{Family: dataplane.IPv6, NotProtocol: 6}, "IPv6 not tcp"},
		{Rule{Protocol: 1, ICMP: ICMP{Set: true, Type: 8}}, "icmp type 8"},
		{Rule{Protocol: 58, NotICMP: ICMP{Set: true, Type: 128, CodeSet: true, Code: 1}}, "icmpv6 not type 128 code 1"},
		{
			Rule{Protocol: 6, Source: Side{Set: "s1", NotNets: nets}, Destination: Side{Ports: []PortRange{{80, 80}, {8000, 8100}}, PortSet: "s2"}},
			`tcp from not 10.0.0.0/8,192.0.2.0/24 and (app == "web") to port 80,8000-8100,(http of all())`,
		},
		{Rule{Protocol: 99, Destination: Side{NotSet: "gone", NotPorts: []PortRange{{1, 2}}}}, "99 to not (gone) and not port 1-2"},
	} {
		if got := r.Describe(tt.rule); got != tt.want {
			t.Errorf("%+v:\n got %s\nwant %s", tt.rule, got, tt.want)
		}
	}
}

func TestParseProtocol(t *testing.T) {
	t.Parallel()
	for p := 1; p <= 255; p++ {
		if got, err := ParseProtocol(ProtocolName(uint8(p))); err != nil || int(got) != p {
			t.Errorf("protocol %d reads back as %d, %v", p, got, err)
		}
	}
	if got, err := ParseProtocol("UDPLite"); got != 136 || err != nil {
		t.Errorf("UDPLite is %d, %v", got, err)
	}
	for _, s := range []string{"", "0", "256", "http", "-1"} {
		if got, err := ParseProtocol(s); err == nil {
			t.Errorf("%q is read as %d", s, got)
		}
	}
}
