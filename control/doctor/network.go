package doctor

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/dataplane"
)

// echoes finds tunnels through which packets do not get.
func echoes(f Facts) []Finding {
	var out []Finding
	for _, e := range f.Echoes {
		switch d := (Finding{Device: e.Device, Object: e.Node, Severity: Critical}); {
		case !e.Answered:
			d.Check = "tunnel"
			d.What, d.Cause, d.Cure = e.lost()
			out = append(out, d)
		case e.Offload:
			d.Check = "tunnel-offload"
			d.What = fmt.Sprintf("packets with checksum offload are lost through %s to %s (%s)", e.Device, e.Node, e.Addr)
			d.Cause = "a network card, its driver or a virtual switch on the path computes wrong checksums for tunnelled packets"
			d.Cure = "routerctl node tunnels --retry " + e.Node // which switches off what spoils packets
			out = append(out, d)
		case e.Size > 0 && e.Size < e.Full:
			d.Check, d.Severity = "tunnel-mtu", Warning
			d.What = fmt.Sprintf("packets of more than %d bytes are lost through %s to %s (%s), whose MTU is %d", e.Size, e.Device, e.Node, e.Addr, e.Full)
			d.Cause = "a link on the path has a smaller MTU than the hosts' uplinks"
			d.Cure = fmt.Sprintf("ping -c1 -M do -s %d %s # find the link and raise its MTU, or lower the MTU of the uplinks", e.Full+vxlanOverhead-icmpHeaders, e.Addr)
			out = append(out, d)
		}
	}
	return out
}

// Bytes that a packet of VXLAN has before its inner one, and one of ping(8) before its
// payload.
const (
	vxlanOverhead = 50
	icmpHeaders   = 28
)

// lost says of a tunnel without answers what is lost, why and what mends it.
func (e Echo) lost() (what, cause, cure string) {
	carrier, filter, rule := e.carrier()
	where := "on the host or firewall that drops them"
	switch e.Heard {
	case Yes:
		what = fmt.Sprintf("packets get through %s (%s) to %s (%s), but none come back", e.Device, carrier, e.Node, e.Addr)
		cause = fmt.Sprintf("%s receives this host's packets; it, this host or a device between drops its packets to this host", e.Node)
		where = fmt.Sprintf("on this host, %s or a firewall between, which drops packets from there", e.Node)
	case No:
		what = fmt.Sprintf("no packet gets through %s (%s) to %s (%s): it receives nothing from this host", e.Device, carrier, e.Node, e.Addr)
		cause = fmt.Sprintf("this host, %s or a device between drops this host's packets; nothing is known of the other direction", e.Node)
		where = fmt.Sprintf("on %s, this host or a firewall between, which drops packets to it", e.Node)
	case NotKnown:
		what = fmt.Sprintf("no packet gets through %s (%s) to %s (%s) and back", e.Device, carrier, e.Node, e.Addr)
		cause = "the host is down, or a device between drops these packets in one direction or both"
	}
	return what, cause, fmt.Sprintf("nft insert rule inet filter input %s accept # %s: tcpdump -ni any '%s and host %s' on both hosts shows where they are dropped", rule, where, filter, e.Addr)
}

// carrier says what the tunnel's packets are on the underlay: for people, for
// tcpdump(1), and for a rule of nftables.
func (e Echo) carrier() (what, filter, rule string) {
	if port, ok := strings.CutPrefix(e.Encap, "vxlan"); ok {
		port = port[strings.LastIndex(port, "/")+1:]
		return "UDP port " + port, "udp port " + port, "udp dport " + port
	}
	if e.Addr.Is6() {
		return "protocols 4 and 41", "ip6", "meta l4proto { 4, 41 }"
	}
	return "protocol 4", "ip proto 4", "ip protocol 4"
}

