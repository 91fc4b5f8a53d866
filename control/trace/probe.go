package trace

import (
	"fmt"

	"golang.org/x/sys/unix"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/doctor"
)

// ProbeFacts is what the hosts of both ends saw of a packet that was sent.
type ProbeFacts struct {
	Protocol uint8
	Err      error // why it was not sent
	From, To ProbeEnd
}

// ProbeEnd is what one host saw.
type ProbeEnd struct {
	Node   string // empty: the end is outside of the cluster
	Device string // of the end, if it is a workload
	Seen   []*apiv1.Sighting
	Err    error // why it did not watch
}

// AddProbe adds to a trace what became of a packet that was sent. Where nothing else is found to be wrong and the packet, or an
// answer that must come, is lost, that is the fault.
func AddProbe(out *apiv1.TraceResponse, f ProbeFacts) {
	p := &apiv1.Probe{Packet: out.GetPacket()}
	out.Probe = p
	ends := []ProbeEnd{f.From}
	switch f.To.Node {
	case "":
	case f.From.Node:
		f.To.Seen = f.From.Seen
	default:
		ends = append(ends, f.To)
	}
	addSightings(p, ends)
	p.Delivered, p.Answered = arrived(f.To, false), arrived(f.From, true)
	if p.GetAnswered() {
		p.Delivered = true // whoever watched
	}
	p.Result = outcome(p, f.Err, f.Protocol, "it arrived", "it was seen last")
	lost := f.Err == nil && len(p.GetUnknown()) == 0 && f.To.Node != "" && !p.GetAnswered() && (!p.GetDelivered() || answers(f.Protocol))
	if !lost || out.GetVerdict() == Broken {
		return
	}
	node := f.From.Node
	if last := lastSeen(p); last != nil {
		node = last.GetNode()
	}
	out.Verdict, out.Fault = Broken, doctor.Finding{
		Severity: doctor.Critical, Check: "probe", Node: node, What: p.GetResult(),
		Cause: "nothing that was looked at says why", Cure: "routerctl doctor # on " + node,
	}.Proto()
}

// addSightings adds what hosts saw, there and back, and who did not watch. They are in the order in which the packet comes by.
func addSightings(p *apiv1.Probe, ends []ProbeEnd) {
	for _, e := range ends {
		if e.Err != nil {
			p.Unknown = append(p.Unknown, fmt.Sprintf("%s did not watch: %v", e.Node, e.Err))
		}
		p.Seen = append(p.Seen, direction(e, false)...)
	}
	for i := range ends {
		p.Seen = append(p.Seen, direction(ends[len(ends)-1-i], true)...)
	}
}

// direction leaves the sightings of one direction.
func direction(e ProbeEnd, back bool) []*apiv1.Sighting {
	var out []*apiv1.Sighting
	for _, s := range e.Seen {
		if s.GetBack() == back {
			out = append(out, s)
		}
	}
	return out
}

// arrived reports whether packets of a direction were seen to reach an end: to leave by a workload's device, or to come in, for
// a host.
func arrived(e ProbeEnd, back bool) bool {
	for _, s := range direction(e, back) {
		if e.Device == "" && !s.GetOut() || e.Device != "" && s.GetOut() && s.GetDevice() == e.Device {
			return true
		}
	}
	return false
}

// answers reports whether a host answers the first packet of a protocol by itself: by an echo reply, an acknowledgement or a
// refusal. With SCTP it does where the kernel's module is loaded, which the first socket of a program brings about; without,
// an error of ICMP says that nobody knows the protocol (RFC 1122, section 3.2.2.1).
func answers(protocol uint8) bool {
	return protocol == unix.IPPROTO_TCP || protocol == unix.IPPROTO_ICMP || protocol == unix.IPPROTO_ICMPV6
}

func lastSeen(p *apiv1.Probe) *apiv1.Sighting {
	if n := len(p.GetSeen()); n > 0 {
		return p.GetSeen()[n-1]
	}
	return nil
}

// outcome says in words what became of the packet. arrived are those for that it did, and seen those before where it was seen last.
func outcome(p *apiv1.Probe, err error, protocol uint8, arrived, seen string) string {
	last := lastSeen(p)
	switch {
	case err != nil:
		return fmt.Sprintf("not sent: %v", err)
	case p.GetAnswered():
		return arrived + ", and its answer came back"
	case last == nil:
		return "it was not seen at all: it did not leave where it was sent"
	case last.GetBack():
		return arrived + ", and its answer was seen last " + place(last)
	case p.GetDelivered() && !answers(protocol):
		return arrived + "; an answer to it is up to the program, and none was seen"
	case p.GetDelivered():
		return arrived + ", and no answer was seen"
	}
	return seen + " " + place(last)
}

// place says in words where a packet was seen.
func place(s *apiv1.Sighting) string {
	way := "coming in by"
	if s.GetOut() {
		way = "leaving by"
	}
	return fmt.Sprintf("on %s, %s %s", s.GetNode(), way, s.GetDevice())
}
