package operator

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/control/attach"
	"github.com/routerd/routerd/control/doctor"
	"github.com/routerd/routerd/control/rib"
	"github.com/routerd/routerd/control/trace"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/dataplane/neighbour"
	"github.com/routerd/routerd/dataplane/survey"
	"github.com/routerd/routerd/store"
)

// resolveWithin is how long the kernel takes at most to find out that a neighbour does
// not answer: three requests, a second apart (RFC 4861, section 7.2.2; in IPv4 likewise).
const resolveWithin = 3500 * time.Millisecond

// look gathers what this host knows of one packet. Its examination has what is known of the
// host at large, for the two ends of the packet.
type look struct {
	*examination
	req    *apiv1.LookRequest
	asker  *survey.Asker
	facts  trace.Facts
	peers  map[netip.Addr]string // the other end's host by its addresses on the underlay
	here   attach.Endpoint       // the local end; without a device: this host itself
	there  attach.Endpoint       // the other end, if it is a workload of this host
	uplink string
	own    netip.Addr // this host's address on the underlay
	link   []string   // the devices of routerd's route to the other end
	best   rib.Candidate
}

// Look implements [rpc.Doctor]: it says what becomes of a packet on this host.
func (s *Server) Look(ctx context.Context, req *apiv1.LookRequest) (*apiv1.LookResponse, error) {
	local, err := netip.ParseAddr(req.GetLocal())
	if err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "local %q: want an address", req.GetLocal())
	}
	remote, err := netip.ParseAddr(req.GetRemote())
	if err != nil || remote.Is4() != local.Is4() {
		return nil, status.Errorf(codes.InvalidArgument, "remote %q: want an address of the family of %s", req.GetRemote(), local)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, lookWithin, fmt.Errorf("no answer within %v", lookWithin))
	defer cancel()
	n, err := s.Node(ctx)
	if err != nil {
		return nil, err
	}
	asker, err := survey.Open()
	if err != nil {
		return nil, err
	}
	defer asker.Close()
	l := &look{
		examination: &examination{s: s, v: s.view(ctx, s.sessions())}, req: req, asker: asker, peers: map[netip.Addr]string{},
		facts:  trace.Facts{Node: s.cfg.Node, Remote: remote, Peer: req.GetPeer(), Size: int(req.GetSize()), Answers: req.GetAnswers()},
		uplink: n.GetUplink(),
	}
	if local.Is6() {
		l.uplink = n.GetIpv6Uplink()
	}
	l.examination.facts.Node = n
	l.ends(local)
	out := &apiv1.LookResponse{Node: s.cfg.Node}
	if l.facts.Local.Lost == "" {
		l.gather(ctx)
	}
	out.Out, out.In = trace.Look(l.facts)
	out.Tunnel, out.Unknown = l.facts.Tunnel, l.unknown
	return out, nil
}

// ends finds out what the ends are.
func (l *look) ends(local netip.Addr) {
	e := trace.End{Name: l.facts.Node, Addr: local}
	own := false
	u, _ := l.s.cfg.Agent.Underlay()
	for _, a := range u.Addresses {
		own = own || a.Prefix.Addr() == local
	}
	for _, h := range l.v.hosts {
		if h.Family == dataplane.FamilyOf(local) || h.Family == 0 {
			l.own = h.Addr.Addr()
		}
		own = own || h.Addr.Addr() == local || h.IPIPAddr == local || h.VXLANAddr == local
	}
	for _, w := range l.s.cfg.Attach.Endpoints() {
		switch {
		case slices.Contains(w.Addresses, local):
			l.here = w
			e.Name, e.Device, e.MTU, e.Lost = workloadName(w), w.Device, w.MTU, w.Lost
			if w.State != "attached" {
				e.Lost = cmp.Or(e.Lost, "its attachment is not complete: it is "+w.State)
			}
		case slices.Contains(w.Addresses, l.facts.Remote):
			l.there = w
		}
	}
	if e.Device == "" && !own {
		e.Device, e.Lost = "no device", "the datastore says that it is on this host, but no workload here has the address"
	}
	l.facts.Local = e
}

