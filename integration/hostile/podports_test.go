package hostile

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/ns"
	"github.com/routerd/routerd/store"
)

// TestPodsKeptFromHosts: pods reach neither BGP's port of any host, where a
// connection that comes with a host's address would pass for the host's session, nor
// BFD's, nor the probes', on the underlay or a tunnel, nor what hosts serve on their
// loopback. Other ports of other hosts are open, and with
// policy.allowHostPortsFromWorkloads these too. Sessions have no key here: with one the
// kernel ignores a pod's connection in any case.
func TestPodsKeptFromHosts(t *testing.T) {
	t.Parallel()
	for _, mode := range []store.Encapsulation{store.VXLAN, store.Direct} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			top := topology(3, 1, mode)
			top.Underlay, top.Pool6 = lab.UnderlayDual, &lab.Pool{Encapsulation: mode}
			// The test listens in the place of two hosts' probes: they answer no stranger's.
			for i := range 2 {
				top.Nodes[i].Config = map[string]any{"probe": map[string]any{"enabled": false}}
			}
			top.Nodes[2].Config = map[string]any{"policy": map[string]any{"allowHostPortsFromWorkloads": true}}
			l := bringUp(t, "ports-"+strings.ToLower(string(mode)), top)
			if out, err := routerctl(t, l, "node1", "bgp", "key", "off"); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			reachable(t, l)
			connectionsKeptFrom(t, l, mode)
			datagramsKeptFrom(t, l)
			loopbackFromPod(t, l)
		})
	}
}

// The ports of hosts that pods are kept from, and one that they are not.
const openPort, bgpPort, probePort, bfdPort, bfdMultihopPort = 8080, 179, 7747, 3784, 4784

// connectionsKeptFrom connects to hosts as a pod of node1.
func connectionsKeptFrom(t *testing.T, l *lab.Lab, mode store.Encapsulation) {
	t.Helper()
	const pod = "node1/pod1"
	for _, host := range l.Hosts() {
		if n := len(tunnelAddresses(t, l, host)); (n > 0) != (mode == store.VXLAN) {
			t.Fatalf("%s has %d addresses on tunnels", host, n)
		}
	}
	for _, host := range []string{"node2", "node3"} {
		listen(t, l, host, fmt.Sprintf(":%d", openPort))
	}
	listen(t, l, "node1", fmt.Sprintf(":%d", probePort))
	listen(t, l, "node2", fmt.Sprintf(":%d", probePort))
	if mode != store.VXLAN { // the daemon does, on its tunnels
		listen(t, l, "node3", fmt.Sprintf(":%d", probePort))
	}
	for _, at := range addresses(t, l, "node2") {
		poll(t, "a pod reaches ports of another host", func() string { return connects(t, l, pod, at, openPort) })
		for _, port := range []int{bgpPort, probePort} {
			poll(t, fmt.Sprintf("another host reaches port %d", port), func() string { return connects(t, l, "node3", at, port) })
			poll(t, "a pod of a host that allows it does", func() string { return connects(t, l, "node3/pod1", at, port) })
		}
	}
	for _, at := range tunnelAddresses(t, l, "node3") {
		poll(t, "another host reaches the prober at "+at, func() string { return connects(t, l, "node2", at, probePort) })
	}
	for _, host := range l.Hosts() {
		for _, at := range addresses(t, l, host) {
			for _, port := range []int{bgpPort, probePort} {
				if connects(t, l, pod, at, port) == "" {
					t.Errorf("%s connects to port %d of %s at %s", pod, port, host, at)
				}
			}
		}
	}
}

