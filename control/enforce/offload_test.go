package enforce

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/conntrack"
	"github.com/routerd/routerd/dataplane/filter"
)

// flowtable is a kernel's, unless it refuses.
type flowtable struct {
	mu     sync.Mutex
	refuse error
	asked  int
	have   []string
	forgot int
}

func (f *flowtable) Set(list []filter.Device) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asked++
	if f.refuse != nil {
		return f.refuse
	}
	f.have = nil
	for _, d := range list {
		name := d.Name
		if d.Workload {
			name += " (workload)"
		}
		f.have = append(f.have, name)
	}
	return nil
}

func (f *flowtable) Forget() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.refuse != nil {
		return f.refuse
	}
	f.forgot++
	return nil
}

// state waits until all is settled and returns what there is.
func (f *flowtable) state() (have []string, forgot, asked int) {
	time.Sleep(20 * time.Second) //nolint:forbidigo // virtual time
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.have), f.forgot, f.asked
}

func (f *flowtable) set(refuse error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.refuse = refuse
}

// startOffload runs an Enforcer whose host has two devices with addresses, a
// workload's device, and others.
func startOffload(t *testing.T) (*world, *flowtable) {
	t.Helper()
	f := &flowtable{}
	w := &world{t: t, table: &table{have: filter.NewRuleset()}, conns: &connections{}}
	w.e = New(Config{Node: "node1", Table: w.table, Connections: w.conns, Offload: f, Log: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- w.e.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	w.e.HandleUnderlay(dataplane.Underlay{
		Links: []dataplane.UnderlayLink{
			{Index: 1, Name: "lo", Loopback: true},
			{Index: 2, Name: "eth0"},
			{Index: 3, Name: "eth1"}, // unnumbered, with a route
			{Index: 4, Name: "eth2"}, // with a link-local address alone: a port of a bridge, for one
			{Index: 5, Name: "vxlan.calico", Type: "vxlan"},
			{Index: 6, Name: "kube-ipvs0", Type: "dummy"},
			{Index: 7, Name: "calia", Type: "veth"},
			{Index: 8, Name: "calib", Type: "veth"}, // of no endpoint
		},
		Addresses: []dataplane.UnderlayAddress{
			{Link: "lo", Prefix: netip.MustParsePrefix("127.0.0.1/8"), LinkScope: true},
			{Link: "eth0", Prefix: netip.MustParsePrefix("192.0.2.1/24")},
			{Link: "eth2", Prefix: netip.MustParsePrefix("fe80::1/64"), LinkScope: true},
			{Link: "vxlan.calico", Prefix: netip.MustParsePrefix("10.0.0.0/32")},
			{Link: "kube-ipvs0", Prefix: netip.MustParsePrefix("10.96.0.1/32")},
		},
		Routes: []dataplane.UnderlayRoute{
			{Link: "eth1", Prefix: netip.MustParsePrefix("0.0.0.0/0")},
			{Link: "eth2", Prefix: netip.MustParsePrefix("fe80::/64")},
		},
	})
	return w, f
}

// Flows are offloaded between workloads that have rules and devices by which packets
// come to this host; none without a workload, and none beside a policy that comes before
// connection tracking, from before it is in force.
func TestOffloadedDevices(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, f := startOffload(t)
		w.store(pod("z", "10.0.0.9", nil)) // of another device that is not there
		if have, _, _ := f.state(); !slices.Equal(have, []string{"eth0", "eth1", "vxlan.calico"}) {
			t.Errorf("devices: %v", have)
		}
		w.store(pod("a", "10.0.0.1", nil))
		want := []string{"eth0", "eth1", "vxlan.calico", "calia (workload)"}
		have, _, asked := f.state()
		if d := cmp.Diff(want, have); d != "" {
			t.Errorf("devices (-want +got):\n%s", d)
		}
		if _, _, again := f.state(); again != asked {
			t.Error("the kernel was asked though nothing changed")
		}
		for _, controls := range []string{`{"egressBandwidth": 1000000}`, `{"dscp": "DF"}`} {
			limited := pod("a", "10.0.0.1", nil)
			limited.Spec.QoSControls = []byte(controls)
			w.store(limited)
			if have, _, _ := f.state(); len(have) > 0 {
				t.Errorf("devices beside a workload with %s: %v", controls, have)
			}
		}
		w.store(pod("a", "10.0.0.1", nil))
		host := &v3.HostEndpoint{Spec: v3.HostEndpointSpec{Node: "node1", InterfaceName: "eth0"}}
		host.Name, host.Labels = "eth0", map[string]string{"host": "eth0"}
		raw := &v3.GlobalNetworkPolicy{Spec: v3.GlobalNetworkPolicySpec{
			Selector: "host == 'eth0'", DoNotTrack: true, ApplyOnForward: true, Ingress: []v3.Rule{{Action: v3.Deny}},
		}}
		raw.Name = "raw"
		w.store(host)
		if have, _, _ := f.state(); !slices.Equal(have, want) {
			t.Errorf("devices beside a host endpoint: %v", have)
		}
		// The kernel's table is told when the flows were taken back, not before.
		hold := make(chan struct{})
		w.table.mu.Lock()
		w.table.hold = hold
		w.table.mu.Unlock()
		w.store(raw)
		f.mu.Lock()
		if len(f.have) > 0 {
			t.Errorf("a policy before connection tracking is being written while flows of %v are offloaded", f.have)
		}
		f.mu.Unlock()
		close(hold)
		w.table.mu.Lock()
		w.table.hold = nil
		w.table.mu.Unlock()
		if have, _, _ := f.state(); len(have) > 0 {
			t.Errorf("devices beside a policy before connection tracking: %v", have)
		}
	})
}