// gather fills in the facts.
func (l *look) gather(ctx context.Context) {
	f := &l.facts
	l.underlay()
	l.judge()
	if err := l.route(ctx); err != nil {
		l.set(func() { l.unknown = append(l.unknown, fmt.Sprintf("routes: %v", err)) })
	}
	out, in := l.packets()
	l.tunnel()
	part := func(what string, f func(context.Context) error) {
		l.wg.Go(func() {
			if err := f(ctx); err != nil {
				l.set(func() { l.unknown = append(l.unknown, fmt.Sprintf("%s: %v", what, err)) })
			}
		})
	}
	part("the host", l.host)
	part("the next hop", l.nextHop)
	if f.Peer != "" && f.Peer != f.Node {
		part("the underlay", l.paths)
		part("tunnels", l.echoes)
		part("addresses", func(ctx context.Context) error { return l.claims(ctx, l.peers) })
	}
	if l.here.Device != "" {
		part("the workload", l.workload)
	}
	l.wg.Wait()
	slices.Sort(l.unknown)
	l.narrow(out, in)
}

// judge has the rules of this host judge the connection's first packet, and the tunnel's
// packets of the other end's host.
func (l *look) judge() {
	p := l.s.PolicyServer
	r := l.req
	flow := filter.Flow{In: l.here.Device, Out: l.there.Device, Packet: filter.Packet{
		Src: l.facts.Local.Addr, Dst: l.facts.Remote, Protocol: uint8(r.GetProtocol()), //nolint:gosec // as it was read
		SrcPort: uint16(r.GetSourcePort()), DstPort: uint16(r.GetPort()), ICMPType: uint8(r.GetIcmpType()), //nolint:gosec // the same
	}}
	elsewhere := l.facts.Peer != l.facts.Node
	switch {
	case !elsewhere && r.GetAnswers():
		return // the other end's answer has it
	case r.GetAnswers():
		flow.Packet.Src, flow.Packet.Dst = flow.Packet.Dst, flow.Packet.Src
		flow.In, flow.Out = otherHosts, l.here.Device
	case elsewhere:
		flow.Out = otherHosts
	}
	if err := p.able(); err != nil {
		l.facts.Verdict = &trace.Verdict{Allowed: true, By: status.Convert(err).Message()}
		return
	}
	l.facts.Verdict = p.verdict(flow)
}

// verdict judges a flow by the rules in force.
func (p *PolicyServer) verdict(f filter.Flow) (out *trace.Verdict) {
	p.cfg.Enforcer.View(func(r *filter.Ruleset) { out = verdictOf(r, f) })
	return out
}

// verdictOf judges a flow by rules.
func verdictOf(r *filter.Ruleset, f filter.Flow) *trace.Verdict {
	v := r.Judge(f)
	steps := showSteps(r, v)
	last, id := steps[len(steps)-1], v.Steps[len(v.Steps)-1].Policy
	out := &trace.Verdict{Allowed: v.Allowed, By: last.GetReason()}
	if last.GetRule() >= 0 {
		out.By = fmt.Sprintf("%s rule %d: %s", last.GetPolicy(), last.GetRule(), last.GetMatch())
	}
	if last.GetEndpoint() != "" {
		out.By += fmt.Sprintf(" (%s of %s)", strings.ToLower(last.GetDirection()), last.GetEndpoint())
	}
	out.Cure = fmt.Sprintf("routerctl policy explain --from %s --to %s --proto %s --port %d # then let a policy allow it", f.Packet.Src, f.Packet.Dst, filter.ProtocolName(f.Packet.Protocol), f.Packet.DstPort)
	key := store.Key{Kind: store.Kind(id.Kind), Namespace: id.Namespace, Name: id.Name}
	if _, foreign := key.KubernetesName(); last.GetRule() >= 0 && !foreign {
		out.Cure = "routerctl get " + strings.ToLower(id.Kind) + " " + id.Name
		if id.Namespace != "" {
			out.Cure += " -n " + id.Namespace
		}
		out.Cure += " -o yaml # then let its rules allow it"
	}
	return out
}

