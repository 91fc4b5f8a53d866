package attach

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/routerd/routerd/dataplane/workload"
	"github.com/routerd/routerd/dataplane/workload/netnstest"
)

// ends returns the MTU of both ends of a container's wire: the host's and the
// container's.
func (w *world) ends(req AddRequest, device string) [2]int {
	w.t.Helper()
	mtu := func(do func(func() error) error, name string) (n int) {
		err := do(func() error {
			h, err := netlink.NewHandle()
			if err != nil {
				return err
			}
			defer h.Close()
			link, err := h.LinkByName(name)
			if err != nil {
				return err
			}
			n = link.Attrs().MTU
			return nil
		})
		if err != nil {
			w.t.Fatal(err)
		}
		return n
	}
	in := &netnstest.Netns{Path: req.Netns}
	return [2]int{mtu(w.host.Do, device), mtu(in.Do, req.ID.Interface)}
}

// pod is a request whose device has a name of its own.
func (w *world) pod(n int) AddRequest {
	return podRequest(w.request(n), "ns1", fmt.Sprintf("web-%d", n))
}

func (w *world) setMTU(a *Attacher, m MTU) {
	w.t.Helper()
	if err := a.SetMTU(w.t.Context(), m); err != nil {
		w.t.Fatalf("set MTU to %+v: %v", m, err)
	}
	if got := a.ReachedMTU(); got != m {
		w.t.Errorf("reached %+v, want %+v", got, m)
	}
}

// held lists the routes that the host's side is wanted to hold back packets by.
func (w *world) held() []string {
	return slices.DeleteFunc(w.sink.wanted(), func(s string) bool { return !strings.Contains(s, " mtu ") })
}

func (w *world) expectMTU(a *Attacher, req AddRequest, device string, want int) {
	w.t.Helper()
	if got := w.ends(req, device); got != [2]int{want, want} {
		w.t.Errorf("%s: MTU of the host's end and the container's %v, want %d", device, got, want)
	}
	if held := w.held(); len(held) > 0 {
		w.t.Errorf("routes still hold back packets: %v", held)
	}
	r, ok := a.ledger.get(req.ID)
	if !ok || r.MTU != want || len(r.TriedMTUs) != 0 {
		w.t.Errorf("record has the MTU %d, tried %v; want %d", r.MTU, r.TriedMTUs, want)
	}
	w.check(a, req)
}

func TestMTUOfFamilies(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		mtu    MTU
		v4, v6 bool
		want   int
	}{
		{MTU{IPv4: 1450, IPv6: 1430}, true, false, 1450},
		{MTU{IPv4: 1450, IPv6: 1430}, false, true, 1430},
		{MTU{IPv4: 1450, IPv6: 1430}, true, true, 1430},
		{MTU{IPv4: 1450, IPv6: 1480}, true, true, 1450},
		{MTU{IPv4: 1450}, true, true, 0},
		{MTU{IPv6: 1450}, true, false, 0},
		{MTU{IPv6: 1450}, true, true, 0},
		{MTU{IPv4: 1250, IPv6: 1230}, true, true, 1280},
		{MTU{IPv4: 1250, IPv6: 1230}, true, false, 1250},
		{MTU{IPv6: 1230}, false, true, 1280},
		{MTU{IPv4: 1450, IPv6: 1430, Operator: 1400}, true, true, 1400},
		{MTU{}, true, false, 0},
		{MTU{}, false, true, 0},
	} {
		if got := tt.mtu.of(tt.v4, tt.v6); got != tt.want {
			t.Errorf("%+v.of(IPv4 %v, IPv6 %v) = %d, want %d", tt.mtu, tt.v4, tt.v6, got, tt.want)
		}
	}
}

// TestSetMTU: running containers follow, new ones get the new MTU, a restart
// with another one is made good, and nothing is written when nothing changes.
func TestSetMTU(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.start()
	var reqs []AddRequest
	var devices []string
	for i := range 3 {
		reqs = append(reqs, w.pod(i))
		devices = append(devices, w.add(a, reqs[i]).Device)
	}
	expect := func(want int) {
		t.Helper()
		for i, req := range reqs {
			w.expectMTU(a, req, devices[i], want)
		}
	}
	for _, mtu := range []int{1400, 1500, 8950, 1450} {
		w.setMTU(a, MTU{IPv4: mtu})
		expect(mtu)
	}
	rev := w.sink.rev
	w.setMTU(a, MTU{IPv4: 1450})
	w.setMTU(a, MTU{IPv4: 1450, IPv6: 1430})
	if w.sink.rev != rev {
		t.Error("the sink was asked for changes although nothing changed")
	}
	w.mtu = MTU{IPv4: 1300}
	a = w.start()
	expect(1300)
	reqs, devices = append(reqs, w.pod(9)), append(devices, "")
	res := w.add(a, reqs[3])
	devices[3] = res.Device
	if res.MTU != 1300 {
		t.Errorf("MTU of a new container is %d, want 1300", res.MTU)
	}
	expect(1300)
	if e := a.Endpoints()[0]; e.MTU != 1300 {
		t.Errorf("endpoint %+v, want its MTU to be 1300", e)
	}
	for _, req := range reqs {
		w.del(a, req)
	}
	w.expectClean()
}