// datagramsKeptFrom sends hosts datagrams as a pod of node1, to its own host and another.
func datagramsKeptFrom(t *testing.T, l *lab.Lab) {
	t.Helper()
	const pod = "node1/pod1"
	guarded := []int{probePort, bfdPort, bfdMultihopPort}
	for _, host := range []string{"node1", "node2"} {
		for _, a := range addresses(t, l, host) {
			at := func(port int) string { return net.JoinHostPort(a, fmt.Sprint(port)) }
			heard := make(map[int]receiver)
			for _, port := range append(guarded, openPort) {
				heard[port] = receive(t, l, host, at(port))
			}
			// arrives waits until what a place sends is heard.
			arrives := func(from string, port int) {
				t.Helper()
				poll(t, fmt.Sprintf("a datagram of %s arrives at %s", from, at(port)), func() string {
					datagram(t, l, from, at(port), from)
					text, err := heard[port].next(time.Second)
					if err == nil && text != from {
						err = fmt.Errorf("%q arrived", text)
					}
					if err != nil {
						return err.Error()
					}
					return ""
				})
			}
			for _, port := range guarded {
				arrives("node3", port)
				arrives("node3/pod1", port)
			}
			for _, port := range guarded {
				for range 3 {
					datagram(t, l, pod, at(port), "attack")
				}
			}
			arrives(pod, openPort) // sent later, the same way
			for _, port := range guarded {
				for {
					text, err := heard[port].next(10 * time.Millisecond)
					if err != nil {
						break
					}
					if text == "attack" {
						t.Errorf("a datagram of %s arrived at %s of %s", pod, at(port), host)
					}
				}
			}
		}
	}
}

// loopbackFromPod sends node1's loopback what needs no answer, as a pod of it: nothing
// arrives at whoever listens there. What the host itself translates to its loopback, as
// node-local proxies do, is no packet to the loopback when it comes, and arrives.
func loopbackFromPod(t *testing.T, l *lab.Lab) {
	t.Helper()
	const host, pod, translated = "node1", "node1/pod1", "192.0.2.80"
	output(t, l, host, "sysctl", "-qw", "net.ipv4.conf.all.route_localnet=1") // as kube-proxy sets it
	listen(t, l, host, "127.0.0.1:8081")
	service := receive(t, l, host, "127.0.0.1:8081")
	translate(t, l, host, translated, "127.0.0.1:8081")
	for _, from := range []string{pod, host} {
		poll(t, from+" reaches what node1 translates to its loopback", func() string { return connects(t, l, from, translated, 80) })
	}
	// To 127.0.0.1 by the link's address of the host, which answers for all; what comes
	// back from there is for the pod.
	for _, command := range []string{
		"sysctl -qw net.ipv4.conf.eth0.route_localnet=1",
		"ip address del 127.0.0.1/8 dev lo",
		"ip rule add pref 1 to 127.0.0.1 lookup 99",
		"ip rule add pref 2 lookup local",
		"ip rule del pref 0",
		"ip route add 127.0.0.1 via 169.254.1.1 dev eth0 onlink table 99",
	} {
		output(t, l, pod, strings.Fields(command)...)
	}
	if why := connects(t, l, host, "127.0.0.1", 8081); why != "" {
		t.Fatalf("the host does not reach its own port: %s", why)
	}
	const attacks = 5
	seen := hits(t, l, host)
	for range attacks {
		datagram(t, l, pod, "127.0.0.1:8081", "attack")
	}
	// What comes through the translation was sent later, on the same wire.
	poll(t, "a datagram by node1's translation arrives", func() string {
		datagram(t, l, pod, translated+":80", "translated")
		for {
			text, err := service.next(time.Second)
			switch {
			case err != nil:
				return err.Error()
			case text == "translated":
				return ""
			}
			t.Errorf("%s sent %q to 127.0.0.1 of its host, where it arrived", pod, text)
		}
	})
	if connects(t, l, pod, "127.0.0.1", 8081) == "" {
		t.Errorf("%s connects to 127.0.0.1 of its host", pod)
	}
	poll(t, "what the pod sends to 127.0.0.1 is counted as dropped", func() string {
		if now := hits(t, l, host); now < seen+attacks {
			return fmt.Sprintf("%d packets, %d before", now, seen)
		}
		return ""
	})
}

