package nft

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	nlmsg "github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane/filter"
)

// TestVirtual: what IPVS passes on to a workload leaves the host by its local output, with the source
// of another, and the workload's policies judge it; what the host sends itself is let be.
func TestVirtual(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	table := openTable(t, l.host, Config{})
	defer table.Close()
	allow, deny := filter.Path{Default: filter.Allow}, filter.Path{Default: filter.Deny}
	pod := func(ingress filter.Path) []filter.Endpoint {
		return []filter.Endpoint{{Interface: "cali1", Sources: prefixes("10.1.0.1/32", "fd01::1/128"), Ingress: ingress, Egress: allow}}
	}
	port := uint16(1000)
	for _, step := range []struct {
		virtual bool
		ingress filter.Path
		others  bool // another's packets arrive
	}{
		{false, allow, true},
		{false, deny, true}, // and none come: there is no IPVS
		{true, deny, false},
		{true, allow, true},
		{false, deny, true},
	} {
		err := table.Apply(filter.Delta{Settings: &filter.Settings{WorkloadPrefixes: []string{"cali"}, Virtual: step.virtual}, PutEndpoints: pod(step.ingress)})
		if err != nil {
			t.Fatal(err)
		}
		for _, tt := range []struct {
			src, dst, out string
			arrives       bool
		}{
			{"192.0.2.1", "10.1.0.1", "cali1", step.others},
			{"fd02::1", "fd01::1", "cali1", step.others},
			{"10.1.0.2", "10.1.0.1", "cali1", step.others},
			{"10.1.255.1", "10.1.0.1", "cali1", true},
			{"fd00::ff", "fd01::1", "cali1", true},
			{"10.1.0.2", "192.0.2.1", "eth0", true},
			{"10.1.0.2", "10.1.0.2", "cali2", !step.virtual}, // there is no endpoint
		} {
			port++
			f := filter.Flow{Out: tt.out, Packet: filter.Packet{Src: netip.MustParseAddr(tt.src), Dst: netip.MustParseAddr(tt.dst), Protocol: 17, SrcPort: port, DstPort: 80}}
			what := fmt.Sprintf("virtual %t, ingress %v: from %s to %s", step.virtual, step.ingress.Default, tt.src, tt.dst)
			if got := l.try(t, []filter.Flow{f}, func(filter.Flow) bool { return tt.arrives }); got[0] != tt.arrives {
				t.Errorf("%s arrives: %t, want %t", what, got[0], tt.arrives)
			}
		}
	}
}

// TestIPVS has the kernel's IPVS balance a Service as kube-proxy has it in its mode ipvs: the
// policies of the workload behind it hold for others' packets to the Service.
func TestIPVS(t *testing.T) {
	t.Parallel()
	if os.Getenv("ROUTERD_STAGE") != "vm" {
		t.Skip("not every kernel has IPVS: the virtual machine's stage runs this")
	}
	l := newLab(t)
	ip(t, l.host, "link add kube-ipvs0 type dummy", "addr add 10.96.0.10/32 dev kube-ipvs0")
	ipvs(t, l)
	table := openTable(t, l.host, Config{})
	defer table.Close()
	allow, deny := filter.Path{Default: filter.Allow}, filter.Path{Default: filter.Deny}
	port := uint16(2000)
	for _, step := range []struct {
		virtual         bool
		ingress, egress filter.Path
		arrives         bool
	}{
		{true, allow, allow, true},
		{true, deny, allow, false},
		{true, allow, deny, false},
		{false, deny, allow, true}, // what there is the setting for
	} {
		err := table.Apply(filter.Delta{
			Settings: &filter.Settings{WorkloadPrefixes: []string{"cali"}, WorkloadToHost: filter.HostReturn, Virtual: step.virtual},
			PutEndpoints: []filter.Endpoint{
				{Interface: "cali1", Sources: prefixes("10.1.0.1/32"), Ingress: step.ingress, Egress: allow},
				{Interface: "cali2", Sources: prefixes("10.1.0.2/32"), Ingress: allow, Egress: step.egress},
			},
		})
		if err != nil {
			t.Fatal(err)
		}
		for _, from := range []struct{ iface, src string }{{"cali2", "10.1.0.2"}, {"eth0", "192.0.2.1"}} {
			port++
			arrives := step.arrives || from.iface == "eth0" && step.egress.Default == filter.Deny
			f := filter.Flow{In: from.iface, Out: "cali1", Packet: filter.Packet{
				Src: netip.MustParseAddr(from.src), Dst: netip.MustParseAddr("10.96.0.10"), Protocol: unix.IPPROTO_UDP, SrcPort: port, DstPort: 80,
			}}
			if got := l.try(t, []filter.Flow{f}, func(filter.Flow) bool { return arrives }); got[0] != arrives {
				t.Errorf("virtual %t, ingress %v, egress %v: from %s arrives: %t, want %t", step.virtual, step.ingress.Default, step.egress.Default, from.src, got[0], arrives)
			}
		}
	}
}

