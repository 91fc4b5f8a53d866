package hostile

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/ns"
	"github.com/routerd/routerd/store"
)

// TestTunnelFromOutside: somebody on the underlay, who is no host of the cluster, sends
// a pod packets in VXLAN as another pod. They are taken from whom externalNodesList names,
// and from anybody by a host with policy.allowTunnelsFromAnywhere, which has the others
// as careful as they were.
func TestTunnelFromOutside(t *testing.T) {
	t.Parallel()
	top := topology(3, 1, store.VXLAN)
	top.Nodes[2].Config = map[string]any{"policy": map[string]any{"allowTunnelsFromAnywhere": true}}
	top.Underlay, top.Pool6 = lab.UnderlayDual, &lab.Pool{Encapsulation: store.VXLAN}
	l := bringUp(t, "outside", top)
	reachable(t, l)
	for _, w := range vxlanTunnels() {
		poll(t, fmt.Sprint("a host that takes them from anywhere does, ", w), func() string {
			if fromOutside(t, l, w, "node3") == 0 {
				return "none arrived"
			}
			return ""
		})
	}
	tunnelsFromOutside(t, l, vxlanTunnels())
}

// tunnel is a way in which a packet of one family is carried in one of another.
type tunnel struct {
	inner, outer dataplane.Family
	// send sends a host such a packet from a place.
	send func(t *testing.T, l *lab.Lab, from, host string, src, dst netip.Addr)
	// used says that the cluster uses it.
	used bool
}

func (w tunnel) String() string { return fmt.Sprintf("%s in %s", w.inner, w.outer) }

// vxlanTunnels are those of a cluster of both families in VXLAN.
func vxlanTunnels() (out []tunnel) {
	for _, f := range dataplane.Families() {
		out = append(out, tunnel{f, f, func(t *testing.T, l *lab.Lab, from, host string, src, dst netip.Addr) {
			t.Helper()
			tunnelled(t, l, from, host, f, src, dst)
		}, true})
	}
	return out
}

// tunnelsFromOutside sends a pod packets in tunnels as another pod, from the spine: no
// host of the cluster. They are taken from whom externalNodesList names.
func tunnelsFromOutside(t *testing.T, l *lab.Lab, tunnels []tunnel) {
	t.Helper()
	s, err := l.Store(t.Context(), "node1")
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	external := func(list ...string) {
		t.Helper()
		if _, err := store.Modify(t.Context(), s, store.ResourceKey(store.KindFelixConfiguration, store.DefaultName), func(o store.Object) (any, error) {
			f, ok := o.Value.(*v3.FelixConfiguration)
			if !ok {
				f = v3.NewFelixConfiguration()
				f.Name = store.DefaultName
			}
			f.Spec.ExternalNodesCIDRList = &list
			return f, nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	arrives := func(w tunnel) int { return fromOutside(t, l, w, "node1") }
	for _, w := range tunnels {
		if n := arrives(w); n > 0 {
			t.Errorf("%s: %d packets that came from outside reached node1's pod as from node2's", w, n)
		}
	}
	if out := output(t, l, "node1", "nft", "list", "table", "inet", "routerd"); !strings.Contains(out, "tunnel packet from outside the cluster") {
		t.Errorf("no rule says why:\n%s", out)
	}
	external(top6(t, l)...)
	for _, w := range tunnels {
		if !w.used {
			continue
		}
		poll(t, fmt.Sprint("those of externalNodesList arrive, ", w), func() string {
			if arrives(w) == 0 {
				return "none did: the test tests nothing"
			}
			return ""
		})
	}
	external()
	for _, w := range tunnels {
		poll(t, fmt.Sprint("without it none does again, ", w), func() string {
			if n := arrives(w); n > 0 {
				return fmt.Sprint(n, " did")
			}
			return ""
		})
	}
}

// fromOutside sends a host's pod some packets as node2's, from the spine, and says how many
// arrived.
func fromOutside(t *testing.T, l *lab.Lab, w tunnel, host string) int {
	t.Helper()
	const forged = "node2/pod1"
	victim := host + "/pod1"
	src, dst := addrOf(t, l, forged, w.inner), addrOf(t, l, victim, w.inner)
	heard, err := l.Capture(victim, "eth0", func(p lab.Packet) bool { return p.Outer.Src == src && p.Outer.Proto == experimental })
	if err != nil {
		t.Fatal(err)
	}
	for range 5 {
		w.send(t, l, "spine", host, src, dst)
	}
	// What was sent before has been judged by then.
	if r, err := l.Output(await.Context(t), forged, "ping", "-c", "2", "-i", "0.2", dst.String()); err != nil {
		t.Errorf("the cluster's own tunnel: %v\n%s", err, r)
	}
	return len(heard.Stop())
}

// top6 lists the networks of the lab's racks, in both families.
func top6(t *testing.T, l *lab.Lab) (list []string) {
	t.Helper()
	for _, f := range dataplane.Families() {
		p, err := addrOf(t, l, "node1", f).Prefix(map[dataplane.Family]int{dataplane.IPv4: 24, dataplane.IPv6: 64}[f])
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, p.String())
	}
	return list
}

func addrOf(t *testing.T, l *lab.Lab, where string, f dataplane.Family) netip.Addr {
	t.Helper()
	a, err := l.AddrOf(where, f)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// experimental is an IP protocol without a checksum (RFC 3692).
const experimental = 253

// tunnelled sends a host a packet in VXLAN, over the family of the packet inside.
func tunnelled(t *testing.T, l *lab.Lab, from, host string, f dataplane.Family, src, dst netip.Addr) {
	t.Helper()
	mac := vtepMAC(t, l, host, f)
	b := binary.BigEndian.AppendUint32(nil, 0x08000000)
	b = binary.BigEndian.AppendUint32(b, store.DefaultVXLANVNI<<8)
	b = append(append(b, mac...), 2, 0, 0, 0, 0, 66)
	b = append(b, inside(src, dst)...)
	var c net.Conn
	to := net.JoinHostPort(addrOf(t, l, host, f).String(), fmt.Sprint(store.DefaultVXLANPort))
	if err := ns.Do(l.Space(from), func() (err error) { c, err = net.DialTimeout("udp", to, time.Second); return err }); err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write(b); err != nil {
		t.Fatal(err)
	}
}

// vtepMAC returns the MAC of a host's VXLAN device of a family.
func vtepMAC(t *testing.T, l *lab.Lab, host string, f dataplane.Family) (mac net.HardwareAddr) {
	t.Helper()
	device := map[dataplane.Family]string{dataplane.IPv4: "vxlan.calico", dataplane.IPv6: "vxlan-v6.calico"}[f]
	if err := ns.Do(l.Space(host), func() error {
		i, err := net.InterfaceByName(device)
		if err == nil {
			mac = i.HardwareAddr
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return mac
}

// inside is an Ethernet type and an IP packet.
func inside(src, dst netip.Addr) []byte {
	body := []byte("hostile!")
	if src.Is6() {
		b := append([]byte{0x86, 0xdd, 0x60, 0, 0, 0, 0, byte(len(body)), experimental, 64}, src.AsSlice()...)
		return append(append(b, dst.AsSlice()...), body...)
	}
	h := append([]byte{0x45, 0, 0, byte(20 + len(body)), 0, 0, 0, 0, 64, experimental, 0, 0}, src.AsSlice()...)
	h = append(h, dst.AsSlice()...)
	binary.BigEndian.PutUint16(h[10:], checksum(h))
	return append(append([]byte{8, 0}, h...), body...)
}
