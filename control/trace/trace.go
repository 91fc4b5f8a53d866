// Package trace says what becomes of a packet between two ends of the cluster, step by
// step over the hosts of both, and names the first thing that is wrong.
//
// It is pure: each host gathers the [Facts] of its own part, [Look] makes steps of them,
// and [Join] makes of both hosts' steps the way there and back. What is wrong with a
// host at large is found by package doctor, of facts that are narrowed to the packet.
package trace

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/doctor"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/survey"
)

// Facts is what a host knows of its part of a packet's way.
type Facts struct {
	Node   string
	Local  End
	Remote netip.Addr
	Peer   string // the host of the other end; empty: outside of the cluster
	Size   int    // bytes, of a packet to the other end; 0: what the local end's device takes
	// Answers says that the first packet of the connection comes from the other end.
	Answers bool

	Verdict *Verdict // of the connection's first packet on this host; nil: nobody judges it here
	Want    *Want    // by routerd's table; nil: it has no route for the other end
	Device  *Device  // by which the kernel lets the packet leave
	// Of a tunnel of VXLAN: the neighbour entry of the gateway, and where frames for
	// its MAC address are sent.
	Neighbour, Forwarding *Pair
	Outer                 netip.Addr // where a tunnel's packets go to; invalid: there is no tunnel
	OuterErr              error      // why the kernel has no way there
	NextHop               *NextHop   // on the underlay; nil: not known
	Takes                 *Verdict   // whether tunnel packets of the other end's host are accepted; nil: there is no tunnel
	Tunnel                *apiv1.LookResponse_Tunnel

	// Out and In are the doctor's facts, narrowed to what concerns a packet to the
	// other end and one from there.
	Out, In doctor.Facts
}

// End is where a packet starts or arrives.
type End struct {
	Name   string
	Device string // of a workload, on its host; empty: the host itself
	Addr   netip.Addr
	MTU    int    // bytes
	Lost   string // why a workload has no route; empty: it has
}

// Verdict is what rules say of a packet.
type Verdict struct {
	Allowed bool
	By      string // what decides
	Cure    string // where it is not allowed
}

// Want is where routerd's route leads.
type Want struct {
	Prefix netip.Prefix
	Source string // where it is known from
	Peer   string // the node, or the BGP peer
	Encap  string // as people name it; empty: none
	Links  string // the devices, with the gateway
}

// Device is a network device.
type Device struct {
	Name string
	Err  error // why it could not be looked at
	Up   bool
	MTU  int
}

// Pair is an entry as routerd wants it, and as the kernel has it.
type Pair struct {
	Of         string // what it is for
	Device     string
	Want, Have survey.Entry
	Wanted     bool // routerd wants there to be one
	Add        string
}

// same reports whether packets go where routerd has them go.
func (p Pair) same() bool {
	return p.Have.Resolved() && (!p.Wanted || p.Have.MAC == p.Want.MAC && p.Have.Dst == p.Want.Dst)
}

// NextHop is a neighbour on the underlay.
type NextHop struct {
	Addr   netip.Addr
	Device string
	Entry  survey.Entry
}

// The names of steps.
const (
	stepWorkload   = "workload"
	stepHost       = "host"
	stepPolicy     = "policy"
	stepFilter     = "packet filter"
	stepRoute      = "route"
	stepKernel     = "kernel"
	stepDevice     = "device"
	stepNeighbour  = "tunnel neighbour"
	stepForwarding = "tunnel forwarding"
	stepUnderlay   = "underlay"
	stepNextHop    = "next hop"
	stepTunnel     = "tunnel"
	stepSource     = "tunnel source"
)

// leg makes the steps of one direction.
type leg struct {
	found []doctor.Finding // what the doctor finds
	steps []*apiv1.Step
}

func newLeg(node string, f doctor.Facts) *leg {
	f.Node = &apiv1.NodeResponse{Name: node, Uplink: f.Node.GetUplink(), Ipv6Uplink: f.Node.GetIpv6Uplink()} // its sessions and pools are no part of the way
	return &leg{found: doctor.Examine(f)}
}

// add adds a step, with what the doctor's checks of these names found.
func (l *leg) add(name, what string, own []doctor.Finding, checks ...string) {
	s := &apiv1.Step{Name: name, What: what}
	for _, f := range l.found {
		if slices.Contains(checks, f.Check) {
			s.Findings = append(s.Findings, f.Proto())
		}
	}
	for _, f := range own {
		s.Findings = append(s.Findings, f.Proto())
	}
	l.steps = append(l.steps, s)
}

// Look returns the steps of a packet on a host, to the other end and from there.
func Look(f Facts) (out, in []*apiv1.Step) {
	fit(&f)
	to, from := newLeg(f.Node, f.Out), newLeg(f.Node, f.In)
	f.end(to)
	if !f.Answers {
		f.policy(to)
	}
	f.filter(to)
	f.leave(to)
	if f.Peer != f.Node {
		f.arrive(from)
	}
	if f.Answers {
		f.policy(from)
	}
	f.end(from)
	return to.steps, from.steps
}