// A container with addresses of both families gets the smaller MTU, and never
// less than IPv6 needs.
func TestSetMTUDualStack(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.mtu = MTU{IPv4: 1450, IPv6: 1430}
	a := w.start()
	both, four := w.pod(1), w.pod(2)
	both.IPv6 = true
	b, f := w.add(a, both), w.add(a, four)
	if len(b.Addresses) != 2 {
		t.Fatalf("addresses %v, want one of each family", b.Addresses)
	}
	expect := func(wantBoth, wantFour int) {
		t.Helper()
		w.expectMTU(a, both, b.Device, wantBoth)
		w.expectMTU(a, four, f.Device, wantFour)
	}
	expect(1430, 1450)
	w.setMTU(a, MTU{IPv4: 1400, IPv6: 1480})
	expect(1400, 1400)
	w.setMTU(a, MTU{IPv4: 1200, IPv6: 1180})
	expect(1280, 1200)
	w.mtu = MTU{IPv4: 1480, IPv6: 1460}
	a = w.start()
	expect(1460, 1480)
}

func TestAddBeforeMTU(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.mtu = MTU{}
	a := w.start()
	if _, err := a.Add(t.Context(), w.pod(1)); !errors.Is(err, ErrNotReady) || !strings.Contains(err.Error(), "MTU") {
		t.Errorf("add before the MTU is known: %v, want ErrNotReady", err)
	}
	w.expectClean()
}

// What was written of the MTU is lost or spoilt: every container is looked at
// and brought to the MTU of now.
func TestMTUStateSpoilt(t *testing.T) {
	t.Parallel()
	for _, content := range []string{"", "{", `{"reached":{"IPv4":"x"}}`, "\x00\x00"} {
		w := newWorld(t)
		a := w.start()
		req := w.pod(1)
		res := w.add(a, req)
		w.setMTU(a, MTU{IPv4: 1300})
		if err := os.WriteFile(filepath.Join(w.dir, mtuFile), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		w.mtu = MTU{IPv4: 1450}
		a = w.start()
		w.expectMTU(a, req, res.Device, 1450)
		w.mtu = MTU{IPv4: 1400}
		a = w.start()
		w.expectMTU(a, req, res.Device, 1400)
	}
}

// A container whose request gave an MTU keeps it. One that repeats the
// operator's follows that.
func TestFixedMTU(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.mtu = MTU{IPv4: 1450, Operator: 1420}
	a := w.start()
	fixed, repeats := w.pod(1), w.pod(2)
	fixed.MTU, repeats.MTU = 1400, 1420
	f, r := w.add(a, fixed), w.add(a, repeats)
	w.setMTU(a, MTU{IPv4: 1450, Operator: 1300})
	w.expectMTU(a, fixed, f.Device, 1400)
	w.expectMTU(a, repeats, r.Device, 1300)
	w.mtu = MTU{IPv4: 1450}
	a = w.start()
	w.expectMTU(a, fixed, f.Device, 1400)
	w.expectMTU(a, repeats, r.Device, 1450)
}

func mtuSteps() []string {
	return points("hold back", "set wires", "note MTU", "let go")
}

// The daemon is killed at each step of a change. The next one completes it, or
// takes it back, or goes on to yet another MTU: the end is the same as without
// the kill.
func TestKilledInSetMTU(t *testing.T) {
	t.Parallel()
	for _, step := range mtuSteps() {
		for _, from := range []int{1400, 1500} {
			for _, next := range []int{from, 1450, 1480, 1300} {
				t.Run(fmt.Sprintf("%s, from %d, then %d", step, from, next), func(t *testing.T) {
					t.Parallel()
					w := newWorld(t)
					w.mtu = MTU{IPv4: from}
					a := w.start()
					req, gone := w.pod(1), w.pod(2)
					res := w.add(a, req)
					w.add(a, gone)
					killAt(a, step)
					dies(t, func() { _ = a.SetMTU(t.Context(), MTU{IPv4: 1450}) })
					a = w.create()
					if err := a.Restore(t.Context()); err != nil {
						t.Fatal(err)
					}
					if got, want := a.ReachedMTU().IPv4, max(from, 1450); got != want {
						t.Errorf("after the kill the MTU is known to be at most %d, want %d", got, want)
					}
					// Until it is whole again, nothing may go to the container that
					// its end might drop.
					least, ends := min(from, 1450), w.ends(req, res.Device)
					if held := w.held(); ends[1] < ends[0] && !slices.ContainsFunc(held, func(s string) bool {
						return strings.HasSuffix(s, fmt.Sprintf(" mtu %d", least))
					}) {
						t.Errorf("ends %v, held back by %v", ends, held)
					}
					// Killed once more on the way to another MTU.
					killAt(a, step)
					func() {
						defer func() { _ = recover() }()
						_ = a.SetMTU(t.Context(), MTU{IPv4: 1350})
					}()
					w.mtu = MTU{IPv4: next}
					a = w.start()
					w.expectMTU(a, req, res.Device, next)
					w.del(a, gone)
					w.del(a, req)
					w.expectClean()
				})
			}
		}
	}
}

// faultyWire refuses to change some devices.
type faultyWire struct {
	*workload.Wire
	mu     sync.Mutex
	refuse map[string]error // by container
}

func (f *faultyWire) SetMTU(ctx context.Context, spec workload.Spec, ours ...int) error {
	f.mu.Lock()
	err := f.refuse[spec.Owner.ContainerID]
	f.mu.Unlock()
	if err != nil {
		return err
	}
	return f.Wire.SetMTU(ctx, spec, ours...)
}

func (f *faultyWire) set(container string, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.refuse[container] = err
}

// One container that cannot be changed is named and does not keep the others;
// its route holds back what it could not take, and a repetition completes it.
func TestSetMTURefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	wire := &faultyWire{Wire: w.wire, refuse: map[string]error{}}
	w.cfg = func(c *Config) { c.Wire = wire }
	a := w.start()
	bad, good := w.pod(1), w.pod(2)
	b, g := w.add(a, bad), w.add(a, good)
	wire.set(bad.ID.ContainerID, errInjected)
	err := a.SetMTU(t.Context(), MTU{IPv4: 1400})
	if !errors.Is(err, errInjected) || !strings.Contains(err.Error(), bad.ID.ContainerID) || strings.Contains(err.Error(), good.ID.ContainerID) {
		t.Errorf("error %v, want one that names %s alone", err, bad.ID.ContainerID)
	}
	if got := a.ReachedMTU(); got != (MTU{IPv4: 1450}) {
		t.Errorf("reached %+v although one container is above it", got)
	}
	diff(t, "held back", []string{"route " + b.Addresses[0].Addr.String() + "/32 dev " + b.Device + " scope link mtu 1400"}, w.held())
	if got := w.ends(good, g.Device); got != [2]int{1400, 1400} {
		t.Errorf("the other container has %v, want 1400", got)
	}
	wire.set(bad.ID.ContainerID, nil)
	w.setMTU(a, MTU{IPv4: 1400})
	w.expectMTU(a, bad, b.Device, 1400)

	// The host's routes cannot be programmed: no wire is touched.
	w.sink.mu.Lock()
	w.sink.fail = errInjected
	w.sink.mu.Unlock()
	if err := a.SetMTU(t.Context(), MTU{IPv4: 1300}); !errors.Is(err, errInjected) {
		t.Errorf("error %v, want the sink's", err)
	}
	if got := w.ends(good, g.Device); got != [2]int{1400, 1400} {
		t.Errorf("without its route held back the container got %v", got)
	}
	w.sink.mu.Lock()
	w.sink.fail = nil
	w.sink.mu.Unlock()
	w.setMTU(a, MTU{IPv4: 1300})
	w.expectMTU(a, good, g.Device, 1300)
}

