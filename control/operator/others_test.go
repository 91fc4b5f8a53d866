package operator

import (
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/doctor"
)

// What hosts say of the time, and what is said of those that say nothing of it.
func TestAskClocks(t *testing.T) {
	t.Parallel()
	now := time.Now()
	asked := &fakeAsk{answers: map[string]*apiv1.Answer{
		"alike": {Clock: &apiv1.ClockResponse{Time: timestamppb.New(now)}}, "ahead": {Clock: &apiv1.ClockResponse{Time: timestamppb.New(now.Add(time.Hour))}},
		"old": {}, "older": {}, "broken": {Error: "no"},
	}}
	s := &Server{cfg: Config{Node: "self", AskAll: asked.all}}
	list, unknown := s.askClocks(t.Context(), []string{"ahead", "alike", "old", "older", "broken", "silent"})
	if d := cmp.Diff([]string{"the clock of silent: it is not there", "the clock of old, older: " + errItsVersion.Error(), "the clock of broken: no"}, unknown); d != "" {
		t.Errorf("unknown (-want +got)\n%s", d)
	}
	if len(list) != 2 || list[0].Node != "ahead" || list[1].Node != "alike" {
		t.Fatalf("clocks %v, want those of ahead and alike", list)
	}
	if a := list[0]; a.AtLeast > time.Hour || a.AtMost < time.Hour-time.Minute || a.AtMost < a.AtLeast {
		t.Errorf("ahead is %v to %v ahead, want an hour within", a.AtLeast, a.AtMost)
	}
	if list, unknown := s.askClocks(t.Context(), nil); list != nil || unknown != nil {
		t.Errorf("nobody asked: %v, %v", list, unknown)
	}
}

// TestClocked: of a host one answer counts, and what it said when it was asked before what its probes say.
func TestClocked(t *testing.T) {
	t.Parallel()
	path := func(node string, least, most time.Duration) *apiv1.Path {
		return &apiv1.Path{Node: node, ClockAtLeast: durationpb.New(least), ClockAtMost: durationpb.New(most)}
	}
	got := withClocks([]doctor.Clock{{Node: "b", AtLeast: 1, AtMost: 2}}, clocked([]*apiv1.Path{path("b", 5, 6), path("c", 7, 8), path("c", 9, 10), {Node: "d"}}))
	if d := cmp.Diff([]doctor.Clock{{Node: "b", AtLeast: 1, AtMost: 2}, {Node: "c", AtLeast: 7, AtMost: 8}}, got); d != "" {
		t.Errorf("(-want +got)\n%s", d)
	}
}

// heardProbes has heard one peer.
type heardProbes struct{ Probes }

func (heardProbes) Heard(device string, peer netip.Addr) (time.Duration, bool) {
	return time.Second, device == "vxlan.calico" && peer == netip.MustParseAddr("192.168.1.0")
}

func TestHeard(t *testing.T) {
	t.Parallel()
	s := &Server{Probes: heardProbes{}}
	for _, tt := range []struct {
		device, address string
		ago             time.Duration
		err             bool
	}{
		{"vxlan.calico", "192.168.1.0", time.Second, false},
		{"vxlan.calico", "192.168.1.1", 0, false},
		{"vxlan.calico", "nonsense", 0, true},
	} {
		r, err := s.heard(&apiv1.HeardRequest{Device: tt.device, Address: tt.address})
		if (err != nil) != tt.err || r.GetAgo().AsDuration() != tt.ago {
			t.Errorf("%s, %s: %v, %v; want %v, error %t", tt.device, tt.address, r, err, tt.ago, tt.err)
		}
	}
}
