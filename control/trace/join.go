package trace

import (
	"fmt"
	"slices"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/doctor"
)

// The verdicts of a trace.
const (
	Whole   = "whole"   // nothing is wrong on the way
	Broken  = "broken"  // something is
	Unknown = "unknown" // nothing that was looked at is, and not all was
)

// Host is what the host of one end answered.
type Host struct {
	Node   string // empty: the end is outside of the cluster
	Answer *apiv1.LookResponse
	Err    error // why it did not
}

// Join makes the way of a packet, there and back, of what the hosts of its ends answer.
func Join(packet string, from, to Host) *apiv1.TraceResponse {
	out := &apiv1.TraceResponse{Packet: packet, Verdict: Whole}
	add := func(back bool, node string, steps []*apiv1.Step) {
		for _, s := range steps {
			if back && (s.GetName() == stepWorkload || s.GetName() == stepHost) {
				continue // it has been looked at on the way there
			}
			out.Hops = append(out.Hops, &apiv1.Hop{Back: back, Node: node, Step: s})
		}
	}
	compare(from, to)
	compare(to, from)
	for _, back := range []bool{false, true} {
		a, b := from, to
		if back {
			a, b = to, from
		}
		add(back, a.Node, a.Answer.GetOut())
		add(back, b.Node, b.Answer.GetIn())
	}
	for _, h := range []Host{from, to} {
		if h.Err != nil {
			out.Unknown = append(out.Unknown, fmt.Sprintf("%s: %v", h.Node, h.Err))
		}
		for _, u := range h.Answer.GetUnknown() {
			out.Unknown = append(out.Unknown, h.Node+": "+u)
		}
	}
	out.Fault = first(out.Hops)
	switch {
	case out.Fault != nil:
		out.Verdict = Broken
	case len(out.Unknown) > 0:
		out.Verdict = Unknown
	}
	return out
}

// Judged is what is known of a host that was not asked: what rules say of the first packet
// of the connection, which begins there or comes there.
func Judged(node string, begins bool, v Verdict) *apiv1.LookResponse {
	l := &leg{}
	Facts{Node: node, Verdict: &v}.policy(l)
	if begins {
		return &apiv1.LookResponse{Node: node, Out: l.steps}
	}
	return &apiv1.LookResponse{Node: node, In: l.steps}
}

// ToService fills in what becomes of a packet to a Service by the ways to its endpoints.
func ToService(out *apiv1.TraceResponse, ways []*apiv1.TraceResponse) {
	out.Ways = ways
	for _, w := range ways {
		switch {
		case w.GetVerdict() == Broken && out.GetVerdict() != Broken:
			out.Verdict, out.Fault = Broken, w.GetFault()
		case w.GetVerdict() == Unknown && out.GetVerdict() == Whole:
			out.Verdict = Unknown
		}
	}
	if len(out.GetUnknown()) > 0 && out.GetVerdict() == Whole {
		out.Verdict = Unknown
	}
}

// consequences lists the checks that say that something is lost and not why.
func consequences() []string { return []string{"tunnel", "next-hop"} }

// first returns the first thing on the way that loses the packet: what is lost and
// nobody knows why only if there is no cause on the whole way.
func first(hops []*apiv1.Hop) *apiv1.Finding {
	var effect *apiv1.Finding
	for _, h := range hops {
		for _, f := range h.GetStep().GetFindings() {
			switch {
			case !loses(f):
			case f.GetCheck() == "workload" || f.GetCheck() == "way":
				return cause(hops, h.GetNode(), f)
			case !slices.Contains(consequences(), f.GetCheck()):
				return f
			case effect == nil:
				effect = f
			}
		}
	}
	return effect
}

// cause returns what another program has on the host that takes packets from routerd's
// routes, if there is such a thing: it is the cause of what is found of a workload or of the
// kernel's answers.
func cause(hops []*apiv1.Hop, node string, found *apiv1.Finding) *apiv1.Finding {
	for _, h := range hops {
		for _, f := range h.GetStep().GetFindings() {
			if h.GetNode() == node && loses(f) && (f.GetCheck() == "foreign-route" || f.GetCheck() == "foreign-rule") {
				return f
			}
		}
	}
	return found
}

// loses reports whether a finding is of what loses this packet. What is too small is
// there only where the packet does not fit it.
func loses(f *apiv1.Finding) bool {
	return doctor.Severity(f.GetSeverity()) == doctor.Critical || f.GetCheck() == "tunnel-mtu" || f.GetCheck() == "path-mtu"
}

// compare has the sender's view of a tunnel agree with that of who accepts its packets.
func compare(sender, taker Host) {
	s, t := sender.Answer.GetTunnel(), taker.Answer.GetTunnel()
	if s == nil || t == nil || s.GetEncapsulation() != t.GetEncapsulation() {
		return // while an encapsulation is changed the two differ for a moment
	}
	if s.GetRemoteMac() == "" || t.GetLocalMac() == "" || s.GetRemoteMac() == t.GetLocalMac() {
		return
	}
	steps := sender.Answer.GetOut()
	i := slices.IndexFunc(steps, func(s *apiv1.Step) bool { return s.GetName() == stepNeighbour })
	if i < 0 {
		return
	}
	steps[i].Findings = append(steps[i].Findings, doctor.Finding{
		Severity: doctor.Critical, Check: "tunnel-mac", Node: sender.Node, Device: s.GetDevice(), Object: s.GetRemoteMac(),
		What:  fmt.Sprintf("%s sends to %s by the MAC address %s, and %s there has %s", sender.Node, taker.Node, s.GetRemoteMac(), t.GetDevice(), t.GetLocalMac()),
		Cause: "somebody changed the device there, or what its Node says of it is old",
		Cure:  fmt.Sprintf("ip link set %s address %s # on %s", t.GetDevice(), s.GetRemoteMac(), taker.Node),
	}.Proto())
}
