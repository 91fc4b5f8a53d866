package probe

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store/memory"
)

// simulated is a network: devices with offloads, and peers on paths that
// spoil some packets. It is the prober's sink and its measurer.
type simulated struct {
	mu       sync.Mutex
	rev      dataplane.Revision
	on       map[dataplane.FeatureKey]bool
	routes   map[dataplane.Key]dataplane.Object // and their next hops
	routed   map[dataplane.Revision]bool        // of these
	rules    map[string]int                     // by device
	unruled  error                              // of the next rule
	refuse   error                              // of the sink's Wait
	broken   map[string]Setting                 // what the path to a node spoils
	lossy    map[string]bool                    // TCP sends half again, whatever the setting
	mtu      map[string]int
	silent   map[string]bool
	refused  map[string]bool
	delay    time.Duration
	measured map[string]int
	at, most int // measurements at the same time
	changes  int // of a device's offloads
	reports  []map[string][]dataplane.Delivery
}

func newNetwork() *simulated {
	return &simulated{
		on: map[dataplane.FeatureKey]bool{}, broken: map[string]Setting{}, lossy: map[string]bool{}, mtu: map[string]int{},
		routes: map[dataplane.Key]dataplane.Object{}, routed: map[dataplane.Revision]bool{}, rules: map[string]int{},
		silent: map[string]bool{}, refused: map[string]bool{}, measured: map[string]int{}, delay: 20 * time.Millisecond,
	}
}

func (n *simulated) Replace(dataplane.Source, []dataplane.Object) dataplane.Revision {
	panic("not used")
}

func (n *simulated) Synced(dataplane.Source) {}

func (n *simulated) Update(src dataplane.Source, put []dataplane.Object, del []dataplane.Key) dataplane.Revision {
	n.mu.Lock()
	defer n.mu.Unlock()
	if src != dataplane.SourceProbe {
		panic("another source")
	}
	n.rev++
	for _, o := range put {
		if f, ok := o.(dataplane.Feature); ok {
			n.on[f.Key().(dataplane.FeatureKey)] = f.On
			continue
		}
		n.routes[o.Key()], n.routed[n.rev] = o, true
	}
	for _, k := range del {
		if _, ok := n.routes[k]; ok {
			delete(n.routes, k)
			n.routed[n.rev] = true
		}
	}
	if !n.routed[n.rev] {
		n.changes++
	}
	return n.rev
}

func (n *simulated) Add(_ dataplane.Family, link string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := n.unruled; err != nil {
		n.unruled = nil
		return err
	}
	n.rules[link]++
	return nil
}

func (n *simulated) Remove(_ dataplane.Family, link string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.rules[link]--; n.rules[link] == 0 {
		delete(n.rules, link)
	}
	return nil
}

func (n *simulated) Wait(ctx context.Context, rev dataplane.Revision) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if rev != n.rev && !n.routed[rev] {
		return errors.New("not the latest revision")
	}
	return n.refuse
}

// off returns what a device has off; as the kernel, it cuts nothing without
// checksums.
func (n *simulated) off(link string) Setting {
	var s Setting
	for _, x := range Offloads() {
		for _, f := range x.features {
			if on, ok := n.on[dataplane.FeatureKey{Link: link, Name: f}]; ok && !on {
				s |= x.Bit
			}
		}
	}
	return s.effective()
}

func (n *simulated) Measure(ctx context.Context, t Target, key []byte) (Finding, error) {
	n.mu.Lock()
	n.at++
	n.most = max(n.most, n.at)
	n.measured[t.Node]++
	delay := n.delay
	n.mu.Unlock()
	select {
	case <-time.After(delay):
	case <-ctx.Done():
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.at--
	f := Finding{Full: t.Tunnel.MTU, Refused: n.refused[t.Node]}
	if ctx.Err() != nil || n.silent[t.Node] || f.Refused {
		return f, ctx.Err()
	}
	f.Answered, f.RTT, f.Size, f.Checksum = true, time.Millisecond, t.Tunnel.MTU, dataplane.Yes
	if t.plain() {
		f.Flows = Count{plainFlows, plainFlows}
	}
	if m := n.mtu[t.Node]; m != 0 {
		f.Size = min(m, t.Tunnel.MTU)
	}
	bad := n.broken[t.Node] &^ n.off(t.Tunnel.Link)
	if bad&NoChecksum != 0 {
		f.Checksum = dataplane.No
		return f, nil
	}
	f.Segments = Count{40, 40}
	if bad&NoUDPSegments != 0 {
		f.Segments.Got = 0
	}
	f.Transfer = Transfer{Connected: true, Done: true, Bytes: transferSize, Elapsed: 10 * time.Millisecond, Sent: 190}
	if bad&NoTCPSegments != 0 {
		f.Transfer = Transfer{Connected: true, Bytes: 16000, Elapsed: time.Second, Sent: 60, Retransmits: 40}
	}
	if n.lossy[t.Node] {
		f.Transfer.Elapsed, f.Transfer.Sent, f.Transfer.Retransmits = time.Second, 400, 210
	}
	return f, nil
}

// It is the prober's core too.
func (*simulated) Probes(ctx context.Context) <-chan []dataplane.ProbeTarget {
	return until[[]dataplane.ProbeTarget](ctx, nil)
}

func (*simulated) Reach(context.Context, dataplane.Family, map[string]dataplane.Reach) error {
	return errors.New("the underlay is not measured here")
}

func (n *simulated) Delivery(_ context.Context, f dataplane.Family, peers map[string][]dataplane.Delivery) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if f != dataplane.IPv4 {
		return nil
	}
	now := map[string][]dataplane.Delivery{}
	if len(n.reports) > 0 {
		now = maps.Clone(n.reports[len(n.reports)-1])
	}
	for name, list := range peers {
		if now[name] = list; len(list) == 0 {
			delete(now, name)
		}
	}
	n.reports = append(n.reports, now)
	return nil
}

