package nft

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/dataplane/internal/nl"
	"github.com/routerd/routerd/dataplane/workload/netnstest"
	"github.com/routerd/routerd/integration/await"
)

// lab is a host that forwards and, in another namespace, the other ends of its
// wires, where packets are made by hand and taken as they come.
//
//	wires ══ cali1, cali2, cali3, calix, eth0, eth1 ══ host (10.1.255.1, fd00::ff)
type lab struct {
	host, wires *netnstest.Netns
	in          map[string]int // interfaces on the wires' side, by the host's name
	names       map[int]string
	mac         map[string]net.HardwareAddr // of the host's side
	packet      int                         // AF_PACKET on the wires
	local       []int                       // raw sockets of the host
	out4, out6  int
	tracker     *nl.Conn // to the host's connection tracking
	next        uint32
	class       byte                      // code point and ECN of what is sent
	resent      bool                      // some packets were sent more than once
	sources     map[uint32]netip.AddrPort // with which packets came, by their numbers
	headers     map[uint32][]byte         // and their headers of IP
	seen        map[arrival]bool
}

// arrival is a packet that came somewhere: to an interface of the wires, or,
// with "", to the host.
type arrival struct {
	id    uint32
	where string
}

var (
	interfaces = []string{"cali1", "cali2", "cali3", "calix", "eth0", "eth1"} //nolint:gochecknoglobals // a constant
	protocols  = []int{1, 4, 6, 17, 41, 58, 99, 132, 136}                     //nolint:gochecknoglobals // a constant
)

// addrs lists addresses that are reached by an interface; "": the host's own.
func addrs(iface string) []netip.Addr {
	var list []netip.Addr
	for _, s := range map[string][]string{
		"cali1": {"10.1.0.1", "fd01::1"},
		"cali2": {"10.1.0.2", "fd01::2"},
		"cali3": {"10.1.0.3", "10.9.0.7", "fd01::3"},
		"calix": {"10.1.0.9", "fd01::9"},
		"eth0":  {"192.0.2.1", "192.0.2.130", "fd02::1"},
		"eth1":  {"198.51.100.1", "fd03::1"},
		"":      {"10.1.255.1", "fd00::ff"},
	}[iface] {
		list = append(list, netip.MustParseAddr(s))
	}
	return list
}

func newLab(t testing.TB) *lab {
	t.Helper()
	l := &lab{
		host: netnstest.New(t), wires: netnstest.New(t), in: make(map[string]int), names: make(map[int]string),
		mac: make(map[string]net.HardwareAddr), seen: make(map[arrival]bool), sources: make(map[uint32]netip.AddrPort), headers: make(map[uint32][]byte),
	}
	var cmds []string
	for _, name := range interfaces {
		cmds = append(cmds, "link add "+name+" type veth peer name "+name+" netns "+l.wires.Path, "link set "+name+" arp off up")
	}
	cmds = append(cmds, "link set lo up")
	for _, a := range addrs("") {
		cmds = append(cmds, fmt.Sprintf("addr add %s/%d dev lo", a, a.BitLen()))
	}
	for _, name := range interfaces {
		for _, a := range addrs(name) {
			cmds = append(cmds, fmt.Sprintf("route add %s/%d dev %s", a, a.BitLen(), name))
		}
	}
	ip(t, l.wires, "link set lo up")
	// Where connection tracking is a module, this loads it.
	run(t, l.host, "nft", "add table ip x; add chain ip x y; add rule ip x y ct state new; delete table ip x")
	err := l.host.Do(func() error {
		for _, f := range []string{"ipv4/conf/all/rp_filter", "ipv4/conf/default/rp_filter"} {
			if err := os.WriteFile("/proc/sys/net/"+f, []byte("0"), 0o644); err != nil {
				return err
			}
		}
		for _, f := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding"} {
			if err := os.WriteFile("/proc/sys/net/"+f, []byte("1"), 0o644); err != nil {
				return err
			}
		}
		// The kernel checks UDP-Lite's checksum as if it were UDP's, and so finds all
		// of its packets invalid.
		return os.WriteFile("/proc/sys/net/netfilter/nf_conntrack_checksum", []byte("0"), 0o644)
	})
	if err != nil {
		t.Fatal(err)
	}
	ip(t, l.host, cmds...)
	cmds = nil
	for _, name := range interfaces {
		cmds = append(cmds, "link set "+name+" up")
	}
	ip(t, l.wires, cmds...)
	// The kernel makes the route to an IPv6 address of the host in a worker, later: a packet
	// that is faster is not for the host.
	await.Until(t, "the host has its addresses", func() error {
		if left := run(t, l.host, "ip", "-6", "-o", "addr", "show", "dev", "lo", "tentative"); left != "" {
			return errors.New(left)
		}
		return nil
	})
	l.sockets(t)
	return l
}