// translate has a host send port 80 of an address elsewhere, for itself and whoever sends by way of it.
func translate(t *testing.T, l *lab.Lab, host, at, to string) {
	t.Helper()
	for _, chain := range []string{"prerouting", "output"} {
		output(t, l, host, "nft", fmt.Sprintf("add table ip nodelocal; add chain ip nodelocal %[1]s { type nat hook %[1]s priority -100; }; add rule ip nodelocal %[1]s ip daddr %s meta l4proto { tcp, udp } th dport 80 dnat to %s", chain, at, to))
	}
}

// listen accepts connections in a host's namespace until the test ends.
func listen(t *testing.T, l *lab.Lab, host, at string) {
	t.Helper()
	var lis net.Listener
	err := ns.Do(l.Space(host), func() (err error) {
		lis, err = net.Listen("tcp", at)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := lis.Accept()
			if err != nil {
				return
			}
			_ = c.Close()
		}
	}()
	t.Cleanup(func() {
		_ = lis.Close()
		<-done
	})
}

// receiver takes datagrams until the test ends.
type receiver struct{ net.PacketConn }

// receive listens for datagrams in a host's namespace.
func receive(t *testing.T, l *lab.Lab, host, at string) receiver {
	t.Helper()
	var r receiver
	if err := ns.Do(l.Space(host), func() (err error) { r.PacketConn, err = net.ListenPacket("udp", at); return err }); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	return r
}

// next returns the text of a datagram, which it waits for.
func (r receiver) next(limit time.Duration) (string, error) {
	if err := r.SetReadDeadline(time.Now().Add(limit)); err != nil {
		return "", err
	}
	b := make([]byte, 64)
	n, _, err := r.ReadFrom(b)
	return string(b[:n]), err
}

// datagram sends one. That nobody listens is nothing to its sender.
func datagram(t *testing.T, l *lab.Lab, from, to, text string) {
	t.Helper()
	if err := ns.Do(l.Space(from), func() error {
		c, err := net.Dial("udp", to)
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.Write([]byte(text))
		return err
	}); err != nil {
		t.Fatal(err)
	}
}

// connects says why a place does not connect to a port; empty: it does.
func connects(t *testing.T, l *lab.Lab, where, addr string, port int) string {
	t.Helper()
	var c net.Conn
	err := ns.Do(l.Space(where), func() (err error) {
		c, err = net.DialTimeout("tcp", net.JoinHostPort(addr, fmt.Sprint(port)), 500*time.Millisecond)
		return err
	})
	if err != nil {
		return err.Error()
	}
	_ = c.Close()
	return ""
}

func address(t *testing.T, l *lab.Lab, where string) string {
	t.Helper()
	a, err := l.Addr(where)
	if err != nil {
		t.Fatal(err)
	}
	return a.String()
}

// addresses returns a host's on the underlay and of its tunnels, of both families.
func addresses(t *testing.T, l *lab.Lab, host string) (out []string) {
	t.Helper()
	for _, n := range l.Topology().Nodes {
		if n.Name == host {
			return append([]string{n.Address.String(), n.Address6.String()}, tunnelAddresses(t, l, host)...)
		}
	}
	t.Fatalf("no host %s", host)
	return nil
}

// tunnelAddresses returns those that a host has on its tunnels' devices.
func tunnelAddresses(t *testing.T, l *lab.Lab, host string) (out []string) {
	t.Helper()
	if err := ns.Do(l.Space(host), func() error {
		links, err := net.Interfaces()
		if err != nil {
			return err
		}
		for _, link := range links {
			if !strings.HasPrefix(link.Name, "vxlan") {
				continue
			}
			addrs, err := link.Addrs()
			if err != nil {
				return err
			}
			for _, a := range addrs {
				if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().IsGlobalUnicast() {
					out = append(out, p.Addr().String())
				}
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return out
}

// hits counts what a host dropped because it was for its loopback.
func hits(t *testing.T, l *lab.Lab, host string) (sum int) {
	t.Helper()
	out, err := l.Output(await.Context(t), host, "nft", "list", "ruleset")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(out) {
		if strings.Contains(line, "loopback address of the host") {
			var n int
			if _, after, ok := strings.Cut(line, "counter packets "); ok {
				_, _ = fmt.Sscan(after, &n)
			}
			sum += n
		}
	}
	return sum
}
