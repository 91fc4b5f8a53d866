package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/dataplane/nft"
	"github.com/routerd/routerd/integration/lab/ns"
)

// underWhat is what both hosts of a stream judge packets by.
type underWhat uint8

const (
	noRules underWhat = iota
	oneRule           // that accepts what is established: what connection tracking alone costs
	theRules
	rulesAndFlowtable // where the kernel has one
	underKinds
)

// underRows returns the rows of what was measured under each kind of rules.
func underRows(what string, rate func(underWhat) float64, has func(underWhat) bool, unit Unit) []Row {
	rows := []Row{
		{what, rate(theRules), rate(noRules), "no rules", unit},
		{what, rate(theRules), rate(oneRule), "one rule that accepts it", unit},
	}
	if has(rulesAndFlowtable) {
		rows = append(rows, Row{what + ", flowtable", rate(rulesAndFlowtable), rate(noRules), "no rules", unit})
	}
	return rows
}

// MeasureThroughput returns rows for one TCP stream from a pod on one host to a
// pod on another, routed and in VXLAN, beside the same path without rules and with one
// rule, and where the kernel has a flowtable, with that: each as the best of some rounds,
// in turns.
func MeasureThroughput(ctx context.Context, atLeast time.Duration, log *slog.Logger) ([]Row, error) {
	const rounds = 4
	var rows []Row
	for _, tunnel := range []bool{false, true} {
		var most [underKinds]float64
		for range rounds {
			for under := range most {
				rate, err := streamRate(ctx, tunnel, underWhat(under), atLeast, log) //nolint:gosec // one of four
				if errors.Is(err, errors.ErrUnsupported) {
					continue
				}
				if err != nil {
					return nil, err
				}
				most[under] = max(most[under], rate)
			}
		}
		name := "one TCP stream between pods of two hosts, Direct"
		if tunnel {
			name = "one TCP stream between pods of two hosts, VXLAN"
		}
		rows = append(rows, underRows(name, func(u underWhat) float64 { return most[u] }, func(u underWhat) bool { return most[u] > 0 }, GigabitsPerSecond)...)
	}
	return rows, nil
}

// streamHost is one of the two hosts of a stream, with its pod.
type streamHost struct {
	space, podSpace string
	uplink, pod     netip.Addr
	device          string // of the pod
}

// streamHosts names two hosts.
func streamHosts(name string) (hosts [2]streamHost) {
	for i := range hosts {
		space := fmt.Sprintf("%s-%d", name, i)
		hosts[i] = streamHost{
			space: space, podSpace: space + "-pod", device: fmt.Sprintf("cali%d", i),
			uplink: netip.AddrFrom4([4]byte{10, 9, 0, byte(i + 1)}), pod: netip.AddrFrom4([4]byte{10, 1, byte(i), 2}),
		}
	}
	return hosts
}

// connect makes the hosts and what is between them, with rules.
func (w *way) connect(ctx context.Context, tunnel bool, under underWhat, log *slog.Logger) error {
	for _, h := range w.hosts {
		for _, name := range []string{h.space, h.podSpace} {
			if err := ns.Create(name); err != nil {
				return err
			}
			w.ends = append(w.ends, func() error { return ns.Delete(name) })
		}
	}
	if err := ipBatch(ctx, w.hosts[0].space, "link add up0 type veth peer name up0 netns "+w.hosts[1].space+"\n"); err != nil {
		return err
	}
	for i, h := range w.hosts {
		end, err := h.setUp(ctx, w.hosts[1-i], tunnel, under, log)
		w.ends = append(w.ends, end)
		if err != nil {
			return err
		}
	}
	return nil
}

// streamRate sends for some time and returns how many bits a second arrived.
func streamRate(ctx context.Context, tunnel bool, under underWhat, atLeast time.Duration, log *slog.Logger) (rate float64, err error) {
	w := &way{hosts: streamHosts(fmt.Sprintf("bench-stream-%d", os.Getpid()))}
	defer func() { err = errors.Join(err, w.close()) }()
	if err := w.connect(ctx, tunnel, under, log); err != nil {
		return 0, err
	}
	return stream(ctx, w.hosts[0], w.hosts[1], atLeast)
}

// gatewayMAC is the address that pods send to.
func gatewayMAC() net.HardwareAddr { return net.HardwareAddr{0xee, 0xee, 0xee, 0xee, 0xee, 0xee} }