// route finds routerd's route to the other end.
func (l *look) route(ctx context.Context) error {
	remote := l.facts.Remote
	if l.there.Device != "" {
		l.link = []string{l.there.Device}
		l.facts.Want = &trace.Want{Prefix: netip.PrefixFrom(remote, remote.BitLen()), Source: "this host's workloads", Links: "dev " + l.there.Device}
		return nil
	}
	cands, err := l.s.cfg.Core.Explain(ctx, netip.PrefixFrom(remote, remote.BitLen()))
	if err != nil {
		return err
	}
	cands = slices.DeleteFunc(cands, func(c rib.Candidate) bool { return !c.Prefix.Contains(remote) })
	l.lost(ctx, cands)
	for _, c := range cands { // in prefix order: the last one is the longest
		if c.NextHop.IsValid() && c.Peer == l.facts.Peer {
			l.peers[c.NextHop] = c.Peer
		}
		if c.Best && c.Source != rib.SourceLocal {
			l.best = c
		}
	}
	c := l.best
	if !c.Best {
		return nil
	}
	l.link = strings.FieldsFunc(c.Link, func(r rune) bool { return r == ',' || r == ' ' })
	w := &trace.Want{Prefix: c.Prefix, Peer: c.Peer, Encap: trace.EncapName(c.Encap), Source: "the datastore", Links: "dev " + c.Link}
	if c.Source == rib.SourceBGP {
		w.Source = "BGP"
	}
	if c.Via.IsValid() {
		w.Links = "via " + c.Via.String() + " " + w.Links
	}
	l.facts.Want = w
	return nil
}

// packets asks the kernel where it sends the packet, and one that comes from the other
// end.
func (l *look) packets() (out, in []doctor.Way) {
	local, remote := l.facts.Local, l.facts.Remote
	p := survey.Packet{From: local.Addr, To: remote, In: l.here.Device}
	w := doctor.Way{Packet: p, Node: cmp.Or(l.facts.Peer, "outside"), Want: l.link, Via: l.best.Via}
	w.Hop, w.Err = l.asker.Ask(p)
	if w.Want == nil && w.Err == nil {
		w.Want = []string{w.Hop.Device} // routerd says nothing of it
	}
	device := w.Hop.Device
	if w.Err != nil && len(l.link) > 0 {
		device = l.link[0]
	}
	if device != "" && device != "lo" {
		l.facts.Device = lookAt(device)
	}
	via := l.link
	if l.facts.Peer == "" {
		via = []string{l.uplink}
	}
	if l.here.Device == "" || l.facts.Peer == l.facts.Node {
		via = nil
	}
	for _, link := range via {
		b := doctor.Way{Packet: survey.Packet{From: remote, To: local.Addr, In: link}, Node: w.Node, Want: []string{local.Device}}
		b.Hop, b.Err = l.asker.Ask(b.Packet)
		in = append(in, b)
	}
	return []doctor.Way{w}, in
}

func lookAt(name string) *trace.Device {
	d := &trace.Device{Name: name}
	i, err := net.InterfaceByName(name)
	if err != nil {
		d.Err = err
		return d
	}
	d.Up, d.MTU = i.Flags&net.FlagUp != 0 && i.Flags&net.FlagRunning != 0, i.MTU
	return d
}

