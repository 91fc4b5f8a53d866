package nft

import (
	"errors"
	"net/netip"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/integration/await"
)

// TestARP: a workload claims its own addresses alone in ARP; the table follows the
// endpoints, a flush and a restart.
func TestARP(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	for _, name := range interfaces {
		ip(t, l.host, "link set "+name+" arp on")
	}
	err := l.host.Do(func() error { return writeAll("1", "cali1", "cali2", "calix", "eth0") })
	if err != nil {
		t.Fatal(err)
	}
	table := openTable(t, l.host, Config{Shared: true})
	defer func() { table.Close() }()
	endpoint := func(name string, own int, sources ...string) filter.Endpoint {
		return filter.Endpoint{Interface: name, Name: name, Sources: prefixes(sources...), Own: own}
	}
	if err := table.Apply(filter.Delta{
		PutEndpoints: []filter.Endpoint{endpoint("cali1", 1, "10.1.0.1/32"), endpoint("calix", 1, "10.1.0.9/32", "10.9.0.0/24")},
		Settings:     &filter.Settings{WorkloadPrefixes: []string{"cali1", "cali2"}},
	}); err != nil {
		t.Fatal(err)
	}
	neighbours := func(iface, addr string) bool {
		return strings.Contains(run(t, l.host, "ip", "-4", "neigh", "show", "dev", iface), addr+" ")
	}
	check := func(when string, want map[string]bool) {
		t.Helper()
		for who, known := range want {
			iface, addr, _ := strings.Cut(who, " ")
			l.claim(t, iface, netip.MustParseAddr(addr))
			// One that is kept for sure comes behind it.
			l.claim(t, "eth0", netip.MustParseAddr("192.0.2.250"))
			await.Until(t, when+", "+who, func() error {
				if !neighbours("eth0", "192.0.2.250") {
					return errors.New("the last is no neighbour yet")
				}
				return nil
			})
			if got := neighbours(iface, addr); got != known {
				t.Errorf("%s: %s is a neighbour: %t\n%s", when, who, got, run(t, l.host, "nft", "list", "table", "arp", "routerd"))
			}
			run(t, l.host, "ip", "neigh", "flush", "all")
		}
	}
	check("at first", map[string]bool{
		"cali1 10.1.0.1": true, "cali1 10.1.0.2": false, "cali1 10.1.0.77": false, "cali2 10.1.0.2": false,
		"calix 10.9.0.7": true, "eth0 192.0.2.1": true, "eth0 192.0.2.200": true,
	})
	if err := table.Apply(filter.Delta{PutEndpoints: []filter.Endpoint{endpoint("cali1", 1, "10.1.0.5/32"), endpoint("cali2", 1, "10.1.0.2/32")}, DelEndpoints: []string{"calix"}}); err != nil {
		t.Fatal(err)
	}
	moved := map[string]bool{"cali1 10.1.0.1": false, "cali1 10.1.0.5": true, "cali2 10.1.0.2": true}
	check("when endpoints changed", moved)
	run(t, l.host, "nft", "delete", "table", "arp", TableName)
	if err := table.Apply(filter.Delta{PutEndpoints: []filter.Endpoint{endpoint("cali2", 1, "10.1.0.3/32")}}); err != nil {
		t.Fatalf("a change after somebody deleted the table: %v", err)
	}
	check("when it was deleted", map[string]bool{"cali1 10.1.0.1": false, "cali1 10.1.0.5": true, "cali2 10.1.0.2": false, "cali2 10.1.0.3": true})
	table.Close()
	table = openTable(t, l.host, Config{Shared: true})
	rs := filter.NewRuleset()
	rs.Endpoints["cali1"], rs.Settings.WorkloadPrefixes = endpoint("cali1", 1, "10.1.0.5/32"), []string{"cali1", "cali2"}
	if err := table.Replace(rs); err != nil {
		t.Fatal(err)
	}
	check("after a restart", map[string]bool{"cali1 10.1.0.1": false, "cali1 10.1.0.5": true, "cali2 10.1.0.3": false})
}

// claim sends the host an ARP request from an address, for one that it answers for.
func (l *lab) claim(t *testing.T, iface string, sender netip.Addr) {
	t.Helper()
	b := append([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0, 0, 1, 8, 6}, 0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 0, 0, 1)
	b = append(b, sender.AsSlice()...)
	b = append(b, 0, 0, 0, 0, 0, 0)
	b = append(b, netip.MustParseAddr("198.51.100.1").AsSlice()...) // by eth1
	if err := unix.Sendto(l.packet, b, 0, &unix.SockaddrLinklayer{Ifindex: l.in[iface], Protocol: htons(unix.ETH_P_ARP)}); err != nil {
		t.Fatal(err)
	}
}

// writeAll has devices answer for all addresses, at once.
func writeAll(value string, devices ...string) error {
	for _, name := range devices {
		if err := os.WriteFile("/proc/sys/net/ipv4/conf/"+name+"/proxy_arp", []byte(value), 0o600); err != nil {
			return err
		}
		if err := os.WriteFile("/proc/sys/net/ipv4/neigh/"+name+"/proxy_delay", []byte("0"), 0o600); err != nil {
			return err
		}
	}
	return nil
}
