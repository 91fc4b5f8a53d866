package trace

import (
	"fmt"
	"net/netip"
	"slices"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/doctor"
)

// ServiceProbeFacts is what hosts saw of a packet that was sent to an address of a Service, or to a port of a node, whose
// addresses the proxy of Services translates on its way.
type ServiceProbeFacts struct {
	Protocol  uint8
	Err       error          // why it was not sent
	To        netip.AddrPort // as it was sent
	Proxy     string         // the node whose proxy takes it
	Hosts     []ProbeEnd     // in the order in which the packet comes by; the first is the sender's
	Endpoints []ProbeEndpoint
	Unknown   []string // what nobody watched, and why
}

// ProbeEndpoint is an endpoint that the proxy may choose.
type ProbeEndpoint struct {
	Addr   netip.AddrPort
	Node   string
	Device string // of a workload
	Name   string // for people
}

// AddServiceProbe adds to a trace to a Service what became of a packet that was sent. Where nothing else is found to be wrong and
// the packet was not translated, or it or an answer that must come is lost, that is the fault.
func AddServiceProbe(out *apiv1.TraceResponse, f ServiceProbeFacts) {
	p := &apiv1.Probe{Packet: out.GetPacket(), Unknown: f.Unknown}
	out.Probe = p
	addSightings(p, f.Hosts)
	e, chosen := f.chosen(p)
	p.Answered = len(f.Hosts) > 0 && arrived(f.Hosts[0], true)
	p.Delivered = chosen && e.reached(p) || f.mayBeOwn(p)
	bare := f.Err == nil && f.untranslated(p)
	if p.GetAnswered() && !bare {
		p.Delivered = true // whoever watched
	}
	p.Result = f.result(p, e, chosen, bare)
	lost := f.Err == nil && len(p.GetUnknown()) == 0 && !p.GetAnswered() && (!p.GetDelivered() || answers(f.Protocol))
	if !lost && !bare || out.GetVerdict() == Broken {
		return
	}
	fault := doctor.Finding{
		Severity: doctor.Critical, Check: "probe", Node: f.Proxy, What: p.GetResult(),
		Cause: "nothing that was looked at says why; the rules of the proxy of Services are not",
	}
	if last := lastSeen(p); last != nil {
		fault.Node = last.GetNode()
	}
	fault.Cure = "routerctl doctor # on " + fault.Node
	if bare {
		fault.Check, fault.Node = "not-translated", f.Proxy
		fault.Cause = "the proxy of Services does not run there, or has no rule for this port or address, as where nodePortAddresses leaves it out"
		fault.Cure = "kubectl get pods -n kube-system -l k8s-app=kube-proxy --field-selector spec.nodeName=" + f.Proxy
	}
	out.Verdict, out.Fault = Broken, fault.Proto()
}

// chosen returns the endpoint to which the proxy has sent the packet.
func (f ServiceProbeFacts) chosen(p *apiv1.Probe) (ProbeEndpoint, bool) {
	for _, s := range p.GetSeen() {
		i := slices.IndexFunc(f.Endpoints, func(e ProbeEndpoint) bool { return e.Addr.String() == s.GetDestination() })
		if !s.GetBack() && i >= 0 && f.Endpoints[i].Addr != f.To {
			return f.Endpoints[i], true
		}
	}
	return ProbeEndpoint{}, false
}

// reached reports whether the packet was seen to reach an endpoint: to leave by a workload's device, or to come in, for a host.
func (e ProbeEndpoint) reached(p *apiv1.Probe) bool {
	return slices.ContainsFunc(p.GetSeen(), func(s *apiv1.Sighting) bool {
		return !s.GetBack() && s.GetNode() == e.Node && s.GetDestination() == e.Addr.String() &&
			(e.Device == "" && !s.GetOut() || e.Device != "" && s.GetOut() && s.GetDevice() == e.Device)
	})
}

// ownEndpoint reports whether the proxy's host is an endpoint itself: nothing is seen there of a packet after it was translated
// for that one.
func (f ServiceProbeFacts) ownEndpoint() bool {
	return slices.ContainsFunc(f.Endpoints, func(e ProbeEndpoint) bool { return e.Node == f.Proxy && e.Device == "" })
}

// mayBeOwn reports whether the packet was seen last where it comes in to a host that is an endpoint.
func (f ServiceProbeFacts) mayBeOwn(p *apiv1.Probe) bool {
	var last *apiv1.Sighting
	for _, s := range p.GetSeen() {
		if !s.GetBack() {
			last = s
		}
	}
	return last != nil && last.GetNode() == f.Proxy && !last.GetOut() && f.ownEndpoint()
}

// untranslated reports whether the proxy's host sent the packet on as it came, or answered it by itself.
func (f ServiceProbeFacts) untranslated(p *apiv1.Probe) bool {
	answered := false
	for _, s := range p.GetSeen() {
		switch {
		case s.GetNode() != f.Proxy:
		case s.GetBack():
			answered = answered || s.GetSource() == f.To.String()
		case s.GetDestination() != f.To.String():
			return false
		case s.GetOut():
			return true
		}
	}
	return answered && !f.ownEndpoint()
}

// result says in words what became of the packet.
func (f ServiceProbeFacts) result(p *apiv1.Probe, e ProbeEndpoint, chosen, bare bool) string {
	switch {
	case bare && p.GetAnswered():
		return fmt.Sprintf("%s answered it by itself: nothing there translates %s to an endpoint", f.Proxy, f.To)
	case bare:
		return fmt.Sprintf("nothing on %s translates %s to an endpoint, and it was seen last %s", f.Proxy, f.To, place(lastSeen(p)))
	case chosen:
		return outcome(p, f.Err, f.Protocol, fmt.Sprintf("it arrived at %s (%s)", e.Addr, e.Name), fmt.Sprintf("on its way to %s (%s) it was seen last", e.Addr, e.Name))
	}
	return outcome(p, f.Err, f.Protocol, "it arrived", "it was seen last")
}
