package node

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// manyLinks is a host with the devices that get in the way of detection.
func manyLinks() dataplane.Underlay {
	link := func(i int, name string) dataplane.UnderlayLink {
		return dataplane.UnderlayLink{Index: i, Name: name, MTU: 1500, Up: true}
	}
	addr := func(l, p string) dataplane.UnderlayAddress {
		return dataplane.UnderlayAddress{Link: l, Prefix: netip.MustParsePrefix(p)}
	}
	lo := link(1, "lo")
	lo.Loopback = true
	down := link(2, "eth9")
	down.Up = false
	secondary := addr("eth0", "10.1.0.100/24")
	secondary.Secondary = true
	deprecated := addr("eth0", "10.1.0.50/24")
	deprecated.Deprecated = true
	linkScope := addr("eth0", "169.254.7.7/16")
	linkScope.LinkScope = true
	return dataplane.Underlay{
		// Out of order on purpose: the index decides.
		Links: []dataplane.UnderlayLink{lo, down, link(6, "eth1"), link(3, "docker0"), link(5, "eth0"), link(4, "vxlan.calico"), link(8, "vxlan.calico-2"), link(7, "eth10")},
		Addresses: []dataplane.UnderlayAddress{
			addr("lo", "127.0.0.1/8"), addr("eth9", "10.99.0.1/24"), addr("docker0", "172.17.0.1/16"), addr("vxlan.calico", "192.168.1.1/32"), addr("vxlan.calico-2", "192.168.1.1/32"),
			secondary, deprecated, linkScope, addr("eth0", "10.1.0.11/24"), addr("eth1", "10.5.0.1/24"), addr("eth10", "10.6.0.1/24"),
			addr("eth1", "fd00::1/64"), addr("eth1", "fe80::1/64"),
		},
		Routes: []dataplane.UnderlayRoute{
			{Prefix: netip.MustParsePrefix("0.0.0.0/0"), Gateway: netip.MustParseAddr("10.1.0.1"), Link: "eth0"},
			{Prefix: netip.MustParsePrefix("10.6.0.0/16"), Gateway: netip.MustParseAddr("10.6.0.254"), Link: "eth10"},
			{Prefix: netip.MustParsePrefix("10.5.0.0/24"), Link: "eth1"},
			{Prefix: netip.MustParsePrefix("10.1.0.0/24"), Link: "eth0"},
		},
	}
}

func TestDetect(t *testing.T) {
	tests := []struct {
		method     string
		want, link string
	}{
		{"", "10.1.0.11/24", "eth0"},
		{"first-found", "10.1.0.11/24", "eth0"},
		{"interface=eth1", "10.5.0.1/24", "eth1"},
		{"interface=eth1.+", "10.6.0.1/24", "eth10"},
		{"interface=nothing, eth10", "10.6.0.1/24", "eth10"},
		{"interface=docker0", "172.17.0.1/16", "docker0"},
		{"skip-interface=eth0,eth10", "10.5.0.1/24", "eth1"},
		{"interface=eth10,eth1", "10.6.0.1/24", "eth10"},
		{"cidr=10.6.0.0/16,10.0.0.0/8", "10.6.0.1/24", "eth10"},
		{"skip-interface=eth0,eth1", "10.6.0.1/24", "eth10"},
		{"can-reach=8.8.8.8", "10.1.0.11/24", "eth0"},
		{"can-reach=10.6.99.1", "10.6.0.1/24", "eth10"},
		{"can-reach=10.5.0.77", "10.5.0.1/24", "eth1"},
		{"cidr=10.5.0.0/16", "10.5.0.1/24", "eth1"},
		{"cidr=192.0.2.0/24,10.6.0.0/24", "10.6.0.1/24", "eth10"},
		{"10.5.0.1", "10.5.0.1/24", "eth1"},
		{"10.1.0.100/24", "10.1.0.100/24", "eth0"},
	}
	for _, tt := range tests {
		t.Run(tt.method, func(t *testing.T) {
			got, err := Detect(manyLinks(), tt.method, dataplane.IPv4)
			if err != nil {
				t.Fatal(err)
			}
			if got.Prefix.String() != tt.want || got.Link != tt.link {
				t.Errorf("Detect = %s on %s, want %s on %s", got.Prefix, got.Link, tt.want, tt.link)
			}
		})
	}
}

func TestDetectIPv6(t *testing.T) {
	got, err := Detect(manyLinks(), "first-found", dataplane.IPv6)
	if err != nil || got.Prefix.String() != "fd00::1/64" {
		t.Errorf("Detect = %v, %v; want the global address", got, err)
	}
}

