package nodestatus_test

import (
	"context"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/types/known/timestamppb"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/nodestatus"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/memory"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// host is a host with one session of each sort and four routes.
type host struct{}

func (host) Node(context.Context) (*apiv1.NodeResponse, error) {
	at := timestamppb.New(time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC))
	return &apiv1.NodeResponse{
		Name: "n1", Version: "v1.2.3", RouterId: "10.0.0.1", Started: at,
		Peers: []*apiv1.BGPPeer{
			{Address: "10.0.0.2", Type: "node-to-node mesh", State: "up", Since: at, Name: "n2"},
			{Address: "10.0.0.254:1790", Type: "global", State: "start", Since: at, Name: "tor"},
			{Address: "fe80::1%eth0", Type: "node specific", State: "down", Name: "uplink"},
		},
	}, nil
}

func (host) Routes(context.Context, netip.Prefix, bool) (*apiv1.RoutesResponse, error) {
	return &apiv1.RoutesResponse{Routes: []*apiv1.Route{
		{Prefix: "192.168.1.0/26", Best: true, Source: "local", Type: "blackhole"},
		{Prefix: "192.168.2.0/26", Best: true, Source: "store", NextHop: "10.0.0.2", Via: "10.0.0.2", Device: "eth0", Peer: "n2"},
		{Prefix: "192.168.2.0/26", Source: "bgp", NextHop: "10.0.0.2", Peer: "n2"},
		{Prefix: "fd00::/64", Best: true, Source: "bgp", NextHop: "fe80::1", Peer: "fe80::1", Device: "eth0"},
	}}, nil
}

func request(name, node string, period uint32, classes ...v3.NodeStatusClassType) *v3.CalicoNodeStatus {
	return &v3.CalicoNodeStatus{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       v3.CalicoNodeStatusSpec{Node: node, Classes: classes, UpdatePeriodSeconds: &period},
	}
}

// A request that names this host is answered again and again, with what it asks for;
// another's, and one with the period 0, is left alone.
func TestReporter(t *testing.T) {
	t.Parallel()
	s := memory.New()
	defer s.Close()
	ctx, stop := context.WithCancel(await.Context(t))
	for _, o := range []*v3.CalicoNodeStatus{
		request("all", "n1", 1, "Agent", "BGP", "Routes"), request("bgp", "n1", 3600, "BGP"),
		request("never", "n1", 0, "BGP"), request("other", "n2", 1, "BGP"),
	} {
		if _, err := store.Create(ctx, s, o); err != nil {
			t.Fatal(err)
		}
	}
	r := nodestatus.New("n1", s, host{}, slog.New(slog.DiscardHandler))
	var step cluster.Step
	objects, _, err := s.List(ctx, store.KindCalicoNodeStatus, "")
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range objects {
		step.Changes = append(step.Changes, &cluster.Change{Event: store.Event{Key: o.Key, Object: o}})
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.Run(ctx)
	}()
	r.HandleStore(step)

	get := func(name string) *v3.CalicoNodeStatus {
		o, err := s.Get(ctx, store.ResourceKey(store.KindCalicoNodeStatus, name))
		if err != nil {
			t.Fatal(err)
		}
		return o.Value.(*v3.CalicoNodeStatus)
	}
	var first metav1.Time
	await.True(t, "both are answered", func() bool {
		first = get("all").Status.LastUpdated
		return !first.IsZero() && !get("bgp").Status.LastUpdated.IsZero()
	})
	await.True(t, "the first is answered again", func() bool { return get("all").Status.LastUpdated.After(first.Time) })

	at := "2026-01-02 03:04:05"
	daemon := v3.BGPDaemonStatus{State: "Ready", Version: "routerd v1.2.3", RouterID: "10.0.0.1", LastBootTime: at}
	bgp := v3.CalicoNodeBGPStatus{
		NumberEstablishedV4: 1, NumberNotEstablishedV4: 1, NumberNotEstablishedV6: 1,
		PeersV4: []v3.CalicoNodePeer{
			{PeerIP: "10.0.0.2", Type: "NodeMesh", State: "Established", Since: at},
			{PeerIP: "10.0.0.254", Type: "GlobalPeer", State: "Active", Since: at},
		},
		PeersV6: []v3.CalicoNodePeer{{PeerIP: "fe80::1", Type: "NodePeer", State: "Idle"}},
	}
	want := v3.CalicoNodeStatusStatus{
		Agent: v3.CalicoNodeAgentStatus{BIRDV4: daemon, BIRDV6: daemon},
		BGP:   bgp,
		Routes: v3.CalicoNodeBGPRouteStatus{
			RoutesV4: []v3.CalicoNodeRoute{
				{Type: "FIB", Destination: "192.168.1.0/26", LearnedFrom: v3.CalicoNodeRouteLearnedFrom{SourceType: "Direct"}},
				{Type: "FIB", Destination: "192.168.2.0/26", Gateway: "10.0.0.2", Interface: "eth0", LearnedFrom: v3.CalicoNodeRouteLearnedFrom{SourceType: "Static"}},
				{Type: "RIB", Destination: "192.168.2.0/26", Gateway: "10.0.0.2", LearnedFrom: v3.CalicoNodeRouteLearnedFrom{SourceType: "NodeMesh", PeerIP: "10.0.0.2"}},
			},
			RoutesV6: []v3.CalicoNodeRoute{
				{Type: "FIB", Destination: "fd00::/64", Gateway: "fe80::1", Interface: "eth0", LearnedFrom: v3.CalicoNodeRouteLearnedFrom{SourceType: "BGPPeer", PeerIP: "fe80::1"}},
			},
		},
	}
	got := get("all").Status
	want.LastUpdated = got.LastUpdated // the time of the answer that was read
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("status (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(v3.CalicoNodeStatusStatus{LastUpdated: get("bgp").Status.LastUpdated, BGP: bgp}, get("bgp").Status); diff != "" {
		t.Errorf("of BGP alone (-want +got):\n%s", diff)
	}
	for _, name := range []string{"never", "other"} {
		if diff := cmp.Diff(v3.CalicoNodeStatusStatus{}, get(name).Status); diff != "" {
			t.Errorf("%s was answered:\n%s", name, diff)
		}
	}
	stop()
	<-done
}
