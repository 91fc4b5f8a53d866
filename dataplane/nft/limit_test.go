package nft

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane/filter"
)

// TestLimits: of what a workload sends and receives at once, what is beyond its limits is
// dropped, and of no other workload anything; limits that change count anew, and those
// that are taken away leave nothing.
func TestLimits(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	table := openTable(t, l.host, Config{Shared: true})
	defer table.Close()
	if err := table.Apply(filter.Delta{Settings: &filter.Settings{WorkloadPrefixes: []string{"cali"}}}); err != nil {
		t.Fatal(err)
	}
	const sent, size = 20, 8 + 92 // with its header of IP, 120 bytes
	body := make([]byte, size)
	binary.BigEndian.PutUint16(body, 7000)
	binary.BigEndian.PutUint16(body[2:], 9)
	binary.BigEndian.PutUint16(body[4:], size)
	egress := func(iface, addr string) {
		for range sent {
			l.raw(t, iface, netip.MustParseAddr(addr), 17, body)
		}
	}
	ingress := func(addr string, connections int) {
		t.Helper()
		err := l.host.Do(func() error {
			for range connections {
				c, err := (&net.Dialer{}).DialContext(t.Context(), "udp", netip.AddrPortFrom(netip.MustParseAddr(addr), 9).String())
				if err != nil {
					return err
				}
				for range sent / connections {
					// Of what is dropped the host's own programs are told.
					if _, err := c.Write(body[8:]); err != nil && !errors.Is(err, unix.EPERM) {
						return err
					}
				}
				if err := c.Close(); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		name   string
		limits filter.Limits
		send   func()
		passed int // of those sent at once; one more for each second that a slow machine takes
		// Two fewer are right too: what the kernel itself sends of IPv6 to the device when that
		// comes up counts.
	}{
		{"none", filter.Limits{}, func() { egress("cali1", "10.1.0.1"); ingress("10.1.0.1", 1) }, sent},
		{"packets sent", filter.Limits{Egress: filter.Limit{Packets: 1, PacketBurst: 5}}, func() { egress("cali1", "10.1.0.1") }, 5},
		{"packets received", filter.Limits{Ingress: filter.Limit{Packets: 1, PacketBurst: 7}}, func() { ingress("10.1.0.1", 1) }, 7},
		{"another's", filter.Limits{Egress: filter.Limit{Packets: 1, PacketBurst: 5}}, func() { egress("cali2", "10.1.0.2"); ingress("10.1.0.1", 1) }, sent},
		{"bytes sent", filter.Limits{Egress: filter.Limit{Bandwidth: 60, Burst: 300}}, func() { egress("cali1", "10.1.0.1") }, 3},
		{"bytes received", filter.Limits{Ingress: filter.Limit{Bandwidth: 60, Burst: 600}}, func() { ingress("10.1.0.1", 1) }, 5},
		{"bytes at the peak", filter.Limits{Ingress: filter.Limit{Bandwidth: 60, Burst: 1 << 20, Peak: 100, PeakBurst: 500}}, func() { ingress("10.1.0.1", 1) }, 5},
		{"connections opened to it", filter.Limits{Ingress: filter.Limit{Connections: 4}}, func() { ingress("10.1.0.1", sent) }, 4},
		{"connections in the other direction", filter.Limits{Egress: filter.Limit{Connections: 4}}, func() { ingress("10.1.0.1", sent) }, sent},
		{"more than the kernel counts", filter.Limits{Egress: filter.Limit{Bandwidth: 125e12, Burst: 1<<32 - 1}}, func() { egress("cali1", "10.1.0.1") }, sent},
	} {
		e := filter.Endpoint{Interface: "cali1", Sources: prefixes("10.1.0.1/32"), Limits: tt.limits}
		other := filter.Endpoint{Interface: "cali2", Sources: prefixes("10.1.0.2/32")}
		if err := table.Apply(filter.Delta{PutEndpoints: []filter.Endpoint{e, other}}); err != nil {
			t.Fatalf("%s: %v", tt.name, err)
		}
		before := l.dropped(t, table, filter.ByLimit)
		tt.send()
		if got := sent - (l.dropped(t, table, filter.ByLimit) - before); got < tt.passed-2 || got > tt.passed+5 || tt.passed == sent && got != sent {
			t.Errorf("%s: %d of %d passed, want %d", tt.name, got, sent, tt.passed)
		}
	}
	if err := table.Apply(filter.Delta{DelEndpoints: []string{"cali1", "cali2"}}); err != nil {
		t.Fatal(err)
	}
	for name := range table.desired.chains {
		if len(name) > 5 && name[:5] == "limit" {
			t.Errorf("the chain %s is left", name)
		}
	}
}