// fit says of what is too small on the way whether it is for this packet: what the packet
// fits is left out, and what it does not is told as what loses it.
func fit(f *Facts) {
	if f.Size == 0 {
		f.Size = f.Local.MTU
	}
	for _, d := range []*doctor.Facts{&f.Out, &f.In} {
		d.Echoes = slices.Clone(d.Echoes)
		for i, e := range d.Echoes {
			if f.Size > 0 && e.Size >= f.Size {
				d.Echoes[i].Full = e.Size // it is large enough
			}
		}
		if f.Size+f.overhead() <= smallest(d.Paths) {
			d.Paths = nil
		}
	}
}

// smallest returns the smallest MTU of paths that is known.
func smallest(paths []*apiv1.Path) int {
	out := int(^uint(0) >> 1)
	for _, p := range paths {
		if p.GetMtu() > 0 {
			out = min(out, int(p.GetMtu()))
		}
	}
	return out
}

// overhead is how much longer the packet is in its tunnel (RFC 2003, RFC 2473, RFC 7348).
func (f Facts) overhead() int {
	n := 0
	switch {
	case !f.Outer.IsValid():
		return 0
	case f.Outer.Is6():
		n = 40
	default:
		n = 20
	}
	if f.Forwarding != nil {
		n += 8 + 8 + 14 // UDP, VXLAN, Ethernet
	}
	return n
}

// end is the local end.
func (f Facts) end(l *leg) {
	e := f.Local
	if e.Device == "" {
		l.add(stepHost, fmt.Sprintf("%s, %s", e.Name, e.Addr), nil)
		return
	}
	var own []doctor.Finding
	if e.Lost != "" {
		own = append(own, doctor.Finding{
			Severity: doctor.Critical, Check: "workload-lost", Node: f.Node, Device: e.Device, Object: e.Name,
			What: fmt.Sprintf("workload %s has no route: %s", e.Name, e.Lost), Cause: e.Lost, Cure: "routerctl ipam show --ip=" + e.Addr.String(),
		})
	}
	l.add(stepWorkload, fmt.Sprintf("%s, %s, by %s, MTU %d", e.Name, e.Addr, e.Device, e.MTU), own, "workload")
}

func (f Facts) policy(l *leg) {
	if f.Verdict == nil {
		return
	}
	var own []doctor.Finding
	word := "allowed"
	if !f.Verdict.Allowed {
		word = "denied"
		own = append(own, doctor.Finding{
			Severity: doctor.Critical, Check: "policy", Node: f.Node, Object: f.Verdict.By,
			What: fmt.Sprintf("policy denies it: %s", f.Verdict.By), Cause: "the rules of the datastore say so", Cure: f.Verdict.Cure,
		})
	}
	l.add(stepPolicy, word+": "+f.Verdict.By, own)
}

// filter is what other programs' rules do with what is forwarded.
func (f Facts) filter(l *leg) {
	if f.Local.Device != "" {
		l.add(stepFilter, "the rules of other programs", nil, "felix-rules", "forward-drop", "table-full")
	}
}

// leave is the way out of the host.
func (f Facts) leave(l *leg) {
	routed := "none of routerd's"
	if w := f.Want; w != nil {
		routed = fmt.Sprintf("%s %s, from %s", w.Prefix, w.Links, w.Source)
		if w.Peer != "" {
			routed += " (" + w.Peer + ")"
		}
		if w.Encap != "" {
			routed += ", " + w.Encap
		}
	}
	l.add(stepRoute, routed, nil, "no-route", "foreign-route", "foreign-rule", "kernel-refuses")
	l.add(stepKernel, ways(f.Out.Ways), nil, "way")
	f.device(l)
	if f.Peer == f.Node {
		return
	}
	f.pair(l, stepNeighbour, f.Neighbour)
	f.pair(l, stepForwarding, f.Forwarding)
	f.underlay(l)
	f.nextHop(l)
	if f.Outer.IsValid() {
		l.add(stepTunnel, echoes(f.Out.Echoes), nil, "tunnel", "tunnel-offload", "tunnel-mtu")
	}
}

// device is that by which the kernel lets packets leave.
func (f Facts) device(l *leg) {
	d := f.Device
	if d == nil {
		return
	}
	var own []doctor.Finding
	what := fmt.Sprintf("%s up, MTU %d", d.Name, d.MTU)
	wrong := func(check, cure, format string, args ...any) {
		what = fmt.Sprintf(format, args...)
		own = append(own, doctor.Finding{Severity: doctor.Critical, Check: check, Node: f.Node, Device: d.Name, Object: d.Name, What: what, Cure: cure})
	}
	switch {
	case d.Err != nil:
		wrong("device", "systemctl restart routerd # if it is routerd's: it makes the device anew", "device %s cannot be looked at: %v", d.Name, d.Err)
	case !d.Up:
		wrong("device", "ip link set "+d.Name+" up", "device %s is down", d.Name)
	case f.Size > d.MTU:
		wrong("mtu", fmt.Sprintf("routerctl node paths # and send at most %d bytes, or raise the MTU of the underlay and of %s", d.MTU, d.Name),
			"a packet of %d bytes does not fit %s, which takes %d", f.Size, d.Name, d.MTU)
	}
	l.add(stepDevice, what, own)
}

