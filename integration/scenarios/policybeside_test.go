package scenarios

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/store"
)

// dockerRules is what docker makes on a host, in iptables.
const dockerRules = `*filter
:FORWARD DROP [0:0]
:DOCKER - [0:0]
:DOCKER-ISOLATION-STAGE-1 - [0:0]
:DOCKER-ISOLATION-STAGE-2 - [0:0]
:DOCKER-USER - [0:0]
-A FORWARD -j DOCKER-USER
-A FORWARD -j DOCKER-ISOLATION-STAGE-1
-A FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A FORWARD -o docker0 -j DOCKER
-A FORWARD -i docker0 ! -o docker0 -j ACCEPT
-A FORWARD -i docker0 -o docker0 -j ACCEPT
-A DOCKER-ISOLATION-STAGE-1 -i docker0 ! -o docker0 -j DOCKER-ISOLATION-STAGE-2
-A DOCKER-ISOLATION-STAGE-1 -j RETURN
-A DOCKER-ISOLATION-STAGE-2 -o docker0 -j DROP
-A DOCKER-ISOLATION-STAGE-2 -j RETURN
-A DOCKER-USER -j RETURN
COMMIT
*nat
:DOCKER - [0:0]
-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE
-A DOCKER -i docker0 -j RETURN
COMMIT
`

// firewalldRules is firewalld's table with one zone, trusted, of the pools.
const firewalldRules = `table inet firewalld {
 chain filter_PREROUTING { type filter hook prerouting priority filter + 10; policy accept; }
 chain filter_FORWARD {
  type filter hook forward priority filter + 10; policy accept;
  ct state { established, related } accept
  ct status dnat accept
  iifname "lo" accept
  ct state invalid drop
  jump filter_FORWARD_ZONES
  reject with icmpx admin-prohibited
 }
 chain filter_FORWARD_ZONES {
  ip saddr POOL goto filter_FWD_trusted
  ip daddr POOL goto filter_FWD_trusted
  meta nfproto ipv6 accept
 }
 chain filter_FWD_trusted { accept; }
}
`

// kubeProxyRules is kube-proxy's iptables mode with a service of two ports, TCP
// and UDP, and one endpoint.
const kubeProxyRules = `*filter
:KUBE-FIREWALL - [0:0]
:KUBE-FORWARD - [0:0]
:KUBE-SERVICES - [0:0]
-A INPUT -j KUBE-FIREWALL
-A FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-A FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 -m comment --comment "block incoming localnet connections" -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP
-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding rules" -m mark --mark 0x4000/0x4000 -j ACCEPT
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding conntrack rule" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
COMMIT
*nat
:KUBE-MARK-MASQ - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-SEP-TCP - [0:0]
:KUBE-SEP-UDP - [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-SVC-TCP - [0:0]
:KUBE-SVC-UDP - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully
-A KUBE-SERVICES -d 10.96.0.10/32 -p tcp -m tcp --dport 80 -j KUBE-SVC-TCP
-A KUBE-SERVICES -d 10.96.0.10/32 -p udp -m udp --dport 80 -j KUBE-SVC-UDP
-A KUBE-SVC-TCP ! -s POOL -d 10.96.0.10/32 -p tcp -m tcp --dport 80 -j KUBE-MARK-MASQ
-A KUBE-SVC-TCP -j KUBE-SEP-TCP
-A KUBE-SVC-UDP -j KUBE-SEP-UDP
-A KUBE-SEP-TCP -s POD/32 -j KUBE-MARK-MASQ
-A KUBE-SEP-TCP -p tcp -m tcp -j DNAT --to-destination POD:ALLOWED
-A KUBE-SEP-UDP -p udp -m udp -j DNAT --to-destination POD:DENIED
COMMIT
`

// kubeProxyTable is kube-proxy's nftables mode with such a service.
const kubeProxyTable = `table ip kube-proxy {
 map service-ips {
  type ipv4_addr . inet_proto . inet_service : verdict
  elements = { 10.96.0.20 . tcp . 80 : goto service-tcp, 10.96.0.20 . udp . 80 : goto service-udp }
 }
 chain nat-prerouting { type nat hook prerouting priority dstnat; jump services; }
 chain nat-output { type nat hook output priority -100; jump services; }
 chain nat-postrouting { type nat hook postrouting priority srcnat; jump masquerading; }
 chain services { ip daddr . meta l4proto . th dport vmap @service-ips; }
 chain mark-for-masquerade { meta mark set meta mark or 0x4000; }
 chain masquerading {
  meta mark and 0x4000 == 0 return
  meta mark set meta mark xor 0x4000
  masquerade fully-random
 }
 chain service-tcp {
  ip daddr 10.96.0.20 tcp dport 80 ip saddr != POOL jump mark-for-masquerade
  numgen random mod 1 vmap { 0 : goto endpoint-tcp }
 }
 chain service-udp { numgen random mod 1 vmap { 0 : goto endpoint-udp }; }
 chain endpoint-tcp {
  ip saddr POD jump mark-for-masquerade
  meta l4proto tcp dnat to POD:ALLOWED
 }
 chain endpoint-udp { meta l4proto udp dnat to POD:DENIED; }
}
`