// pathMTU finds paths over the underlay that take less than the uplink.
func pathMTU(f Facts) []Finding {
	var out []Finding
	for _, p := range f.Paths {
		for _, l := range f.Uplinks {
			if p.GetMtu() == 0 || int(p.GetMtu()) >= l.MTU || !p.GetAnswers() || len(f.Uplinks) > 1 {
				continue
			}
			out = append(out, Finding{
				Severity: Warning, Check: "path-mtu", Device: l.Name, Object: p.GetNode(), Field: "mtu",
				What:  fmt.Sprintf("the MTU of the path to %s (%s) is %d, and that of %s is %d", p.GetNode(), p.GetAddress(), p.GetMtu(), l.Name, l.MTU),
				Cause: "a link on the path, or the other host's uplink, has a smaller MTU",
				Cure:  fmt.Sprintf("ip link set %s mtu %d # or raise the smaller one", l.Name, p.GetMtu()),
			})
		}
	}
	return out
}

// remedy is what mends a session whose reason holds a text.
type remedy struct {
	text, cure string
	severity   Severity // empty: that of its kind
}

// remedies are looked through in order. $PEER stands for the peer's address, $NAME for
// the BGPPeer or node, $PORT for 179.
func remedies() []remedy {
	return []remedy{
		{"wrong AS", "routerctl get bgppeers $NAME -o yaml # correct spec.asNumber, or the AS of $PEER", ""},
		{"MD5 suspected", "routerctl get bgppeers $NAME -o yaml # give both sides the same spec.password", ""},
		{"TCP-AO suspected", "routerctl get bgppeers $NAME -o yaml # give both sides the same keys: annotation routerd.io/tcpAO", ""},
		{"has no TCP-AO", "grep CONFIG_TCP_AO /boot/config-$(uname -r) # boot a kernel with it, or give both sides a spec.password instead of the annotation routerd.io/tcpAO", ""},
		{"TTL security suspected", "routerctl get bgppeers $NAME -o yaml # give both sides spec.ttlSecurity", ""},
		{"segments came", "routerctl get bgppeers $NAME -o yaml # give both sides the same spec.password and spec.ttlSecurity", ""},
		{"connection refused", "ss -ltn sport = :179 # on $PEER: is its BGP speaker running?", ""},
		{"closed the connection", "routerctl get bgppeers -o yaml # is this node's address a peer of $PEER's, with the same password?", ""},
		{"no route", "ip route get $PEER", ""},
		{"no answer", "tcpdump -ni any 'tcp port 179 and host $PEER' # on both hosts: open TCP port 179 in the filter that drops it", ""},
		{"is taken by", "ss -ltnp sport = :179", ""},
	}
}

// sessions finds BGP sessions that are not up, though they had their time. A range that neighbours connect from is none.
func sessions(f Facts) []Finding {
	var out []Finding
	for _, p := range f.Node.GetPeers() {
		switch {
		case p.GetState() == "listening" || f.awaits(p):
		case p.GetState() != "up" && f.silent(p) != "":
			d := down(p)
			d.What = fmt.Sprintf("BGP session with %s is down: no host on %s has that address: no answer to ARP", peerName(p), f.silent(p))
			d.Device, d.Cause = f.silent(p), "the address in the BGPPeer is wrong, or that router is down or in another VLAN"
			d.Cure = fmt.Sprintf("routerctl get bgppeers %s -o yaml # is %s its address? ip neigh show %[2]s", p.GetName(), p.GetAddress())
			out = append(out, d)
		case p.GetState() != "up":
			out = append(out, down(p))
		case p.GetMaxPrefixes() > 0 && p.GetCounted() && slices.ContainsFunc(p.GetFamilies(), func(f *apiv1.BGPFamily) bool { return uint64(f.GetReceived())*10 >= uint64(p.GetMaxPrefixes())*9 }):
			out = append(out, Finding{
				Severity: Warning, Check: "bgp-limit", Object: p.GetName(), Field: "maxPrefixes",
				What:  fmt.Sprintf("BGP peer %s announces nearly as many prefixes as its limit allows: %d", peerName(p), p.GetMaxPrefixes()),
				Cause: "the session ends when it announces more", Cure: "routerctl bgp routes " + p.GetAddress(),
			})
		}
	}
	return out
}

