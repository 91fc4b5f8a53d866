package nft

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/dataplane/filter"
)

// TestDSCP: what a workload sends out of the cluster has its code point, what the host
// sends has that of the host endpoint's interface, and nothing else is touched: neither ECN
// nor, in IPv6, the flow label, nor what goes to pools and hosts. Checksums are right.
func TestDSCP(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	table := openTable(t, l.host, Config{Shared: true})
	defer table.Close()
	inside := func(id filter.SetID, nets ...string) filter.MemberChange {
		c := filter.MemberChange{Set: id}
		for _, p := range prefixes(nets...) {
			c.Add = append(c.Add, filter.Member{Prefix: p})
		}
		return c
	}
	err := table.Apply(filter.Delta{
		Settings: &filter.Settings{WorkloadPrefixes: []string{"cali"}},
		PutSets:  []filter.Set{{ID: filter.NATExempt}, {ID: filter.TunnelSources}},
		Members: []filter.MemberChange{
			inside(filter.NATExempt, "10.1.0.0/24", "fd01::/64"), inside(filter.TunnelSources, "192.0.2.130/32"),
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	allow, pass := filter.Path{Default: filter.Allow}, filter.Path{Default: filter.Pass}
	pod := func(name string, d filter.DSCP, own ...string) filter.Endpoint {
		return filter.Endpoint{Interface: name, Sources: prefixes(own...), Ingress: allow, Egress: allow, DSCP: d}
	}
	hep := func(name string, d filter.DSCP) filter.Endpoint {
		return filter.Endpoint{
			Interface: name, Host: true, Ingress: allow, Egress: allow, ForwardIngress: allow, ForwardEgress: allow,
			UntrackedIngress: pass, UntrackedEgress: pass, PreDNATIngress: pass, DSCP: d,
		}
	}
	none, ef, low, most := filter.DSCP{}, filter.DSCP{Set: true, Value: 46}, filter.DSCP{Set: true}, filter.DSCP{Set: true, Value: 63}
	const sent, ecn = 10, 1 // the code point is that of AF11
	l.class = sent<<2 | ecn

	for _, step := range []struct {
		name string
		put  []filter.Endpoint
		del  []string
		want map[string]uint8 // by the way of a packet
	}{
		{
			"a workload's",
			[]filter.Endpoint{pod("cali1", ef, "10.1.0.1/32", "fd01::1/128"), pod("cali2", none, "10.1.0.2/32", "fd01::2/128")},
			nil,
			map[string]uint8{"cali1 out": 46, "cali1 out, IPv6": 46, "cali1 host": sent, "cali1 pod": sent, "cali1 pod, IPv6": sent, "cali2 out": sent, "host out": sent, "host out, IPv6": sent},
		},
		{
			"another, the largest",
			[]filter.Endpoint{pod("cali1", most, "10.1.0.1/32", "fd01::1/128")},
			nil,
			map[string]uint8{"cali1 out": 63, "cali1 out, IPv6": 63, "cali1 host": sent, "cali1 pod": sent, "cali1 pod, IPv6": sent, "cali2 out": sent, "host out": sent, "host out, IPv6": sent},
		},
		{
			"a host endpoint's",
			[]filter.Endpoint{pod("cali1", none, "10.1.0.1/32", "fd01::1/128"), hep("eth0", ef)},
			nil,
			map[string]uint8{"cali1 out": sent, "cali1 out, IPv6": sent, "cali1 host": sent, "cali1 pod": sent, "cali1 pod, IPv6": sent, "cali2 out": sent, "host out": 46, "host out, IPv6": 46},
		},
		{
			"best effort by all other interfaces",
			[]filter.Endpoint{hep(filter.AnyInterface, low)},
			[]string{"eth0"},
			map[string]uint8{"cali1 out": sent, "cali1 out, IPv6": sent, "cali1 host": sent, "cali1 pod": sent, "cali1 pod, IPv6": sent, "cali2 out": sent, "host out": 0, "host out, IPv6": 0},
		},
		{
			"not by one with an endpoint of its own",
			[]filter.Endpoint{hep("eth0", none)},
			nil,
			map[string]uint8{"cali1 out": sent, "cali1 out, IPv6": sent, "cali1 host": sent, "cali1 pod": sent, "cali1 pod, IPv6": sent, "cali2 out": sent, "host out": sent, "host out, IPv6": sent},
		},
	} {
		if err := table.Apply(filter.Delta{PutEndpoints: step.put, DelEndpoints: step.del}); err != nil {
			t.Fatalf("%s: %v", step.name, err)
		}
		got := make(map[string]uint8)
		for way, f := range map[string]filter.Flow{
			"cali1 out":       {In: "cali1", Out: "eth0", Packet: datagram("10.1.0.1", "192.0.2.1")},
			"cali1 out, IPv6": {In: "cali1", Out: "eth0", Packet: datagram("fd01::1", "fd02::1")},
			"cali1 host":      {In: "cali1", Out: "eth0", Packet: datagram("10.1.0.1", "192.0.2.130")},
			"cali1 pod":       {In: "cali1", Out: "cali2", Packet: datagram("10.1.0.1", "10.1.0.2")},
			"cali1 pod, IPv6": {In: "cali1", Out: "cali2", Packet: datagram("fd01::1", "fd01::2")},
			"cali2 out":       {In: "cali2", Out: "eth0", Packet: datagram("10.1.0.2", "192.0.2.1")},
			"host out":        {Out: "eth0", Packet: datagram("10.1.255.1", "192.0.2.1")},
			"host out, IPv6":  {Out: "eth0", Packet: datagram("fd00::ff", "fd02::1")},
		} {
			id := l.send(t, f)
			l.collect(t, map[arrival]bool{{id, f.Out}: true})
			h := l.headers[id]
			if len(h) == 0 {
				t.Errorf("%s: %s: did not arrive", step.name, way)
				continue
			}
			class := h[1]
			if f.Packet.Src.Is6() {
				class = h[0]<<4 | h[1]>>4
				if label := h[1]&15 | h[2] | h[3]; label != 0 {
					t.Errorf("%s: %s: the flow label is %x", step.name, way, h[:4])
				}
			} else if sum(0, h) != 0xffff {
				t.Errorf("%s: %s: the header's checksum is wrong: %x", step.name, way, h)
			}
			if class&3 != ecn {
				t.Errorf("%s: %s: ECN is %d, want %d", step.name, way, class&3, ecn)
			}
			got[way] = class >> 2
		}
		if diff := cmp.Diff(step.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", step.name, diff)
		}
	}
	if err := table.Apply(filter.Delta{DelEndpoints: []string{filter.AnyInterface, "eth0", "cali1", "cali2"}}); err != nil {
		t.Fatal(err)
	}
	for name := range table.desired.chains {
		if len(name) > 4 && name[:4] == "dscp" {
			t.Errorf("the chain %s is left", name)
		}
	}
}

func datagram(src, dst string) filter.Packet {
	return filter.Packet{Src: netip.MustParseAddr(src), Dst: netip.MustParseAddr(dst), Protocol: 17, SrcPort: 7000, DstPort: 9}
}