// Containers whose namespace or device is gone do not keep the others, nor
// does one that waits for a call of its own.
func TestSetMTULeavesOut(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	wire := &faultyWire{Wire: w.wire, refuse: map[string]error{}}
	w.cfg = func(c *Config) { c.Wire = wire }
	a := w.start()
	here, noDevice, noNetns := w.pod(1), w.pod(2), w.pod(3)
	h, d := w.add(a, here), w.add(a, noDevice)
	w.add(a, noNetns)
	if err := w.wire.Detach(t.Context(), d.Device, noDevice.ID); err != nil {
		t.Fatal(err)
	}
	wire.set(noNetns.ID.ContainerID, fmt.Errorf("open: %w", workload.ErrNoNamespace))
	w.setMTU(a, MTU{IPv4: 1400})
	w.expectMTU(a, here, h.Device, 1400)
	for _, req := range []AddRequest{here, noDevice, noNetns} {
		w.del(a, req)
	}
	w.expectClean()
}

// ADDs and DELs run while the MTU changes again and again. In the end every
// container has the last one.
func TestSetMTUBesideAdd(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.start()
	const containers = 24
	reqs := make([]AddRequest, containers)
	results := make([]Result, containers)
	for i := range reqs {
		reqs[i] = w.pod(i)
	}
	errs := make([]error, containers)
	var g sync.WaitGroup
	for i := range reqs {
		g.Go(func() {
			results[i], errs[i] = a.Add(t.Context(), reqs[i])
			if errs[i] == nil && i%4 == 3 {
				errs[i] = a.Del(t.Context(), delOf(reqs[i]))
			}
		})
	}
	for _, mtu := range []int{1400, 1500, 1300, 1480} {
		w.setMTU(a, MTU{IPv4: mtu})
	}
	g.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	for i, req := range reqs {
		if i%4 != 3 {
			w.expectMTU(a, req, results[i].Device, 1480)
		}
	}
}

// BenchmarkSetMTU changes the MTU of 500 containers.
func BenchmarkSetMTU(b *testing.B) {
	w := newWorld(b)
	w.realKernel()
	a := w.start()
	for i := range 500 {
		w.add(a, w.pod(i))
	}
	for i := 0; b.Loop(); i++ {
		w.setMTU(a, MTU{IPv4: 1400 + i%2*50})
	}
}
