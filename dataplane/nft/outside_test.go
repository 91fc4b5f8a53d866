package nft

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/integration/await"
)

// TestOutside: what looks like a tunnel's data is dropped unless a host of the cluster
// sent it, by the outer source, before connection tracking has a word; probes come
// through from everywhere.
func TestOutside(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	table := openTable(t, l.host, Config{Shared: true})
	defer table.Close()
	err := table.Apply(filter.Delta{
		PutSets: []filter.Set{{ID: filter.TunnelSources}},
		Members: []filter.MemberChange{{Set: filter.TunnelSources, Add: netMembers("192.0.2.1/32", "fd02::1/128")}},
		Settings: &filter.Settings{
			WorkloadPrefixes: []string{"cali"}, Tunnels: []filter.Tunnel{{Protocol: 4}, {Protocol: 17, Port: 4789}, {Protocol: 41}},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	vxlan := func(flags byte) []byte {
		b := binary.BigEndian.AppendUint16(nil, 50000)
		b = binary.BigEndian.AppendUint16(b, 4789)
		b = append(b, 0, 16, 0, 0) // without a checksum, which the host does not ask for before the rules
		return append(b, flags, 0, 0, 0, 0, 16, 0, 0)
	}
	ipip := func(dst [4]byte) []byte {
		b := append([]byte{0x45, 0, 0, 20, 0, 0, 0, 0, 1, 17, 0, 0, 192, 0, 2, 0}, dst[:]...)
		return b
	}
	for _, tt := range []struct {
		name, src string
		protocol  byte
		body      []byte
		dropped   int
	}{
		{"VXLAN of a host", "192.0.2.1", 17, vxlan(0x08), 0},
		{"VXLAN from elsewhere", "192.0.2.130", 17, vxlan(0x08), 1},
		{"VXLAN with other flags beside it", "192.0.2.130", 17, vxlan(0x88), 1},
		{"VXLAN without a VNI is a probe", "192.0.2.130", 17, vxlan(0), 0},
		{"VXLAN over IPv6 from elsewhere", "fd02::66", 17, vxlan(0x08), 1},
		{"a probe over IPv6", "fd02::66", 17, vxlan(0), 0},
		{"IPIP of a host", "192.0.2.1", 4, ipip([4]byte{10, 1, 0, 1}), 0},
		{"IPIP from elsewhere", "192.0.2.130", 4, ipip([4]byte{10, 1, 0, 1}), 1},
		{"IPIP to the probes' group", "192.0.2.130", 4, ipip([4]byte{233, 252, 0, 77}), 0},
		{"IPv4 in IPv6 from elsewhere", "fd02::66", 4, ipip([4]byte{10, 1, 0, 1}), 1},
		{"IPv6 in IPv6 of a host", "fd02::1", 41, make([]byte, 40), 0},
		{"IPv6 in IPv6 from elsewhere", "fd02::66", 41, make([]byte, 40), 1},
		{"IPv6 in IPv4 is somebody else's tunnel", "192.0.2.130", 41, make([]byte, 40), 0},
		{"a packet too short to be one", "192.0.2.130", 4, []byte{0x45}, 1},
	} {
		before := l.dropped(t, table, filter.ByOutside)
		l.raw(t, "eth0", netip.MustParseAddr(tt.src), tt.protocol, tt.body)
		// One that is dropped for sure comes behind it.
		l.raw(t, "eth0", netip.MustParseAddr("192.0.2.130"), 4, ipip([4]byte{10, 1, 0, 1}))
		await.Until(t, tt.name, func() error {
			if got := l.dropped(t, table, filter.ByOutside) - before; got != tt.dropped+1 {
				return fmt.Errorf("%d dropped, want %d", got, tt.dropped+1)
			}
			return nil
		})
	}
}

// dropped returns how many packets were dropped for a reason.
func (l *lab) dropped(t *testing.T, table *Table, why filter.Reason) (n int) {
	t.Helper()
	counters, err := table.Counters()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range counters {
		if c.Reason == why {
			n += int(c.Packets)
		}
	}
	return n
}

// raw sends the host a packet by an interface.
func (l *lab) raw(t *testing.T, iface string, src netip.Addr, protocol byte, body []byte) {
	t.Helper()
	var h []byte
	kind := uint16(unix.ETH_P_IP)
	if src.Is6() {
		kind = unix.ETH_P_IPV6
		h = append([]byte{0x60, 0, 0, 0, 0, byte(len(body)), protocol, 64}, src.AsSlice()...)
		h = append(h, netip.MustParseAddr("fd00::ff").AsSlice()...)
	} else {
		h = append([]byte{0x45, 0, 0, byte(20 + len(body)), 0, 0, 0, 0, 64, protocol, 0, 0}, src.AsSlice()...)
		h = append(h, netip.MustParseAddr("10.1.255.1").AsSlice()...)
		binary.BigEndian.PutUint16(h[10:], ^sum(0, h))
	}
	eth := append(append([]byte(nil), l.mac[iface]...), 2, 0, 0, 0, 0, 1)
	eth = binary.BigEndian.AppendUint16(eth, kind)
	if err := unix.Sendto(l.packet, append(append(eth, h...), body...), 0, &unix.SockaddrLinklayer{Ifindex: l.in[iface], Protocol: htons(kind)}); err != nil {
		t.Fatal(fmt.Errorf("send from %s: %w", src, err))
	}
}