// A connection that is cut, and an address that a workload loses, have all flows take
// the way of rules; what fails is tried again.
func TestOffloadForgets(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, f := startOffload(t)
		w.conns.flows = []conntrack.Flow{flow("10.0.0.2:1000", "10.0.0.1:80")}
		two := pod("a", "10.0.0.1", map[string]string{"app": "web"})
		two.Spec.IPNetworks = append(two.Spec.IPNetworks, "10.0.0.7/32")
		w.store(two, pod("b", "10.0.0.2", map[string]string{"app": "bad"}))
		_, before, _ := f.state()
		w.store(pod("c", "10.0.0.3", nil))
		if _, now, _ := f.state(); now != before {
			t.Error("flows were forgotten though nothing was denied")
		}
		f.set(errors.New("no"))
		w.store(denyFrom("app == 'bad'"))
		if _, now, _ := f.state(); now != before || w.e.Status().CutErr == nil {
			t.Errorf("forgot %d times, status %v: the kernel refused", now-before, w.e.Status().CutErr)
		}
		f.set(nil)
		if _, now, _ := f.state(); now != before+1 || w.e.Status().CutErr != nil {
			t.Errorf("forgot %d times, status %v: want once, when the kernel took it", now-before, w.e.Status().CutErr)
		}
		_, before, _ = f.state()
		w.store(pod("a", "10.0.0.1", map[string]string{"app": "web"}))
		if _, now, _ := f.state(); now == before {
			t.Error("a workload lost an address, and its flows go on")
		}
	})
}

// A kernel without flowtables is asked once.
func TestOffloadUnsupported(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, f := startOffload(t)
		f.set(errors.ErrUnsupported)
		w.store(pod("a", "10.0.0.1", nil))
		_, _, asked := f.state()
		w.store(pod("c", "10.0.0.3", nil))
		if _, _, again := f.state(); again != asked {
			t.Errorf("asked %d times more", again-asked)
		}
		if s := w.e.Status(); s.Err != nil || !s.InForce {
			t.Errorf("status %+v", s)
		}
	})
}