// pair is an entry of a VXLAN device.
func (f Facts) pair(l *leg, step string, p *Pair) {
	if p == nil {
		return
	}
	var own []doctor.Finding
	if !p.same() {
		own = append(own, doctor.Finding{
			Severity: doctor.Critical, Check: strings.ReplaceAll(step, " ", "-"), Node: f.Node, Device: p.Device, Object: p.Of,
			What:  fmt.Sprintf("the entry of %s on %s is %s, and should be %s", p.Of, p.Device, p.Have, p.Want),
			Cause: "another program changed it, and routerd has not mended it yet", Cure: p.Add,
		})
	}
	l.add(step, fmt.Sprintf("%s on %s: %s", p.Of, p.Device, p.Have), own)
}

// underlay is the way between the hosts.
func (f Facts) underlay(l *leg) {
	var own []doctor.Finding
	what := "not encapsulated"
	if f.Outer.IsValid() {
		what = "to " + f.Outer.String()
	}
	if f.OuterErr != nil {
		own = append(own, doctor.Finding{
			Severity: doctor.Critical, Check: "underlay", Node: f.Node, Object: f.Outer.String(),
			What: fmt.Sprintf("this host does not reach %s (%s) over the underlay: %v", f.Peer, f.Outer, f.OuterErr), Cause: f.OuterErr.Error(),
			Cure: "ip route get " + f.Outer.String() + " # then add the route, usually a default route by the uplink",
		})
	}
	l.add(stepUnderlay, what, own, "uplink-down", "address-missing", "duplicate-address", "path-mtu")
}

func (f Facts) nextHop(l *leg) {
	n := f.NextHop
	if n == nil {
		return
	}
	var own []doctor.Finding
	if !n.Entry.Resolved() {
		own = append(own, doctor.Finding{
			Severity: doctor.Critical, Check: "next-hop", Node: f.Node, Device: n.Device, Object: n.Addr.String(),
			What:  fmt.Sprintf("nobody answers for %s on %s, to whom packets go next", n.Addr, n.Device),
			Cause: "it is down, on another link, or has another address", Cure: fmt.Sprintf("tcpdump -ni %s 'arp or icmp6' # and look whether %s is there and up", n.Device, n.Addr),
		})
	}
	l.add(stepNextHop, fmt.Sprintf("%s dev %s %s", n.Addr, n.Device, n.Entry), own, "fixed-neighbour")
}

// arrive is the way into the host.
func (f Facts) arrive(l *leg) {
	if t := f.Takes; t != nil {
		var own []doctor.Finding
		if !t.Allowed {
			own = append(own, doctor.Finding{
				Severity: doctor.Critical, Check: "tunnel-source", Node: f.Node, Object: f.Peer,
				What: fmt.Sprintf("tunnel packets of %s are not accepted: %s", f.Peer, t.By), Cause: "its Node has not come here, or it has another address than that", Cure: t.Cure,
			})
		}
		l.add(stepSource, t.By, own)
	}
	f.filter(l)
	l.add(stepKernel, ways(f.In.Ways), nil, "foreign-route", "foreign-rule", "rp-filter", "way")
}

// ways says where the kernel sends packets.
func ways(list []doctor.Way) string {
	var out []string
	for _, w := range list {
		said := w.Hop.String()
		if w.Err != nil {
			said = w.Err.Error()
		}
		out = append(out, fmt.Sprintf("%s: %s", w.Packet, said))
	}
	if out == nil {
		return "not asked: by which device it comes in depends on the other end"
	}
	return strings.Join(out, "; ")
}

// echoes says what probes found.
func echoes(list []doctor.Echo) string {
	if len(list) == 0 {
		return "not asked"
	}
	e := list[0]
	switch {
	case !e.Answered:
		return "no answer by " + e.Device
	case e.Size < e.Full:
		return fmt.Sprintf("%s answers by %s, packets of up to %d bytes", e.Node, e.Device, e.Size)
	}
	return fmt.Sprintf("%s answers by %s, full packets too", e.Node, e.Device)
}

// EncapName is how people name what packets travel in.
func EncapName(e dataplane.Encap) string {
	switch e.Driver {
	case dataplane.DriverIPIP:
		return "IPIP"
	case dataplane.DriverVXLAN:
		return fmt.Sprintf("VXLAN %d", e.VNI)
	}
	return "not encapsulated"
}