// hidden finds peers that a filter of exports keeps this host's blocks from, each once.
func hidden(f Facts) []Finding {
	var out []Finding
	said := map[string]int{}
	for _, h := range f.Hidden {
		if i, ok := said[h.Peer]; ok {
			out[i].What += ", nor of " + h.Prefix.String()
			continue
		}
		said[h.Peer] = len(out)
		out = append(out, Finding{
			Severity: Warning, Check: "hidden-block", Object: h.Peer, Field: "filters",
			What:  fmt.Sprintf("BGP peer %s does not receive this host's block %s: %s", peerName(&apiv1.BGPPeer{Name: h.Peer, Address: h.Addr.String()}), h.Prefix, h.Reason),
			Cause: "routers that learn routes from that peer cannot reach the workloads of the block",
			Cure:  fmt.Sprintf("routerctl get bgpfilters %s -o yaml # let its export rules accept %s", h.Filter, h.Prefix),
		})
	}
	return out
}

func peerName(p *apiv1.BGPPeer) string {
	if p.GetName() == "" || p.GetName() == p.GetAddress() {
		return p.GetAddress()
	}
	return fmt.Sprintf("%s (%s)", p.GetName(), p.GetAddress())
}

func down(p *apiv1.BGPPeer) Finding {
	d := Finding{
		Severity: Critical, Check: "bgp-session", Object: p.GetName(),
		What: fmt.Sprintf("BGP session with %s is down: %s", peerName(p), p.GetInfo()), Cause: p.GetInfo(), Cure: "routerctl events bgp",
	}
	for _, r := range remedies() {
		if strings.Contains(p.GetInfo(), r.text) {
			d.Cure = strings.NewReplacer("$PEER", p.GetAddress(), "$NAME", p.GetName()).Replace(r.cure)
			break
		}
	}
	return d
}

// pools finds pools that this host cannot serve.
func pools(f Facts) []Finding {
	var out []Finding
	for _, p := range f.Node.GetPools() {
		switch {
		case !p.GetUsable():
			d := Finding{
				Severity: Critical, Check: "pool", Object: p.GetName(), Field: strings.ToLower(p.GetEncapsulation()),
				What: fmt.Sprintf("this host cannot serve pool %s (%s, %s): %s", p.GetName(), p.GetCidr(), p.GetEncapsulation(), p.GetReason()), Cause: p.GetReason(),
				Cure: "routerctl get ippools " + p.GetName() + " -o yaml",
			}
			if name, ok := module(p.GetReason()); ok {
				d.Cure = "modprobe " + name
			}
			out = append(out, d)
		case p.GetReason() != "":
			out = append(out, Finding{
				Severity: Warning, Check: "pool-change", Object: p.GetName(),
				What: fmt.Sprintf("pool %s: %s", p.GetName(), p.GetReason()), Cause: p.GetReason(), Cure: "routerctl pool status " + p.GetName(),
			})
		}
	}
	return out
}

// module returns the kernel's module that a reason says is missing.
func module(reason string) (string, bool) {
	if !strings.Contains(reason, "this kernel cannot make") {
		return "", false
	}
	for _, t := range []dataplane.LinkType{dataplane.LinkIPIP, "ip6tnl", "vxlan"} {
		if strings.Contains(reason, "make "+string(t)) {
			if t == "ip6tnl" {
				return "ip6_tunnel", true
			}
			return string(t), true
		}
	}
	return "", false
}

// awaits reports whether a session may come up by itself yet.
func (f Facts) awaits(p *apiv1.BGPPeer) bool {
	return p.GetState() != "up" && f.silent(p) == "" && p.GetDue() != nil && f.Now.Before(p.GetDue().AsTime())
}

// silent returns the device on which nobody answers for a peer's address; empty: somebody does, or nobody was asked.
func (f Facts) silent(p *apiv1.BGPPeer) string {
	a, err := netip.ParseAddr(p.GetAddress())
	if err != nil {
		return ""
	}
	return f.Silent[a]
}

// Awaited says of which sessions it is not known yet whether they come up.
func Awaited(f Facts) []string {
	var out []string
	for _, p := range f.Node.GetPeers() {
		if f.awaits(p) {
			out = append(out, fmt.Sprintf("BGP session with %s: it is not up yet; by the timers of both sides it may take %v more: %s", peerName(p), p.GetDue().AsTime().Sub(f.Now).Round(time.Second), p.GetInfo()))
		}
	}
	return out
}