// genl is the header of generic netlink's messages.
type genl [4]byte

func (genl) Len() int            { return 4 }
func (g genl) Serialize() []byte { return g[:] }

// ipvs has UDP to 10.96.0.10:80 go to cali1's address (linux/ip_vs.h).
func ipvs(t *testing.T, l *lab) {
	t.Helper()
	const (
		newService, newDest        = 1, 5
		service, dest              = 1 | unix.NLA_F_NESTED, 2 | unix.NLA_F_NESTED
		family, protocol, addr     = 1, 2, 3
		svcPort, sched, flags      = 4, 6, 7
		timeout, netmask           = 8, 9
		dstAddr, dstPort, forward  = 1, 2, 3
		weight, upper, lower, kind = 4, 5, 6, 11
	)
	native16, native32 := binary.NativeEndian.AppendUint16, binary.NativeEndian.AppendUint32
	address := func(s string) []byte {
		b := make([]byte, 16)
		copy(b, netip.MustParseAddr(s).AsSlice())
		return b
	}
	port := []byte{0, 80}
	err := l.host.Do(func() error {
		f, err := netlink.GenlFamilyGet("IPVS") // which loads the module
		if err != nil {
			return fmt.Errorf("IPVS: %w", err)
		}
		if err := os.WriteFile("/proc/sys/net/ipv4/vs/conntrack", []byte("1"), 0o644); err != nil {
			return err
		}
		for _, cmd := range []byte{newService, newDest} {
			req := nlmsg.NewNetlinkRequest(int(f.ID), unix.NLM_F_ACK)
			req.AddData(genl{cmd, 1})
			svc := nlmsg.NewRtAttr(service, nil)
			svc.AddRtAttr(family, native16(nil, unix.AF_INET))
			svc.AddRtAttr(protocol, native16(nil, unix.IPPROTO_UDP))
			svc.AddRtAttr(addr, address("10.96.0.10"))
			svc.AddRtAttr(svcPort, port)
			svc.AddRtAttr(sched, nlmsg.ZeroTerminated("rr"))
			svc.AddRtAttr(flags, slices.Concat(native32(nil, 0), native32(nil, 1<<32-1)))
			svc.AddRtAttr(timeout, native32(nil, 0))
			svc.AddRtAttr(netmask, []byte{255, 255, 255, 255})
			req.AddData(svc)
			if cmd == newDest {
				d := nlmsg.NewRtAttr(dest, nil)
				d.AddRtAttr(dstAddr, address("10.1.0.1"))
				d.AddRtAttr(dstPort, port)
				d.AddRtAttr(forward, native32(nil, 0)) // translated
				d.AddRtAttr(weight, native32(nil, 1))
				d.AddRtAttr(upper, native32(nil, 0))
				d.AddRtAttr(lower, native32(nil, 0))
				d.AddRtAttr(kind, native16(nil, unix.AF_INET))
				req.AddData(d)
			}
			if _, err := req.Execute(unix.NETLINK_GENERIC, 0); err != nil {
				return fmt.Errorf("IPVS command %d: %w", cmd, err)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