// on is a host with addresses, each "device address[,secondary|deprecated]", and routes, each
// "prefix [via gateway] dev device [src address]".
func on(t *testing.T, addrs, routes []string) dataplane.Underlay {
	t.Helper()
	var u dataplane.Underlay
	for _, s := range addrs {
		link, rest, _ := strings.Cut(s, " ")
		p, flag, _ := strings.Cut(rest, ",")
		if !slices.ContainsFunc(u.Links, func(l dataplane.UnderlayLink) bool { return l.Name == link }) {
			u.Links = append(u.Links, dataplane.UnderlayLink{Index: len(u.Links) + 2, Name: link, Up: true})
		}
		u.Addresses = append(u.Addresses, dataplane.UnderlayAddress{
			Link: link, Prefix: netip.MustParsePrefix(p), Secondary: flag == "secondary", Deprecated: flag == "deprecated",
		})
	}
	for _, s := range routes {
		f := strings.Fields(s)
		r := dataplane.UnderlayRoute{Prefix: netip.MustParsePrefix(f[0])}
		for i := 1; i+1 < len(f); i += 2 {
			switch f[i] {
			case "via":
				r.Gateway = netip.MustParseAddr(f[i+1])
			case "dev":
				r.Link = f[i+1]
			case "src":
				r.Source = netip.MustParseAddr(f[i+1])
			}
		}
		u.Routes = append(u.Routes, r)
	}
	return u
}

func TestDetectRanks(t *testing.T) {
	const defaultRoute = "0.0.0.0/0 via 10.1.0.1 dev eth0"
	tests := []struct {
		name   string
		addrs  []string
		routes []string
		peers  []string
		method string
		want   string // address and device, or what the error says
	}{
		{"virtual address before the host's own", []string{"eth0 10.1.0.100/32", "eth0 10.1.0.11/24"}, nil, nil, "", "10.1.0.11/24 on eth0"},
		{"secondary before primary", []string{"eth0 10.1.0.100/24,secondary", "eth0 10.1.0.11/24"}, nil, nil, "", "10.1.0.11/24 on eth0"},
		{"secondary of an old primary that is deprecated", []string{"eth0 10.1.0.11/24,deprecated", "eth0 10.1.0.99/24,secondary"}, nil, nil, "", "10.1.0.99/24 on eth0"},
		{"cloud image with /32", []string{"eth0 10.1.0.11/32"}, []string{defaultRoute}, nil, "", "10.1.0.11/32 on eth0"},
		{"two devices, one with the default route", []string{"eth1 10.9.0.5/24", "eth0 10.1.0.11/24"}, []string{defaultRoute}, nil, "", "10.1.0.11/24 on eth0"},
		{
			"two devices, the peers behind the other",
			[]string{"eth0 10.1.0.11/24", "eth1 10.9.0.5/24"},
			[]string{defaultRoute, "10.9.0.0/24 dev eth1"},
			[]string{"10.9.0.6", "10.9.0.7"},
			"", "10.9.0.5/24 on eth1",
		},
		{
			"peers on both sides, most on one",
			[]string{"eth0 10.1.0.11/24", "eth1 10.9.0.5/24"},
			[]string{"10.1.0.0/24 dev eth0", "10.9.0.0/24 dev eth1"},
			[]string{"10.9.0.6", "10.1.0.6", "10.9.0.7"},
			"", "10.9.0.5/24 on eth1",
		},
		{
			"preferred source of the route to the peers",
			[]string{"eth0 10.1.0.11/24", "eth1 10.9.0.5/24"},
			[]string{"0.0.0.0/0 via 10.1.0.1 dev eth0 src 10.9.0.5"},
			[]string{"10.77.0.1"},
			"", "10.9.0.5/24 on eth1",
		},
		{
			"two subnets on one device, the default route in the second",
			[]string{"eth0 10.9.0.5/24", "eth0 10.1.0.11/24"},
			[]string{defaultRoute},
			nil, "", "10.1.0.11/24 on eth0",
		},
		{"list before the default route", []string{"eth0 10.1.0.11/24", "eth1 10.9.0.5/24"}, []string{defaultRoute}, nil, "interface=eth1,eth0", "10.9.0.5/24 on eth1"},
		{"peer of the other family", []string{"eth0 10.1.0.11/24"}, nil, []string{"fd00::2"}, "", "10.1.0.11/24 on eth0"},
		{
			"tie of two devices",
			[]string{"eth0 10.1.0.11/24", "eth1 10.9.0.5/24", "docker0 172.17.0.1/16"},
			nil, nil, "first-found",
			`address method "first-found": no telling which address: 10.1.0.11/24 on eth0, 10.9.0.5/24 on eth1 are equally good; set address.ipv4 to one of them, such as interface=eth0, or cidr=10.1.0.0/24`,
		},
		{
			"tie that the method leaves",
			[]string{"eth0 10.1.0.11/24", "eth1 10.9.0.5/24", "eth2 10.8.0.5/24"},
			[]string{defaultRoute},
			nil, "skip-interface=eth0",
			`address method "skip-interface=eth0": no telling which address: 10.9.0.5/24 on eth1, 10.8.0.5/24 on eth2 are equally good; set address.ipv4 to one of them, such as interface=eth1, or cidr=10.9.0.0/24`,
		},
		{"two virtual addresses of one subnet", []string{"eth0 10.1.0.12/24,secondary", "eth0 10.1.0.13/24,secondary"}, nil, nil, "", "10.1.0.12/24 on eth0"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var peers []netip.Addr
			for _, p := range tt.peers {
				peers = append(peers, netip.MustParseAddr(p))
			}
			d, err := Detect(on(t, tt.addrs, tt.routes), tt.method, dataplane.IPv4, peers...)
			got := d.Prefix.String() + " on " + d.Link
			if err != nil {
				got = err.Error()
			}
			if got != tt.want {
				t.Errorf("Detect:\n got %s\nwant %s", got, tt.want)
			}
		})
	}
}

