package trace

import (
	"errors"
	"strings"
	"testing"

	apiv1 "github.com/routerd/routerd/control/api/v1"
)

// seenAt makes sightings of a host, each as "[back] in|out DEVICE".
func seenAt(node string, at ...string) []*apiv1.Sighting {
	var out []*apiv1.Sighting
	for _, a := range at {
		f := strings.Fields(a)
		s := &apiv1.Sighting{Node: node, Packets: 4}
		if f[0] == "back" {
			s.Back, f = true, f[1:]
		}
		s.Out, s.Device = f[0] == "out", f[1]
		out = append(out, s)
	}
	return out
}

func TestAddProbe(t *testing.T) {
	t.Parallel()
	const icmp, udp, sctp = 1, 17, 132
	pod1, pod3 := ProbeEnd{Node: "node1", Device: "cali1"}, ProbeEnd{Node: "node3", Device: "cali3"}
	with := func(e ProbeEnd, at ...string) ProbeEnd {
		e.Seen = seenAt(e.Node, at...)
		return e
	}
	here := with(pod1, "in cali1", "out vxlan", "back in vxlan", "back out cali1")
	there := with(pod3, "in vxlan", "out cali3", "back in cali3", "back out vxlan")
	for _, tt := range []struct {
		name    string
		facts   ProbeFacts
		before  string // verdict
		verdict string
		node    string // of the fault
		result  string
	}{
		{"answered", ProbeFacts{Protocol: icmp, From: here, To: there}, Whole, Whole, "", "it arrived, and its answer came back"},
		{"on one host", ProbeFacts{Protocol: icmp, From: with(pod1, "in cali1", "out cali2", "back in cali2", "back out cali1"), To: ProbeEnd{Node: "node1", Device: "cali2"}}, Whole, Whole, "", "it arrived, and its answer came back"},
		{"from a host", ProbeFacts{Protocol: icmp, From: with(ProbeEnd{Node: "node1"}, "out vxlan", "back in vxlan"), To: there}, Whole, Whole, "", "it arrived, and its answer came back"},
		{"lost on the way in", ProbeFacts{Protocol: icmp, From: with(pod1, "in cali1", "out vxlan"), To: with(pod3, "in vxlan")}, Whole, Broken, "node3", "it was seen last on node3, coming in by vxlan"},
		{"lost between", ProbeFacts{Protocol: udp, From: with(pod1, "in cali1", "out vxlan"), To: pod3}, Unknown, Broken, "node1", "it was seen last on node1, leaving by vxlan"},
		{"lost on the way back", ProbeFacts{Protocol: icmp, From: with(pod1, "in cali1", "out vxlan"), To: there}, Whole, Broken, "node3", "it arrived, and its answer was seen last on node3, leaving by vxlan"},
		{"no answer", ProbeFacts{Protocol: icmp, From: with(pod1, "in cali1", "out vxlan"), To: with(pod3, "in vxlan", "out cali3")}, Whole, Broken, "node3", "it arrived, and no answer was seen"},
		{"a datagram", ProbeFacts{Protocol: udp, From: with(pod1, "in cali1", "out vxlan"), To: with(pod3, "in vxlan", "out cali3")}, Whole, Whole, "", "it arrived; an answer to it is up to the program, and none was seen"},
		{"an INIT where no program speaks SCTP", ProbeFacts{Protocol: sctp, From: with(pod1, "in cali1", "out vxlan"), To: with(pod3, "in vxlan", "out cali3")}, Whole, Whole, "", "it arrived; an answer to it is up to the program, and none was seen"},
		{"an INIT that is lost", ProbeFacts{Protocol: sctp, From: with(pod1, "in cali1", "out vxlan"), To: with(pod3, "in vxlan")}, Whole, Broken, "node3", "it was seen last on node3, coming in by vxlan"},
		{"nowhere", ProbeFacts{Protocol: icmp, From: pod1, To: pod3}, Whole, Broken, "node1", "it was not seen at all: it did not leave where it was sent"},
		{"not sent", ProbeFacts{Protocol: icmp, From: pod1, To: pod3, Err: errors.New("no route")}, Whole, Whole, "", "not sent: no route"},
		{"not watched", ProbeFacts{Protocol: icmp, From: with(pod1, "in cali1", "out vxlan"), To: ProbeEnd{Node: "node3", Err: errors.New("late")}}, Whole, Whole, "", "it was seen last on node1, leaving by vxlan"},
		{"to outside", ProbeFacts{Protocol: icmp, From: with(pod1, "in cali1", "out eth0")}, Whole, Whole, "", "it was seen last on node1, leaving by eth0"},
		{"something else is wrong", ProbeFacts{Protocol: icmp, From: pod1, To: pod3}, Broken, Broken, "", "it was not seen at all: it did not leave where it was sent"},
	} {
		out := &apiv1.TraceResponse{Verdict: tt.before}
		AddProbe(out, tt.facts)
		if out.GetVerdict() != tt.verdict || out.GetFault().GetNode() != tt.node || out.GetProbe().GetResult() != tt.result {
			t.Errorf("%s: %s %s, %q; want %s %s, %q", tt.name, out.GetVerdict(), out.GetFault().GetNode(), out.GetProbe().GetResult(), tt.verdict, tt.node, tt.result)
		}
		if out.GetFault() != nil && (out.GetFault().GetCheck() != "probe" || out.GetFault().GetCure() == "") {
			t.Errorf("%s: fault %v", tt.name, out.GetFault())
		}
	}
}