func ip(t testing.TB, n *netnstest.Netns, lines ...string) {
	t.Helper()
	err := n.Do(func() error {
		cmd := exec.Command("ip", "-batch", "-")
		cmd.Stdin = strings.NewReader(strings.Join(lines, "\n"))
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func htons(v uint16) uint16 { return v<<8 | v>>8 }

func (l *lab) sockets(t testing.TB) {
	t.Helper()
	socket := func(family, kind, proto int) int {
		fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, proto)
		if err != nil {
			t.Fatalf("socket %d %d %d: %v", family, kind, proto, err)
		}
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 16<<20); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		return fd
	}
	err := l.wires.Do(func() error {
		l.packet = socket(unix.AF_PACKET, unix.SOCK_RAW, int(htons(unix.ETH_P_ALL)))
		for _, name := range interfaces {
			i, err := net.InterfaceByName(name)
			if err != nil {
				return err
			}
			l.in[name], l.names[i.Index] = i.Index, name
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	err = l.host.Do(func() (err error) {
		if l.tracker, err = nl.Dial(unix.NETLINK_NETFILTER, 0, 0); err != nil {
			return err
		}
		t.Cleanup(func() { l.tracker.Close() })
		for _, p := range protocols {
			for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
				l.local = append(l.local, socket(family, unix.SOCK_RAW, p))
			}
		}
		l.out4, l.out6 = socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_RAW), socket(unix.AF_INET6, unix.SOCK_RAW, unix.IPPROTO_RAW)
		for _, name := range interfaces {
			i, err := net.InterfaceByName(name)
			if err != nil {
				return err
			}
			l.mac[name] = i.HardwareAddr
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// send sends a packet and returns its number.
func (l *lab) send(t testing.TB, f filter.Flow) uint32 {
	t.Helper()
	l.next++
	b := frame(f.Packet, l.next)
	l.classify(b)
	var err error
	switch {
	case f.In != "":
		eth := append(append([]byte(nil), l.mac[f.In]...), 2, 0, 0, 0, 0, 1)
		kind := uint16(unix.ETH_P_IP)
		if f.Packet.Src.Is6() {
			kind = unix.ETH_P_IPV6
		}
		eth = binary.BigEndian.AppendUint16(eth, kind)
		err = unix.Sendto(l.packet, append(eth, b...), 0, &unix.SockaddrLinklayer{Ifindex: l.in[f.In], Protocol: htons(kind)})
	case f.Packet.Dst.Is4():
		err = unix.Sendto(l.out4, b, 0, &unix.SockaddrInet4{Addr: f.Packet.Dst.As4()})
	default:
		err = unix.Sendto(l.out6, b, 0, &unix.SockaddrInet6{Addr: f.Packet.Dst.As16()})
	}
	// A packet that the output hook drops is refused.
	if err != nil && (f.In != "" || err != unix.EPERM && err != unix.ECONNREFUSED) {
		t.Fatalf("send %+v: %v", f, err)
	}
	return l.next
}

// classify writes the code point and ECN.
func (l *lab) classify(b []byte) {
	if b[0]>>4 == 6 {
		b[0], b[1] = b[0]|l.class>>4, l.class<<4
		return
	}
	b[1], b[10], b[11] = l.class, 0, 0
	binary.BigEndian.PutUint16(b[10:], ^sum(0, b[:20]))
}

// collect reads what arrived until all of want did, which on an idle machine
// is at once: packets cross a host within one system call.
func (l *lab) collect(t testing.TB, want map[arrival]bool) {
	t.Helper()
	deadline := time.Now().Add(3 * time.Second)
	for {
		l.drain(t)
		missing := 0
		for a := range want {
			if !l.seen[a] {
				missing++
			}
		}
		if missing == 0 || time.Now().After(deadline) {
			return
		}
		fds := []unix.PollFd{{Fd: int32(l.packet), Events: unix.POLLIN}}
		for _, fd := range l.local {
			fds = append(fds, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN})
		}
		if _, err := unix.Poll(fds, 100); err != nil && err != unix.EINTR {
			t.Fatal(err)
		}
	}
}

func (l *lab) drain(t testing.TB) {
	t.Helper()
	buf := make([]byte, 4096)
	for {
		n, from, err := unix.Recvfrom(l.packet, buf, 0)
		if err == unix.EAGAIN {
			break
		}
		if err != nil && err != unix.EINTR {
			t.Fatal(err)
		}
		if ll, ok := from.(*unix.SockaddrLinklayer); ok && ll.Pkttype != unix.PACKET_OUTGOING && n > 14 {
			if id, ok := parseProbe(buf[14:n]); ok {
				l.seen[arrival{id, l.names[ll.Ifindex]}] = true
				l.sources[id] = sourceOf(buf[14:n])
				l.headers[id] = bytes.Clone(buf[14:34])
			}
		}
	}
	for i, fd := range l.local {
		for {
			n, _, err := unix.Recvfrom(fd, buf, 0)
			if err != nil {
				break
			}
			b := buf[:n]
			if i%2 == 1 { // IPv6 comes without its header
				b = append(make([]byte, 40), b...)
				b[0], b[6] = 0x60, byte(protocols[i/2])
			}
			if id, ok := parseProbe(b); ok {
				l.seen[arrival{id, ""}] = true
			}
		}
	}
}

func sourceOf(b []byte) netip.AddrPort {
	at, addr := 20, netip.AddrFrom4([4]byte(b[12:16]))
	if b[0]>>4 == 6 {
		at, addr = 40, netip.AddrFrom16([16]byte(b[8:24]))
	}
	return netip.AddrPortFrom(addr, binary.BigEndian.Uint16(b[at:]))
}

// magic begins with a byte that makes data of it where VXLAN has its flags.
const magic = "in a probe of routerd, number "

// frame makes an IP packet that carries a number.
func frame(p filter.Packet, id uint32) []byte {
	body := binary.BigEndian.AppendUint32([]byte(magic), id)
	var head []byte
	sumAt := -1
	switch p.Protocol {
	case 1, 58:
		head = []byte{p.ICMPType, p.ICMPCode, 0, 0, byte(id >> 8), byte(id), 0, 1}
		sumAt = 2
		if p.ICMPType == 13 { // timestamps
			body = append(make([]byte, 12), body...)
		}
		if p.ICMPType == 135 {
			head = append(head, make([]byte, 16)...)
		}
	case 6:
		head = binary.BigEndian.AppendUint16(nil, p.SrcPort)
		head = binary.BigEndian.AppendUint16(head, p.DstPort)
		head = append(head, 0, 0, 0, 1, 0, 0, 0, 0, 5<<4, 2, 0x10, 0, 0, 0, 0, 0)
		sumAt = 16
	case 17, 136:
		head = binary.BigEndian.AppendUint16(nil, p.SrcPort)
		head = binary.BigEndian.AppendUint16(head, p.DstPort)
		length := uint16(8 + len(body))
		if p.Protocol == 136 {
			length = 0 // the checksum covers all (RFC 3828)
		}
		head = binary.BigEndian.AppendUint16(head, length)
		head = append(head, 0, 0)
		sumAt = 6
	}
	l4 := append(head, body...)
	if sumAt >= 0 {
		binary.BigEndian.PutUint16(l4[sumAt:], ^sum(pseudo(p, len(l4)), l4))
	}
	if p.Src.Is6() {
		h := []byte{0x60, 0, 0, 0, byte(len(l4) >> 8), byte(len(l4)), p.Protocol, 255}
		h = append(append(h, p.Src.AsSlice()...), p.Dst.AsSlice()...)
		return append(h, l4...)
	}
	n := 20 + len(l4)
	h := []byte{0x45, 0, byte(n >> 8), byte(n), byte(id >> 8), byte(id), 0, 0, 64, p.Protocol, 0, 0}
	h = append(append(h, p.Src.AsSlice()...), p.Dst.AsSlice()...)
	binary.BigEndian.PutUint16(h[10:], ^sum(0, h))
	return append(h, l4...)
}

func pseudo(p filter.Packet, n int) uint32 {
	if p.Protocol == 1 {
		return 0
	}
	b := append(p.Src.AsSlice(), p.Dst.AsSlice()...)
	return uint32(sum(0, append(b, 0, p.Protocol, byte(n>>8), byte(n))))
}

func sum(start uint32, b []byte) uint16 {
	s := start
	for i := 0; i+1 < len(b); i += 2 {
		s += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	if len(b)%2 == 1 {
		s += uint32(b[len(b)-1]) << 8
	}
	for s > 0xffff {
		s = s>>16 + s&0xffff
	}
	return uint16(s)
}

// parseProbe returns the number of a packet that frame made. Answers of the
// host's own, which may quote it, are not taken for it.
func parseProbe(b []byte) (uint32, bool) {
	if len(b) < 40 {
		return 0, false
	}
	at, proto := int(b[0]&15)*4, b[9]
	if b[0]>>4 == 6 {
		at, proto = 40, b[6]
	}
	skip := map[byte]int{1: 8, 58: 8, 6: 20, 17: 8, 136: 8}[proto]
	switch {
	case len(b) <= at:
		return 0, false
	case proto == 1 && b[at] == 13:
		skip += 12
	case proto == 58 && b[at] == 135:
		skip += 16
	case proto == 1 && (b[at] == 0 || b[at] == 14), proto == 58 && b[at] == 129:
		return 0, false
	}
	if at += skip; len(b) < at+len(magic)+4 || string(b[at:at+len(magic)]) != magic {
		return 0, false
	}
	return binary.BigEndian.Uint32(b[at+len(magic):]), true
}

// forget empties the host's table of connections.
func (l *lab) forget(t testing.TB) {
	t.Helper()
	const deleteAll = unix.NFNL_SUBSYS_CTNETLINK<<8 | 2 // IPCTNL_MSG_CT_DELETE
	var b nl.Batch
	b.Begin(deleteAll, 0, unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, 0)
	if err := l.tracker.Do(&b, nil); err != nil {
		t.Fatalf("forget connections: %v", err)
	}
}

// try sends flows and returns which of them arrived. What should have arrived
// and did not is sent again: on a machine with much else to do the queues
// between namespaces overflow.
func (l *lab) try(t testing.TB, flows []filter.Flow, expect func(filter.Flow) bool) []bool {
	t.Helper()
	got := make([]bool, len(flows))
	for range 3 {
		ids := make([]arrival, len(flows))
		want := make(map[arrival]bool)
		missing := 0
		for i, f := range flows {
			if got[i] {
				continue
			}
			ids[i] = arrival{l.send(t, f), f.Out}
			if expect(f) {
				want[ids[i]] = true
			}
		}
		l.collect(t, want)
		for i, a := range ids {
			got[i] = got[i] || l.seen[a]
			if !got[i] && expect(flows[i]) {
				missing++
			}
		}
		if missing == 0 {
			break
		}
		l.resent = true
	}
	return got
}
