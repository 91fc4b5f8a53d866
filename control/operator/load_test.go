package operator

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/doctor"
	"github.com/routerd/routerd/dataplane/netdev"
)

func TestHostsAgain(t *testing.T) {
	t.Parallel()
	for hosts, want := range map[int]time.Duration{1: time.Second, 100: time.Second, 1000: 10 * time.Second} {
		if got := hostsAgain(hosts); got != want {
			t.Errorf("%d hosts: %s, want %s", hosts, got, want)
		}
	}
}

func TestMembers(t *testing.T) {
	t.Parallel()
	ran := []*apiv1.Check{{Name: "Ready", Ok: true}}
	c := doctor.Cluster{
		Members: []doctor.Member{{Name: "self", Conditions: ran}, {Name: "there", Conditions: ran}, {Name: "gone", Conditions: ran}, {Name: "foreign"}},
		Present: map[string]bool{"self": true, "there": true},
	}
	s := &Server{cfg: Config{Node: "self"}}
	hosts, ask := s.members(c)
	if len(ask) != 0 || hosts["there"].GetError() != errAlone.Error() || hosts["there"].GetAbsent() {
		t.Errorf("hosts that cannot ask each other: %v, to be asked %v", hosts, ask)
	}
	s.cfg.AskAll = (&fakeAsk{}).all
	hosts, ask = s.members(c)
	if d := cmp.Diff([]string{"there"}, ask); d != "" || hosts["self"] != nil || !hosts["gone"].GetAbsent() || !hosts["foreign"].GetAbsent() || hosts["there"].GetError() != "" {
		t.Errorf("hosts %v, to be asked (-want +got)\n%s", hosts, d)
	}
}

// What hosts answer, and what comes of those that do not, or say nonsense.
func TestAskLoads(t *testing.T) {
	t.Parallel()
	asked := &fakeAsk{answers: map[string]*apiv1.Answer{
		"good": {Load: &apiv1.HostLoad{Node: "somebody else", Version: "v1"}}, "old": {}, "broken": {Error: "no"},
	}, raw: map[string][]byte{"liar": {0xff}}}
	s := &Server{cfg: Config{Node: "self", AskAll: asked.all}}
	hosts := map[string]*apiv1.HostLoad{}
	ask := []string{"good", "old", "broken", "liar", "silent"}
	for _, n := range ask {
		hosts[n] = &apiv1.HostLoad{Node: n}
	}
	s.askLoads(t.Context(), hosts, ask)
	if hosts["liar"].GetError() == "" {
		t.Error("an answer that cannot be read is taken")
	}
	delete(hosts, "liar")
	want := map[string]*apiv1.HostLoad{
		"good": {Node: "good", Version: "v1"}, "old": {Node: "old", Error: errItsVersion.Error()}, "broken": {Node: "broken", Error: "no"},
		"silent": {Node: "silent", Error: "it is not there"},
	}
	if d := cmp.Diff(want, hosts, protocmp.Transform()); d != "" {
		t.Errorf("(-want +got)\n%s", d)
	}
}

func TestTrafficOf(t *testing.T) {
	t.Parallel()
	one := netdev.Counters{ReceivedBytes: 1, SentBytes: 2, ReceivedPackets: 3, SentPackets: 4, Dropped: 5, Errors: 6}
	all := map[string]netdev.Counters{"eth0": one, "eth1": one, "cali1": one, "cali2": one, "vxlan.calico": one, "vxlan-v6.calico": one, "tunl0": one, "lo": one}
	want := []*apiv1.Traffic{
		{Devices: "uplink", ReceivedBytes: 1, SentBytes: 2, ReceivedPackets: 3, SentPackets: 4, Dropped: 5, Errors: 6},
		{Devices: "tunnel", ReceivedBytes: 3, SentBytes: 6, ReceivedPackets: 9, SentPackets: 12, Dropped: 15, Errors: 18},
		{Devices: "workload", ReceivedBytes: 2, SentBytes: 4, ReceivedPackets: 6, SentPackets: 8, Dropped: 10, Errors: 12},
	}
	if d := cmp.Diff(want, trafficOf(all, map[string]bool{"eth0": true}), protocmp.Transform()); d != "" {
		t.Errorf("(-want +got)\n%s", d)
	}
}
