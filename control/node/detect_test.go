package node

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/routerd/routerd/dataplane"
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
		Links: []dataplane.UnderlayLink{lo, down, link(6, "eth1"), link(3, "docker0"), link(5, "eth0"), link(4, "vxlan.calico"), link(7, "eth10")},
		Addresses: []dataplane.UnderlayAddress{
			addr("lo", "127.0.0.1/8"), addr("eth9", "10.99.0.1/24"), addr("docker0", "172.17.0.1/16"), addr("vxlan.calico", "192.168.1.1/32"),
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
		{"skip-interface=eth0", "10.5.0.1/24", "eth1"},
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
