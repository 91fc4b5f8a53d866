package kernel

import (
	"errors"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/internal/nl"
)

// FuzzMessages feeds what cuts datagrams into messages what no kernel says.
func FuzzMessages(f *testing.F) {
	var b builder
	b.putRoute(route("10.0.0.0/8", 3), create, 77, 0, false)
	b.deleteNextHop(5)
	f.Add(b.Finish(1))
	f.Add([]byte{16, 0, 0, 0, 2, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		total := 0
		for m := range nl.Messages(b) {
			total += nl.Header + len(m.Body)
			m.Err()
		}
		if total > len(b) {
			t.Errorf("%d bytes of messages in %d", total, len(b))
		}
	})
}

// TestParsersReadWhatWeWrite holds encoders and parsers together.
func TestParsersReadWhatWeWrite(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var b builder
		bits := rapid.IntRange(0, 32).Draw(t, "bits")
		a4 := rapid.SliceOfN(rapid.Byte(), 4, 4).Draw(t, "addr")
		p := dataplane.Route{
			Prefix: pfx("0.0.0.0/0"), Table: rapid.Uint32Range(1, 1<<32-1).Draw(t, "table"), Metric: rapid.Uint32().Draw(t, "metric"),
			NextHop: dataplane.NextHopID(rapid.Uint32Range(1, 1<<32-1).Draw(t, "nh")),
		}
		p.Prefix, _ = nl.Value(a4).Addr().Prefix(bits)
		b.putRoute(p, rapid.SampledFrom([]uint16{create, replace, createReplace}).Draw(t, "flags"), 77, 0, false)
		r, ok := parseRoute(b.Message(0)[nl.Header:])
		want := fibRoute{key: p.Key().(dataplane.RouteKey), protocol: 77, typ: unix.RTN_UNICAST, nh: p.NextHop}
		if !ok || r.key != want.key || r.protocol != 77 || r.typ != want.typ || r.nh != want.nh || r.extra {
			t.Fatalf("%+v, %v; want %+v", r, ok, want)
		}
		b.Reset()
		n := dataplane.NextHop{ID: p.NextHop, Gateway: nl.Value(a4).Addr(), OnLink: rapid.Bool().Draw(t, "onlink")}
		b.putNextHop(n, false, 77, &ifLink{index: 9})
		h, ok := parseNextHop(b.Message(0)[nl.Header:])
		if !ok || h.id != n.ID || h.gateway != n.Gateway || h.link != 9 || h.protocol != 77 || (h.flags&unix.RTNH_F_ONLINK != 0) != n.OnLink {
			t.Fatalf("%+v, %v; want %+v", h, ok, n)
		}
		b.Reset()
		members := []dataplane.GroupMember{{ID: p.NextHop, Weight: rapid.IntRange(1, dataplane.MaxGroupWeight).Draw(t, "weight")}, {ID: 7, Weight: 1}}
		b.putGroup(5, members, false, 77)
		h, ok = parseNextHop(b.Message(0)[nl.Header:])
		if !ok || h.id != 5 || h.protocol != 77 || !slices.Equal(h.group, members) || h.extra {
			t.Fatalf("%+v, %v; want %+v", h, ok, members)
		}
	})
}

func TestRefusalTellsWhatTheKernelSaid(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.do(func() {
		c, err := dialConn()
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		// Three messages, of which the first and the last are refused.
		var b builder
		b.putRoute(route("10.0.0.0/8", 5), create, 77, 0, false)
		b.putRoute(dataplane.Route{Prefix: pfx("10.0.0.0/8"), Table: 254, Type: dataplane.Blackhole}, create, 77, 0, false)
		b.deleteNextHop(5)
		errs, err := c.Batch(&b.Batch, nil)
		if err != nil {
			t.Error(err)
			return
		}
		got := map[int]string{}
		for i, e := range errs {
			got[i] = e.Error()
		}
		want := map[int]string{0: "invalid argument: Nexthop id does not exist", 2: "no such file or directory"}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("refusals (-want +got):\n%s", diff)
		}
		if !errors.Is(errs[0], unix.EINVAL) {
			t.Errorf("%v is not the kernel's error number", errs[0])
		}
	})
}

func TestCanonical(t *testing.T) {
	t.Parallel()
	tests := []struct{ in, want dataplane.Object }{
		{dataplane.Route{Prefix: pfx("10.1.2.3/8"), Table: 254}, dataplane.Route{Prefix: pfx("10.0.0.0/8"), Table: 254}},
		{dataplane.Route{Prefix: pfx("fd00::1/64"), Table: 254}, dataplane.Route{Prefix: pfx("fd00::/64"), Table: 254, Metric: 1024}},
		{dataplane.Sysctl{Name: "a", Value: " 1\t2\n"}, dataplane.Sysctl{Name: "a", Value: "1 2"}},
		{dataplane.NextHop{ID: 1}, dataplane.NextHop{ID: 1}},
	}
	for _, tt := range tests {
		got := canonical(tt.in)
		if got != tt.want {
			t.Errorf("%v becomes %v; want %v", tt.in, got, tt.want)
		}
		if canonicalKey(tt.in.Key()) != got.Key() {
			t.Errorf("the key of %v becomes %v; want %v", tt.in, canonicalKey(tt.in.Key()), got.Key())
		}
	}
}

func TestSysctlLink(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{
		"net/ipv4/conf/cali1/proxy_arp":    "cali1",
		"net/ipv6/conf/eth0.5/accept_ra":   "eth0.5",
		"net/ipv4/neigh/cali1/proxy_delay": "cali1",
		"net/ipv4/conf/all/rp_filter":      "",
		"net/ipv4/conf/default/rp_filter":  "",
		"net/ipv4/ip_forward":              "",
	} {
		if got := sysctlLink(name); got != want {
			t.Errorf("%s is of %q; want %q", name, got, want)
		}
	}
}