// feed has a host take rules as their owners' tools give them.
func feed(t *testing.T, l *lab.Lab, host, rules string, command ...string) {
	t.Helper()
	var out strings.Builder
	code, err := l.Run(await.Context(t), host, lab.Streams{In: strings.NewReader(rules), Out: &out, Err: &out}, command...)
	if err != nil || code != 0 {
		t.Fatalf("%s on %s: %v, %d: %s", command, host, err, code, out.String())
	}
}

// sorted makes listings comparable: a chain that comes back is listed last.
func sorted(listing string) string {
	return strings.Join(slices.Sorted(strings.Lines(listing)), "")
}

// testBeside has hosts with the rules of docker, firewalld and kube-proxy, in
// both of its modes and both kinds of iptables: what policy allows passes, also
// by a service's address, what it denies does not, and neither side changes the
// other's rules.
func testBeside(t *testing.T, l *lab.Lab, _ store.Store) {
	if emulated() {
		t.Skip("the machine has no iptables; the stage without it runs this")
	}
	routerctl(t, l, "node1", denyManifest(), "apply", "-f", "-")
	settled(t, l)
	pod := addr(t, l, "node3/pod1")
	pool := netip.PrefixFrom(pod, 16).Masked().String()
	for proto, port := range map[int]uint16{unix.IPPROTO_TCP: allowedPort, unix.IPPROTO_UDP: deniedPort} {
		serve(t, l, "node3/pod1", proto, port)
	}
	of := map[string]func() string{}
	for _, host := range []string{"node1", "node3"} {
		of[host+", ours"] = func() string { return sorted(output(t, l, host, "nft", "-s", "list", "table", "inet", "routerd")) }
		of[host+", all"] = func() string {
			s := output(t, l, host, "nft", "-s", "list", "ruleset") + output(t, l, host, "iptables-legacy-save")
			return sorted(regexp.MustCompile(`(?m)^#.*\n|\[\d+:\d+\]`).ReplaceAllString(s, ""))
		}
	}
	ours := map[string]string{"node1": of["node1, ours"](), "node3": of["node3, ours"]()}

	fill := strings.NewReplacer("POOL", pool, "POD", pod.String(), "ALLOWED", fmt.Sprint(allowedPort), "DENIED", fmt.Sprint(deniedPort))
	for _, f := range []struct{ host, rules, undo string }{
		{"node1", kubeProxyRules, "iptables-legacy -t nat -F;iptables-legacy -t nat -X;iptables-legacy -F;iptables-legacy -X"},
		{"node1", kubeProxyTable, "nft delete table ip kube-proxy"},
		{"node3", dockerRules, "iptables-nft -P FORWARD ACCEPT;iptables-nft -F;iptables-nft -X;iptables-nft -t nat -F;iptables-nft -t nat -X"},
		{"node3", firewalldRules, "nft delete table inet firewalld"},
	} {
		command := []string{"nft", "-f", "-"}
		switch {
		case strings.HasPrefix(f.rules, "*") && f.host == "node1":
			command = []string{"iptables-legacy-restore", "--noflush"}
		case strings.HasPrefix(f.rules, "*"):
			command = []string{"iptables-nft-restore", "--noflush"}
		}
		feed(t, l, f.host, fill.Replace(f.rules), command...)
		defer func() {
			for undo := range strings.SplitSeq(f.undo, ";") {
				if _, err := try(t.Context(), l, f.host, undo); err != nil {
					t.Errorf("%s on %s: %v", undo, f.host, err)
				}
			}
		}()
	}

	// An accept is final in one table only: docker's policy drops what nobody there accepts.
	if one(t, l, "node1/pod1", pod, unix.IPPROTO_TCP, allowedPort) {
		t.Error("docker's FORWARD policy drops nothing: this test says little")
	}
	for _, side := range []string{"-s", "-d"} {
		output(t, l, "node3", "iptables-nft", "-I", "DOCKER-USER", side, pool, "-j", "ACCEPT")
	}
	all := map[string]string{"node1": of["node1, all"](), "node3": of["node3, all"]()}
	const servicePort = 80
	services := []netip.Addr{netip.MustParseAddr("10.96.0.10"), netip.MustParseAddr("10.96.0.20")}
	denied := []*attempt{{from: "node1/pod1", to: pod, protocol: unix.IPPROTO_UDP, port: deniedPort}}
	until(t, l, true, "node1/pod1", pod, unix.IPPROTO_TCP, allowedPort)
	for _, to := range services {
		until(t, l, true, "node1/pod1", to, unix.IPPROTO_TCP, servicePort)
		denied = append(denied, &attempt{from: "node1/pod1", to: to, protocol: unix.IPPROTO_UDP, port: servicePort})
	}
	tryAll(t, l, denied, attemptWithin())
	for _, a := range denied {
		if a.passed {
			t.Errorf("what is denied passes to %s", a.to)
		}
	}
	settled(t, l) // rules of ours come and go meanwhile
	for _, host := range []string{"node1", "node3"} {
		if now := of[host+", ours"](); now != ours[host] {
			t.Errorf("others changed our rules on %s from\n%s\nto\n%s", host, ours[host], now)
		}
		if now := of[host+", all"](); now != all[host] {
			t.Errorf("the rules on %s changed from\n%s\nto\n%s", host, all[host], now)
		}
	}
}