// setUp makes the pod and the way to the other host's. What it returns is called
// at the end.
func (h *streamHost) setUp(ctx context.Context, other streamHost, tunnel bool, under underWhat, log *slog.Logger) (end func() error, err error) {
	end = func() error { return nil }
	const mtu = 1450
	way := fmt.Sprintf("route add %s/32 via %s dev up0\n", other.pod, other.uplink)
	if tunnel {
		way = fmt.Sprintf(`link add vxlan.calico type vxlan id 4096 local %s remote %s dev up0 dstport 4789 nolearning
link set vxlan.calico mtu %d up
addr add %s/32 dev vxlan.calico
route add %s/32 via %s dev vxlan.calico onlink
`, h.uplink, other.uplink, mtu, h.pod.Prev(), other.pod, other.pod.Prev())
	}
	lines := fmt.Sprintf(`link set up0 up
addr add %[1]s/24 dev up0
link add %[2]s address %[3]s type veth peer name eth0 netns %[4]s
link set %[2]s mtu %[5]d up
route add %[6]s/32 dev %[2]s
`, h.uplink, h.device, gatewayMAC(), h.podSpace, mtu, h.pod)
	if err := ipBatch(ctx, h.space, lines+way); err != nil {
		return end, err
	}
	pod := fmt.Sprintf(`link set eth0 mtu %d up
addr add %s/32 dev eth0
route add 169.254.1.1 dev eth0
route add default via 169.254.1.1 dev eth0
neigh replace 169.254.1.1 lladdr %s dev eth0 nud permanent
`, mtu, h.pod, gatewayMAC())
	if err := ipBatch(ctx, h.podSpace, pod); err != nil {
		return end, err
	}
	err = ns.Do(h.space, func() error {
		for file, value := range map[string]string{"ip_forward": "1", "conf/" + h.device + "/proxy_arp": "1"} {
			if err := os.WriteFile("/proc/sys/net/ipv4/"+file, []byte(value), 0o600); err != nil {
				return err
			}
		}
		switch under {
		case noRules:
			return nil
		case oneRule:
			return runTool(ctx, []string{"nft", "-f", "-"}, acceptsEstablished)
		default:
		}
		t, err := nft.Open(nft.Config{Log: log})
		if err != nil {
			return err
		}
		end = t.Close
		if err := t.Apply(h.ruleset(other)); err != nil || under == theRules {
			return err
		}
		o, err := nft.OpenOffload()
		if err != nil {
			return err
		}
		end = func() error { return errors.Join(t.Close(), o.Close()) }
		devices := []filter.Device{{Name: "up0"}, {Name: h.device, Workload: true}}
		if tunnel {
			devices = append(devices, filter.Device{Name: "vxlan.calico"})
		}
		return o.Set(devices)
	})
	return end, err
}

// ruleset is what a host has by default, with a policy for its one pod.
func (h *streamHost) ruleset(other streamHost) filter.Delta {
	set := func(id filter.SetID, members ...netip.Prefix) filter.MemberChange {
		c := filter.MemberChange{Set: id}
		for _, p := range members {
			c.Add = append(c.Add, filter.Member{Prefix: p})
		}
		return c
	}
	single := func(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }
	pool := netip.MustParsePrefix("10.1.0.0/16")
	vxlan, bgp := filter.Tunnel{Protocol: 17, Port: 4789}, filter.Tunnel{Protocol: 6, Port: 179}
	policy := filter.Policy{
		ID:      filter.PolicyID{Kind: "NetworkPolicy", Namespace: "bench", Name: "stream"},
		Ingress: []filter.Rule{{Action: filter.Allow, Source: filter.Side{Set: "s-peers"}}},
	}
	return filter.Delta{
		PutSets: []filter.Set{{ID: "s-peers"}, {ID: filter.NATSources}, {ID: filter.NATExempt}, {ID: filter.TunnelSources}},
		Members: []filter.MemberChange{
			set("s-peers", single(h.pod), single(other.pod)), set(filter.NATSources, pool), set(filter.NATExempt, pool),
			set(filter.TunnelSources, single(h.uplink), single(other.uplink)),
		},
		Settings:    &filter.Settings{WorkloadPrefixes: []string{"cali"}, HostTraffic: []filter.Tunnel{vxlan, bgp}, Guarded: []filter.Tunnel{bgp}},
		PutPolicies: []filter.Policy{policy},
		PutEndpoints: []filter.Endpoint{{
			Interface: h.device, Sources: []netip.Prefix{single(h.pod)},
			Ingress: filter.Path{Tiers: []filter.Tier{{Name: "default", End: filter.Deny, Policies: []filter.PolicyRef{{ID: policy.ID}}}}},
			Egress:  filter.Path{Default: filter.Allow},
		}},
	}
}

// stream sends from one pod to the other and returns the rate at which it arrived.
func stream(ctx context.Context, from, to streamHost, atLeast time.Duration) (float64, error) {
	var l net.Listener
	err := ns.Do(to.podSpace, func() (err error) {
		l, err = new(net.ListenConfig).Listen(ctx, "tcp4", netip.AddrPortFrom(to.pod, 0).String())
		return err
	})
	if err != nil {
		return 0, err
	}
	defer l.Close()
	var out net.Conn
	var refused error
	err = untilWithin(ctx, 10*time.Second, "the pods reach each other", func() (bool, error) {
		refused = ns.Do(from.podSpace, func() (err error) {
			out, err = (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "tcp4", l.Addr().String())
			return err
		})
		return refused == nil, nil
	})
	if err != nil {
		return 0, errors.Join(err, refused)
	}
	in, err := l.Accept()
	if err != nil {
		return 0, errors.Join(err, out.Close())
	}
	defer in.Close()
	sent := make(chan error, 1)
	start := time.Now()
	go func() {
		b := make([]byte, 1<<20)
		var err error
		for err == nil && time.Since(start) < atLeast && ctx.Err() == nil {
			_, err = out.Write(b)
		}
		sent <- errors.Join(err, out.Close())
	}()
	n, err := drain(in)
	took := time.Since(start)
	return float64(n) * 8 / took.Seconds() / 1e9, errors.Join(err, <-sent)
}

// drain reads until the end and returns how many bytes came.
func drain(c net.Conn) (n int64, err error) {
	b := make([]byte, 1<<20)
	for {
		m, err := c.Read(b)
		n += int64(m)
		if errors.Is(err, io.EOF) {
			return n, nil
		}
		if err != nil {
			return n, err
		}
	}
}
