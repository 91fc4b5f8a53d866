package foreign

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/dataplane"
)

func TestRoutes(t *testing.T) {
	t.Parallel()
	pools := []netip.Prefix{netip.MustParsePrefix("192.168.0.0/16"), netip.MustParsePrefix("fd20::/48")}
	ours := map[string]bool{ // and whether it is in the kernel
		"192.168.1.0/26": true, "192.168.2.0/26": false, "10.0.0.0/8": true, "0.0.0.0/0": true, "fd20::/122": true, "fd99::/64": true,
		"192.168.4.0/26": false, // this host's own, which drops
	}
	status := func(k dataplane.Key) (dataplane.Status, bool) {
		p := k.(dataplane.RouteKey).Prefix.String()
		done, wanted := ours[p]
		st := dataplane.Status{Object: dataplane.Route{NextHop: 1}, State: dataplane.Pending}
		if done {
			st.State = dataplane.Done
		}
		if p == "192.168.4.0/26" {
			st.Object = dataplane.Route{Type: dataplane.Blackhole}
		}
		return st, wanted
	}
	const none = "-"
	tests := []struct {
		name, prefix, link string // link: or none, of a route that drops
		metric             uint32
		want               string // ours that it takes packets from
	}{
		{"same prefix, worse metric", "192.168.1.0/26", "eth0", 50, ""},
		{"same key: ours is refused", "192.168.2.0/26", "eth0", 0, "route 192.168.2.0/26"},
		{"more specific in a pool", "192.168.1.32/27", "eth0", 50, "route 192.168.1.0/26"},
		{"a host of a block", "192.168.1.7/32", "eth0", 0, "route 192.168.1.0/26"},
		{"between blocks", "192.168.9.0/26", "eth0", 0, ""},
		{"less specific than a block", "192.168.0.0/20", "eth0", 0, ""},
		{"the wire of a workload", "192.168.1.7/32", "cali123", 0, ""},
		{"an address of a tunnel device", "fd20::1/128", "vxlan-v6.calico", 256, ""},
		{"a connected network below what BGP told", "10.1.0.0/24", "eth0", 0, ""},
		{"below the default route", "172.16.0.0/12", "eth0", 0, ""},
		{"better metric, IPv6", "fd20::/122", "eth0", 1023, "route fd20::/122 metric 1024"},
		{"worse metric, IPv6", "fd20::/122", "eth0", 1025, ""},
		{"better metric outside of pools", "fd99::/64", "eth0", 256, "route fd99::/64 metric 1024"},
		{"more specific, IPv6", "fd20::8/125", "eth0", 4096, "route fd20::/122 metric 1024"},
		{"a default route", "::/0", "eth0", 1, ""},
		{"same key, before ours", "192.168.1.0/26", "eth0", 0, "route 192.168.1.0/26"},
		{"same key, IPv6, where no order is known", "fd20::/122", "eth0", 1024, "route fd20::/122 metric 1024"},
		{"drops a part of a block", "192.168.1.0/27", none, 9, "route 192.168.1.0/26"},
		{"drops a block, before ours", "192.168.1.0/26", none, 0, "route 192.168.1.0/26"},
		{"drops a block with a better metric, IPv6", "fd20::/122", none, 1023, "route fd20::/122 metric 1024"},
		{"drops what is in no block", "192.168.0.0/16", none, 0, ""},
		{"drops this host's own block, as ours would", "192.168.4.0/26", none, 0, ""},
		{"drops a part of it", "192.168.4.32/27", none, 0, ""},
		{"leads a part of it away", "192.168.4.32/27", "eth0", 0, "route 192.168.4.0/26"},
	}
	for _, tt := range tests {
		r := dataplane.UnderlayRoute{Prefix: netip.MustParsePrefix(tt.prefix), Link: tt.link, Metric: tt.metric, Protocol: 4}
		u := dataplane.Underlay{Routes: []dataplane.UnderlayRoute{r}}
		if tt.link == none {
			r.Type, r.Link = "blackhole", ""
			u = dataplane.Underlay{Dropping: []dataplane.UnderlayRoute{r}}
		}
		got := ""
		for _, r := range overriding(u, pools, status) {
			got += r.ours.String()
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
	behind := dataplane.UnderlayRoute{Prefix: netip.MustParsePrefix("192.168.1.0/26"), Link: "eth0", Behind: true}
	if got := overriding(dataplane.Underlay{Routes: []dataplane.UnderlayRoute{behind}}, pools, status); got != nil {
		t.Errorf("behind ours: %v", got)
	}
}

func TestRoutesError(t *testing.T) {
	t.Parallel()
	if err := RoutesError(nil); err != nil {
		t.Errorf("nothing is %v", err)
	}
	var list []Route
	for range 5 {
		list = append(list, Route{
			theirs: dataplane.UnderlayRoute{Prefix: netip.MustParsePrefix("192.168.1.32/27"), Gateway: netip.MustParseAddr("10.1.0.9"), Link: "eth0", Protocol: 12, Metric: 5},
			ours:   routeKey(netip.MustParsePrefix("192.168.1.0/26")),
		})
	}
	const one = "192.168.1.32/27 via 10.1.0.9 dev eth0 proto 12 metric 5 (before route 192.168.1.0/26)"
	want := "routes of other programs divert packets from ours and are left alone: " + one + ", " + one + ", " + one +
		" and 2 more; remove them, or have their program leave the pools alone"
	if got := RoutesError(list).Error(); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}