// testTrace asks for a packet's fate across hosts: both ends are judged, a probe
// is sent, and what the kernels of both hosts then did is what was said.
func testTrace(t *testing.T, l *lab.Lab, _ store.Store) {
	const open, closedIn, closedOut = 30010, 30011, 30012
	manifest := policyManifest("traced-in", "all()", fmt.Sprintf("order: 2\n  ingress: [{action: Deny, protocol: UDP, destination: {ports: [%d]}}, {action: Allow, protocol: UDP, destination: {ports: [%d]}}]", closedIn, open)) +
		policyManifest("traced-out", "all()", fmt.Sprintf("order: 2\n  types: [Egress]\n  egress: [{action: Deny, protocol: UDP, destination: {ports: [%d]}}]", closedOut))
	routerctl(t, l, "node1", manifest, "apply", "-f", "-")
	settled(t, l)
	client := func(host string) apiv1.OperatorClient {
		c, err := l.Client(host)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return apiv1.NewOperatorClient(c)
	}
	src, far := client("node1"), client("node3")
	from, to := addr(t, l, "node1/pod1"), addr(t, l, "node3/pod1")
	// What the far host's rules did to packets to a port.
	verdicts := func(port uint32) (actions []string) {
		r, err := far.Flows(await.Context(t), &apiv1.FlowsRequest{})
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range r.GetFlows() {
			if f.GetDestinationPort() == port && f.GetSource() == from.String() && f.GetDestination() == to.String() {
				actions = append(actions, f.GetAction())
			}
		}
		return actions
	}
	for _, tt := range []struct {
		port    uint32
		allowed []bool // at the ends
		kernel  string // of the near host
		far     string // verdict of the far host's
	}{
		{open, []bool{true, true}, "let the packet pass", "Allow"},
		{closedIn, []bool{true, false}, "let the packet pass", "Deny"},
		{closedOut, []bool{false, true}, "dropped the packet", ""},
	} {
		r, err := src.PolicyExplain(await.Context(t), &apiv1.PolicyExplainRequest{
			From: from.String(), To: to.String(), Protocol: "UDP", Port: tt.port, Trace: true,
		})
		if err != nil {
			t.Fatal(err)
		}
		var nodes []string
		var allowed []bool
		for _, e := range r.GetEnds() {
			nodes, allowed = append(nodes, e.GetNode()), append(allowed, e.GetAllowed())
		}
		if !slices.Equal(nodes, []string{"node1", "node3"}) || !slices.Equal(allowed, tt.allowed) || r.GetAllowed() != (allowed[0] && allowed[1]) {
			t.Errorf("port %d: ends %v, allowed %v, in all %t; want %v", tt.port, nodes, allowed, r.GetAllowed(), tt.allowed)
		}
		if r.GetTraceDiffers() || !strings.Contains(r.GetTrace(), tt.kernel) {
			t.Errorf("port %d: traced %q, want %q", tt.port, r.GetTrace(), tt.kernel)
		}
		if tt.far == "" {
			continue
		}
		poll(t, fmt.Sprintf("the probe to port %d at the far host", tt.port), func() string {
			if got := verdicts(tt.port); !slices.Contains(got, tt.far) {
				return fmt.Sprintf("verdicts %v", got)
			}
			return ""
		})
	}
	if got := verdicts(closedOut); len(got) > 0 {
		t.Errorf("what the near host dropped met the far host's rules: %v", got)
	}
	// From the far host it cannot be asked: the workload is not there.
	_, err := far.PolicyExplain(await.Context(t), &apiv1.PolicyExplainRequest{From: from.String(), To: to.String(), Protocol: "UDP", Port: open, Trace: true})
	if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "run the command on the workload's host") {
		t.Errorf("traced from the wrong host: %v", err)
	}
	routerctl(t, l, "node1", "", "delete", "gnp", "traced-in")
	routerctl(t, l, "node1", "", "delete", "gnp", "traced-out")
}