// tunnel looks at the entries by which a tunnel finds the other host.
func (l *look) tunnel() {
	c, f := l.best, &l.facts
	if !c.Best || len(l.link) == 0 {
		return
	}
	var protocol uint8
	var port uint16
	switch c.Encap.Driver {
	case dataplane.DriverIPIP:
		protocol = 4
		if c.Encap.Outer == dataplane.IPv6 && f.Remote.Is6() {
			protocol = 41
		}
	case dataplane.DriverVXLAN:
		protocol, port = 17, c.Encap.Port
	default:
		return
	}
	f.Outer = cmp.Or(c.NextHop, c.Via)
	f.Tunnel = &apiv1.LookResponse_Tunnel{Device: l.link[0], Encapsulation: c.Encap.String(), Local: l.own.String()}
	if c.Encap.Driver == dataplane.DriverVXLAN {
		l.entries(c.Via, l.link[0])
	}
	f.Tunnel.Remote = f.Outer.String()
	if _, err := l.asker.Ask(survey.Packet{To: f.Outer}); err != nil {
		f.OuterErr = err
	}
	if p := l.s.PolicyServer; p.able() == nil {
		f.Takes = p.verdict(filter.Flow{In: l.uplink, Packet: filter.Packet{Src: f.Outer, Dst: l.own, Protocol: protocol, DstPort: port}})
		f.Takes.By = fmt.Sprintf("%s packets of %s (%s): %s", c.Encap, f.Peer, f.Outer, f.Takes.By)
		f.Takes.Cure = "routerctl get node " + f.Peer + " -o yaml # its addresses; then routerctl policy show"
	}
}

// entries compares a VXLAN device's entries for a host with those that routerd wants.
func (l *look) entries(gateway netip.Addr, device string) {
	f := &l.facts
	note := func(err error) {
		if err != nil {
			l.set(func() { l.unknown = append(l.unknown, fmt.Sprintf("entries of %s: %v", device, err)) })
		}
	}
	next := &trace.Pair{Of: gateway.String(), Device: device}
	if st, ok := l.s.cfg.Kernel.Status(dataplane.NeighbourKey{Link: device, Addr: gateway}); ok {
		if n, ok := st.Object.(dataplane.Neighbour); ok {
			next.Wanted, next.Want = true, survey.Permanent(n.MAC, netip.Addr{})
			next.Add = fmt.Sprintf("ip neigh replace %s lladdr %s nud permanent dev %s", gateway, n.MAC, device)
		}
	}
	var err error
	next.Have, err = l.asker.Neighbour(device, gateway)
	note(err)
	f.Neighbour = next
	mac := next.Have.MAC
	if next.Wanted {
		mac = next.Want.MAC
	}
	to := &trace.Pair{Of: mac.String(), Device: device}
	if st, ok := l.s.cfg.Kernel.Status(dataplane.FDBKey{Link: device, MAC: mac}); ok {
		if e, ok := st.Object.(dataplane.FDBEntry); ok {
			to.Wanted, to.Want, f.Outer = true, survey.Permanent(mac, e.Dst), e.Dst
			to.Add = fmt.Sprintf("bridge fdb replace %s dev %s dst %s self permanent", mac, device, e.Dst)
		}
	}
	to.Have, err = l.asker.Forwarding(device, mac)
	note(err)
	f.Forwarding = to
	f.Tunnel.RemoteMac = mac.String()
	if i, err := net.InterfaceByName(device); err == nil {
		f.Tunnel.LocalMac = i.HardwareAddr.String()
	}
}