// told returns the last report, one line for each peer.
func (n *simulated) told() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.reports) == 0 {
		return nil
	}
	var out []string
	last := n.reports[len(n.reports)-1]
	for _, node := range slices.Sorted(maps.Keys(last)) {
		for _, d := range last[node] {
			s := fmt.Sprintf("%s %s %s", node, d.Encap, d.Result)
			if d.MTU != 0 {
				s += fmt.Sprintf(" mtu %d", d.MTU)
			}
			out = append(out, s)
		}
	}
	return out
}

func (n *simulated) device(link string) Setting {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.off(link)
}

func (n *simulated) set(f func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	f()
}

func (n *simulated) count(node string) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.measured[node]
}

func vxlanForm() dataplane.Encap {
	return dataplane.Encap{Driver: dataplane.DriverVXLAN, Outer: dataplane.IPv4, VNI: 4096, Port: 4789}
}

func target(node string) Target {
	return Target{
		ProbeTarget: &dataplane.ProbeTarget{
			Node: node, Registered: netip.MustParseAddr("10.0.0.2"), Peer: inner(1), ProbePath: &dataplane.ProbePath{
				Family: dataplane.IPv4, Encap: vxlanForm(), Uplink: "eth0",
				Tunnel: dataplane.ProbeTunnel{Inner: dataplane.IPv4, Link: device, MTU: 1450, Local: inner(0)},
			},
		},
		Card: "eth0 virtio_net", Accepts: true,
	}
}

// with returns the target with a change.
func (t Target) with(change func(*dataplane.ProbeTarget)) Target {
	at, path := *t.ProbeTarget, *t.ProbePath
	at.ProbePath = &path
	change(&at)
	t.ProbeTarget = &at
	return t
}

func world(nodes ...string) tunnelView {
	w := tunnelView{key: testKey}
	for _, n := range nodes {
		w.tunnels = append(w.tunnels, target(n))
	}
	return w
}

// prober is one with a kernel that a test chooses.
func (n *simulated) prober(file, kernel string) *Prober {
	p := New(Config{
		Node: "self", Store: memory.New(), Core: n, Log: slog.New(slog.DiscardHandler), File: file,
		Tunnel: TunnelConfig{Enabled: true, Sink: n, Rules: n, Measure: n},
	})
	p.kernel = kernel
	return p
}

// show shows the prober the world, in place of the store and the core.
func (p *Prober) show(t *testing.T, w tunnelView) {
	t.Helper()
	var err error
	if aerr := p.ask(t.Context(), func(l *loop) { err = l.tunnels.view(t.Context(), w) }); aerr != nil || err != nil {
		t.Error(aerr, err)
	}
}

// status is what is known of a node's only tunnel.
func (p *Prober) status(t *testing.T) *apiv1.Tunnel {
	t.Helper()
	r, err := p.Tunnels(t.Context(), nil, false)
	if err != nil || len(r.Tunnels) != 1 {
		t.Fatalf("tunnels %v, %v", r, err)
	}
	return r.Tunnels[0]
}

// start runs a prober in the bubble; stop ends it.
func start(t *testing.T, n *simulated, file string) (p *Prober, stop func()) {
	t.Helper()
	p = n.prober(file, "6.1")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	return p, func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("Run = %v", err)
		}
	}
}

// pass lets virtual time pass and everything that is due happen.
func pass(d time.Duration) {
	time.Sleep(d) //nolint:forbidigo // virtual time
	synctest.Wait()
}

func expect(t *testing.T, n *simulated, want ...string) {
	t.Helper()
	if d := cmp.Diff(want, n.told()); d != "" {
		t.Errorf("reported (-want +got):\n%s", d)
	}
}