// TestDetectOrder: whatever the order in which the kernel lists things, the
// answer is the same.
func TestDetectOrder(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		u := manyLinks()
		want, err := Detect(u, "first-found", dataplane.IPv4, netip.MustParseAddr("10.6.0.9"))
		if err != nil || want.Link != "eth10" {
			rt.Fatalf("Detect = %v, %v; want the address towards the peer", want, err)
		}
		u.Links = rapid.Permutation(u.Links).Draw(rt, "links")
		u.Routes = rapid.Permutation(u.Routes).Draw(rt, "routes")
		got, err := Detect(u, "first-found", dataplane.IPv4, netip.MustParseAddr("10.6.0.9"))
		if err != nil || got != want {
			rt.Errorf("Detect = %v, %v; want %v", got, err, want)
		}
	})
}

func TestDetectErrors(t *testing.T) {
	tests := []struct {
		method string
		want   []string
	}{
		{"interface=wlan.*", []string{"10.1.0.11/24 on eth0", "address.ipv4"}},
		{"interface=", []string{"regular expression"}},
		{"interface=[", []string{"regular expression"}},
		{"cidr=10.0.0.0", []string{"CIDR"}},
		{"can-reach=host", []string{"address"}},
		{"can-reach=fd00::9", []string{"IPv4"}},
		{"nearest", []string{"first-found", "can-reach="}},
		{"10.9.9.9", []string{"no address found", "10.1.0.11/24 on eth0"}},
	}
	for _, tt := range tests {
		t.Run(tt.method, func(t *testing.T) {
			_, err := Detect(manyLinks(), tt.method, dataplane.IPv4)
			if err == nil {
				t.Fatal("no error")
			}
			if bad := !errors.Is(err, ErrNoAddress); bad != (CheckMethod(tt.method, dataplane.IPv4) != nil) {
				t.Errorf("CheckMethod = %v, and Detect says %v", CheckMethod(tt.method, dataplane.IPv4), err)
			}
			for _, w := range tt.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("message does not name %q: %v", w, err)
				}
			}
		})
	}
	if _, err := Detect(dataplane.Underlay{}, "first-found", dataplane.IPv4); err == nil || !strings.Contains(err.Error(), "no IPv4 address on a device that is up") {
		t.Errorf("a host without addresses: %v", err)
	}
	noRoutes := manyLinks()
	noRoutes.Routes = nil
	if _, err := Detect(noRoutes, "can-reach=8.8.8.8", dataplane.IPv4); err == nil || !strings.Contains(err.Error(), "no route to 8.8.8.8") {
		t.Errorf("a host without routes: %v", err)
	}
}

// TestSourcesOf: a host may send from all of its own addresses, also from those of its
// loopback, and not from those of containers' bridges, of tunnels and of links.
func TestSourcesOf(t *testing.T) {
	t.Parallel()
	u := on(t, []string{
		"eth0 10.1.0.11/24", "eth0 10.1.0.5/24,secondary", "eth1 10.9.0.5/24,deprecated", "lo 127.0.0.1/8", "lo 192.0.2.1/32", "docker0 172.17.0.1/16",
		"vxlan.calico 192.168.0.1/32", "kube-ipvs0 10.96.0.1/32", "eth0 fe80::1/64", "eth0 2001:db8::1/64",
	}, nil)
	if got, want := fmt.Sprint(sourcesOf(u)), "[10.1.0.5 10.1.0.11 10.9.0.5 192.0.2.1 2001:db8::1]"; got != want {
		t.Errorf("it may send from %s, want %s", got, want)
	}
	for i := range 2 * store.MaxTunnelSources {
		u.Addresses = append(u.Addresses, dataplane.UnderlayAddress{Link: "lo", Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)}), 32), Secondary: true})
	}
	got := sourcesOf(u)
	if len(got) != store.MaxTunnelSources || !slices.Contains(got, netip.MustParseAddr("10.1.0.11")) {
		t.Errorf("of many it publishes %v", got)
	}
}