// nextHop finds the neighbour on the underlay to whom packets go next, and has the kernel
// find out whether it is there if it does not know.
func (l *look) nextHop(ctx context.Context) error {
	to := survey.Packet{From: l.facts.Local.Addr, To: l.facts.Remote, In: l.here.Device}
	if l.facts.Outer.IsValid() {
		to = survey.Packet{To: l.facts.Outer}
	}
	hop, err := l.asker.Ask(to)
	if err != nil || hop.Device == "lo" || l.facts.Peer == l.facts.Node {
		return nil // which is said elsewhere
	}
	n := &trace.NextHop{Addr: hop.Gateway, Device: hop.Device}
	if !n.Addr.IsValid() {
		n.Addr = to.To
	}
	i, err := net.InterfaceByName(hop.Device)
	if err != nil || len(i.HardwareAddr) == 0 || i.Flags&net.FlagUp == 0 {
		return err // without MAC addresses there are no neighbours
	}
	if n.Entry, err = l.asker.Neighbour(n.Device, n.Addr); err != nil {
		return err
	}
	if !n.Entry.Resolved() {
		if n.Entry, err = l.resolve(ctx, i.Index, *n); err != nil {
			return err
		}
	}
	l.set(func() { l.facts.NextHop = n })
	return nil
}

// resolve has the kernel ask for a neighbour, and returns what came of it.
func (l *look) resolve(ctx context.Context, index int, n trace.NextHop) (survey.Entry, error) {
	asker, err := neighbour.Open()
	if err != nil {
		return survey.Entry{}, err
	}
	defer asker.Close() //nolint:errcheck // nothing is lost
	if err := asker.Ask(index, n.Addr); err != nil {
		return survey.Entry{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, resolveWithin)
	defer cancel()
	for {
		e, err := l.asker.Neighbour(n.Device, n.Addr)
		if err != nil || e.Resolved() || e.Failed() {
			return e, err
		}
		if async.Sleep(ctx, 20*time.Millisecond) != nil {
			return e, nil
		}
	}
}

// workload compares the local end with what ADD made.
func (l *look) workload(ctx context.Context) error {
	err := l.s.cfg.Attach.Check(ctx, attach.CheckRequest{ID: l.here.ID})
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err != nil {
		l.set(func() {
			l.examination.facts.Pods = []doctor.Pod{{Name: workloadName(l.here), Device: l.here.Device, Err: err}}
		})
	}
	return nil
}

// narrow leaves of what is known of the host what concerns the packet.
func (l *look) narrow(out, in []doctor.Way) {
	f := l.examination.facts
	peer := l.facts.Peer
	f.Nodes = l.peers
	f.Paths = slices.DeleteFunc(slices.Clone(f.Paths), func(p *apiv1.Path) bool { return p.GetNode() != peer })
	f.Echoes = slices.DeleteFunc(slices.Clone(f.Echoes), func(e doctor.Echo) bool { return e.Node != peer || !slices.Contains(l.link, e.Device) })
	f.Barred = slices.DeleteFunc(slices.Clone(f.Barred), func(b doctor.Barred) bool { return b.Node != peer })
	failed := f.Failed
	f.Failed, f.Foreign = nil, nil
	l.facts.Out, l.facts.In = f, f
	for _, r := range l.s.foreignRoutes(l.v) {
		n := doctor.Foreign{Theirs: r.String(), Ours: r.Ours()}
		if r.Takes().Contains(l.facts.Remote) {
			l.facts.Out.Foreign = append(l.facts.Out.Foreign, n)
		}
		if r.Takes().Contains(l.facts.Local.Addr) {
			l.facts.In.Foreign = append(l.facts.In.Foreign, n)
		}
	}
	if w := l.facts.Want; w != nil {
		l.facts.Out.Failed = slices.DeleteFunc(slices.Clone(failed), func(o *apiv1.ObjectStatus) bool { return !strings.Contains(o.GetObject(), w.Prefix.String()) })
	}
	l.facts.Out.Ways, l.facts.In.Ways = out, in
	l.facts.In.Lost = nil
}

// errAlone says that the datastore passes no questions on.
var errAlone = errors.New("with the Kubernetes datastore, hosts cannot query each other")

// errItsVersion says that another host's daemon cannot answer what was asked.
var errItsVersion = errors.New("its routerd is an older version, which does not support this query: upgrade it, or run the command on that host")

// errOtherVersion says that a question came from a daemon that knows more, which knows it by this text.
var errOtherVersion = errors.New("this host's routerd is another version, which does not support this query")
