package attach

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/control/journal"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/workload"
	"github.com/routerd/routerd/dataplane/workload/netnstest"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/memory"
)

// fakeIPAM gives the addresses of 192.168.0.0/16 and fd00:1::/64 in order.
type fakeIPAM struct {
	mu      sync.Mutex
	next    map[dataplane.Family]netip.Addr
	held    map[string]map[dataplane.Family]netip.Addr // by handle
	more    map[netip.Addr]string                      // further addresses, each with its handle
	fail    error
	refused map[string]error // by handle: releases that fail
	refuses int              // how many have
	denied  map[string]error // by handle: assignments that fail
	stalled chan struct{}    // closed when stall ends
	stall   bool             // wait for the context's end, as a client of a dead datastore does
	lastReq ipam.Part

	reserve bool                  // give without the datastore
	claims  map[netip.Addr]string // given out of it, and not known to the datastore
}

func newFakeIPAM() *fakeIPAM {
	return &fakeIPAM{
		next: map[dataplane.Family]netip.Addr{
			dataplane.IPv4: netip.MustParseAddr("192.168.0.1"), dataplane.IPv6: netip.MustParseAddr("fd00:1::1"),
		},
		held: map[string]map[dataplane.Family]netip.Addr{},
		more: map[netip.Addr]string{},

		claims:  map[netip.Addr]string{},
		refused: map[string]error{},
		denied:  map[string]error{},
	}
}

func (f *fakeIPAM) set(fail error, stall bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.stall {
		close(f.stalled)
	}
	f.fail, f.stall, f.stalled = fail, stall, make(chan struct{})
}

func (f *fakeIPAM) trouble(ctx context.Context) error {
	f.mu.Lock()
	fail, stall, stalled := f.fail, f.stall, f.stalled
	f.mu.Unlock()
	if stall {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-stalled:
		}
	}
	return fail
}

func (f *fakeIPAM) AssignTogether(ctx context.Context, reqs ...ipam.Part) ([][]ipam.Assignment, error) {
	if err := f.trouble(ctx); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.denied[reqs[0].Handle]; err != nil {
		return nil, err
	}
	held := maps.Clone(f.held[reqs[0].Handle])
	if held == nil {
		held = map[dataplane.Family]netip.Addr{}
	}
	var out [][]ipam.Assignment
	for _, req := range reqs {
		f.lastReq = req
		if have, ok := held[req.Family]; ok && req.Addr.IsValid() && have != req.Addr {
			// One more address of the family, by name.
			if f.holder(req.Addr) == "" {
				f.more[req.Addr] = req.Handle
			} else if f.holder(req.Addr) != req.Handle {
				return nil, fmt.Errorf("%s belongs to %s: %w", req.Addr, f.holder(req.Addr), ipam.ErrTaken)
			}
			out = append(out, []ipam.Assignment{{Addr: req.Addr}})
			continue
		}
		a, ok := held[req.Family]
		if !ok {
			if a = req.Addr; !a.IsValid() {
				a = f.next[req.Family]
				for f.more[a] != "" {
					a = a.Next()
				}
				f.next[req.Family] = a.Next()
			}
			if h := f.holder(a); h != "" {
				return nil, fmt.Errorf("%s belongs to %s: %w", a, h, ipam.ErrTaken)
			}
			held[req.Family] = a
		}
		block, err := a.Prefix(a.BitLen() - 6)
		if err != nil {
			return nil, err
		}
		out = append(out, []ipam.Assignment{{Addr: a, Block: block}})
	}
	f.held[reqs[0].Handle] = held
	return out, nil
}

// steal gives an address to a handle of somebody else; empty: it is free
// again.
func (f *fakeIPAM) steal(a netip.Addr, handle string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if handle == "" {
		delete(f.more, a)
		return
	}
	f.more[a] = handle
}

// holder returns the handle that has an address. The lock is held.
func (f *fakeIPAM) holder(a netip.Addr) string {
	for h, held := range f.held {
		if held[dataplane.FamilyOf(a)] == a {
			return h
		}
	}
	return f.more[a]
}

func (f *fakeIPAM) Confirm(ctx context.Context, cs ...ipam.Confirmation) []error {
	errs := make([]error, len(cs))
	err := f.trouble(ctx)
	f.mu.Lock()
	defer f.mu.Unlock()
	for i, c := range cs {
		family := dataplane.FamilyOf(c.Addr)
		switch owner := f.claims[c.Addr]; {
		case err != nil:
			errs[i] = err
		case f.held[c.Handle][family] == c.Addr:
		case owner != c.Handle || f.holder(c.Addr) != "":
			errs[i] = fmt.Errorf("%s is not held for %s but for %q: %w", c.Addr, c.Handle, owner, ipam.ErrNotHolder)
		default:
			if f.held[c.Handle] == nil {
				f.held[c.Handle] = map[dataplane.Family]netip.Addr{}
			}
			f.held[c.Handle][family] = c.Addr
			delete(f.claims, c.Addr)
		}
	}
	return errs
}

func (f *fakeIPAM) Claim(handle string, addrs ...netip.Addr) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, a := range addrs {
		if f.held[handle][dataplane.FamilyOf(a)] != a {
			f.claims[a] = handle
		}
	}
}

// forget is what the end of a daemon does: what was taken from the reserve is known by
// the journal alone.
func (f *fakeIPAM) forget() {
	f.mu.Lock()
	defer f.mu.Unlock()
	clear(f.claims)
}

func (f *fakeIPAM) Unclaim(handle string, addrs ...netip.Addr) {
	f.mu.Lock()
	defer f.mu.Unlock()
	maps.DeleteFunc(f.claims, func(a netip.Addr, h string) bool {
		return h == handle && (len(addrs) == 0 || slices.Contains(addrs, a))
	})
}

func (f *fakeIPAM) CoolDown(string) error { return nil }

func (f *fakeIPAM) Ready() map[string]int {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.reserve {
		return nil
	}
	return map[string]int{"pool": 1}
}

// Take gives out of the reserve, which has no end.
func (f *fakeIPAM) Take(reqs ...ipam.Part) ([]ipam.Assignment, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.reserve || len(f.held[reqs[0].Handle]) > 0 && !reqs[0].Fresh {
		return nil, false
	}
	var out []ipam.Assignment
	for _, req := range reqs {
		if req.Addr.IsValid() {
			return nil, false
		}
		f.lastReq = req
		a := f.next[req.Family]
		f.next[req.Family] = a.Next()
		f.claims[a] = req.Handle
		block, err := a.Prefix(a.BitLen() - 6)
		if err != nil {
			return nil, false
		}
		out = append(out, ipam.Assignment{Addr: a, Block: block})
	}
	return out, true
}

// refuse makes releases of a handle fail; nil: succeed again.
func (f *fakeIPAM) refuse(handle string, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.refused[handle] = err
}

// deny makes assignments to a handle fail; nil: succeed again.
func (f *fakeIPAM) deny(handle string, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.denied[handle] = err
}

func (f *fakeIPAM) refusals() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.refuses
}

func (f *fakeIPAM) ReleaseHandleHere(ctx context.Context, handle string, keep ...netip.Addr) ([]netip.Addr, error) {
	if err := f.trouble(ctx); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.refused[handle]; err != nil {
		f.refuses++
		return nil, err
	}
	maps.DeleteFunc(f.held[handle], func(_ dataplane.Family, a netip.Addr) bool { return !slices.Contains(keep, a) })
	if len(f.held[handle]) == 0 {
		delete(f.held, handle)
	}
	maps.DeleteFunc(f.more, func(a netip.Addr, h string) bool { return h == handle && !slices.Contains(keep, a) })
	return nil, nil
}

func (f *fakeIPAM) handles() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Sorted(maps.Keys(f.held))
}

// claimed lists what was given and the datastore does not know.
func (f *fakeIPAM) claimed() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []string
	for a, h := range f.claims {
		out = append(out, h+" "+a.String())
	}
	return out
}

// fakeSink programs routes into the host's namespace, at once, and forgets
// everything but the kernel's state when the daemon restarts.
type fakeSink struct {
	netlink *netlink.Handle

	mu     sync.Mutex
	want   map[dataplane.Key]dataplane.Object
	kernel map[dataplane.Key]dataplane.Object
	fail   error
	rev    dataplane.Revision
	errs   []error
	synced bool
}

func (s *fakeSink) Replace(_ dataplane.Source, objs []dataplane.Object) dataplane.Revision {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.want = map[dataplane.Key]dataplane.Object{}
	for _, o := range objs {
		s.put(o)
	}
	s.rev++
	return s.rev
}

func (s *fakeSink) Update(_ dataplane.Source, put []dataplane.Object, del []dataplane.Key) dataplane.Revision {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range del {
		delete(s.want, k)
		s.remove(k)
	}
	for _, o := range put {
		s.put(o)
	}
	s.rev++
	return s.rev
}

func (s *fakeSink) put(o dataplane.Object) {
	s.want[o.Key()] = o
	if r, ok := o.(dataplane.Route); ok {
		if err := s.addRoute(r); err != nil {
			s.errs = append(s.errs, fmt.Errorf("add route %s: %w", r, err))
			return
		}
	}
	s.kernel[o.Key()] = o
}

func (s *fakeSink) addRoute(r dataplane.Route) error {
	link, err := s.netlink.LinkByName(r.Link)
	if err != nil {
		return err
	}
	return s.netlink.RouteReplace(&netlink.Route{
		LinkIndex: link.Attrs().Index, Scope: netlink.SCOPE_LINK, Protocol: 77, Dst: ipNet(r.Prefix),
	})
}

func (s *fakeSink) remove(k dataplane.Key) {
	delete(s.kernel, k)
	if r, ok := k.(dataplane.RouteKey); ok {
		err := s.netlink.RouteDel(&netlink.Route{Protocol: 77, Scope: netlink.SCOPE_LINK, Dst: ipNet(r.Prefix)})
		if err != nil && !errors.Is(err, unix.ESRCH) {
			s.errs = append(s.errs, err)
		}
	}
}

func (s *fakeSink) Synced(dataplane.Source) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.synced = true
	for k := range s.kernel {
		if _, ok := s.want[k]; !ok {
			s.remove(k)
		}
	}
}

func (s *fakeSink) Wait(ctx context.Context, _ dataplane.Revision) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	errs := s.errs
	s.errs = nil
	return errors.Join(append(errs, s.fail, ctx.Err())...)
}

func (s *fakeSink) wanted() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []string
	for _, o := range s.want {
		out = append(out, o.Key().Kind().String()+" "+o.String())
	}
	slices.Sort(out)
	return out
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// world is a host with its datastore; it outlives the daemon.
type world struct {
	t     testing.TB
	host  *netnstest.Netns
	wire  *workload.Wire
	sink  *fakeSink
	ipam  *fakeIPAM
	store *memory.Store
	dir   string
	mtu   MTU           // what the daemon says at its start
	cfg   func(*Config) // changes to the configuration; may be nil

	journal *journal.Journal // of the present daemon
}

func newWorld(t testing.TB) *world {
	t.Helper()
	w := &world{t: t, host: netnstest.New(t), ipam: newFakeIPAM(), store: memory.New(), dir: t.TempDir(), mtu: MTU{IPv4: 1450}}
	var err error
	if w.wire, err = workload.New(workload.Config{HostNetns: w.host.Path}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.wire.Close)
	t.Cleanup(func() { _ = w.store.Close() })
	w.sink = &fakeSink{kernel: map[dataplane.Key]dataplane.Object{}, want: map[dataplane.Key]dataplane.Object{}}
	err = w.host.Do(func() (err error) {
		w.sink.netlink, err = netlink.NewHandle()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.sink.netlink.Close)
	return w
}

// sysctl reads a setting of the host.
func (w *world) sysctl(name string) string {
	w.t.Helper()
	var b []byte
	err := w.host.Do(func() (err error) {
		b, err = os.ReadFile("/proc/sys/" + name)
		return err
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return strings.TrimSpace(string(b))
}

// start starts the daemon: with an empty memory beside what the world has.
func (w *world) start() *Attacher {
	w.t.Helper()
	a := w.create()
	if err := a.Restore(w.t.Context()); err != nil {
		w.t.Fatal(err)
	}
	if err := a.SetMTU(w.t.Context(), w.mtu); err != nil {
		w.t.Fatal(err)
	}
	return a
}

func (w *world) create() *Attacher {
	w.t.Helper()
	var err error
	if w.journal, err = journal.Open(filepath.Join(w.dir, "journal"), slog.New(slog.DiscardHandler)); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = w.journal.Close() })
	cfg := Config{
		Node: "node-a", Dir: w.dir, Journal: w.journal, IPAM: w.ipam, Sink: w.sink, Store: w.store, Wire: w.wire,
		Retry: time.Millisecond,
	}
	if w.cfg != nil {
		w.cfg(&cfg)
	}
	w.ipam.forget()
	a, err := New(cfg)
	if err != nil {
		w.t.Fatal(err)
	}
	if err := a.SetMTU(w.t.Context(), w.mtu); !errors.Is(err, ErrNotReady) {
		w.t.Fatalf("set MTU before the records are restored: %v, want ErrNotReady", err)
	}
	return a
}

// run starts the daemon's background work and ends it with the test.
func (w *world) run(a *Attacher) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		a.Run(ctx)
	}()
	w.t.Cleanup(func() { cancel(); <-done })
}

func (w *world) request(n int) AddRequest {
	w.t.Helper()
	return AddRequest{
		ID:    ID{Network: "net1", ContainerID: fmt.Sprintf("%016x", n), Interface: "eth0"},
		Netns: netnstest.New(w.t).Path,
		IPv4:  true,
	}
}

func podRequest(req AddRequest, namespace, pod string) AddRequest {
	req.Workload = Workload{Orchestrator: Kubernetes, Namespace: namespace, Pod: pod}
	return req
}

func delOf(req AddRequest) DelRequest { return DelRequest{ID: req.ID, Workload: req.Workload} }

// leftovers lists everything that attachments make, wherever it is.
func (w *world) leftovers() []string {
	w.t.Helper()
	var out []string
	devices, err := w.wire.Devices(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	for d := range devices {
		out = append(out, "device "+d)
	}
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		routes, err := w.sink.netlink.RouteList(nil, family)
		if err != nil {
			w.t.Fatal(err)
		}
		for _, r := range routes {
			if r.Protocol != unix.RTPROT_KERNEL { // link-local addresses have routes of the kernel's own
				out = append(out, "kernel route "+r.Dst.String())
			}
		}
	}
	out = append(out, w.sink.wanted()...)
	for _, h := range w.ipam.handles() {
		out = append(out, "handle "+h)
	}
	endpoints, _, err := w.store.List(w.t.Context(), store.KindWorkloadEndpoint, "")
	if err != nil {
		w.t.Fatal(err)
	}
	for _, e := range endpoints {
		out = append(out, e.Key.String())
	}
	for _, c := range w.ipam.claimed() {
		out = append(out, "claim of "+c)
	}
	for key := range w.journal.Entries() {
		out = append(out, "record "+key)
	}
	slices.Sort(out)
	return out
}

func (w *world) clean() error {
	if left := w.leftovers(); len(left) > 0 {
		return fmt.Errorf("left behind:\n\t%s", strings.Join(left, "\n\t"))
	}
	return nil
}

func (w *world) expectClean() {
	w.t.Helper()
	if err := w.clean(); err != nil {
		w.t.Error(err)
	}
}

func (w *world) add(a *Attacher, req AddRequest) Result {
	w.t.Helper()
	res, err := a.Add(w.t.Context(), req)
	if err != nil {
		w.t.Fatalf("add: %v", err)
	}
	return res
}

func (w *world) del(a *Attacher, req AddRequest) {
	w.t.Helper()
	if err := a.Del(w.t.Context(), delOf(req)); err != nil {
		w.t.Fatalf("del: %v", err)
	}
}

func (w *world) check(a *Attacher, req AddRequest) {
	w.t.Helper()
	if err := a.Check(w.t.Context(), CheckRequest{ID: req.ID, Netns: req.Netns}); err != nil {
		w.t.Errorf("check: %v", err)
	}
}

func (w *world) endpoint(namespace, name string) *store.WorkloadEndpoint {
	w.t.Helper()
	o, err := w.store.Get(w.t.Context(), store.Key{Kind: store.KindWorkloadEndpoint, Namespace: namespace, Name: name})
	if err != nil {
		w.t.Fatal(err)
	}
	return o.Value.(*store.WorkloadEndpoint)
}

func diff(t *testing.T, what string, want, got any, opts ...cmp.Option) {
	t.Helper()
	if d := cmp.Diff(want, got, append(opts, cmp.Comparer(func(a, b netip.Addr) bool { return a == b }), cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }))...); d != "" {
		t.Errorf("%s (-want +got):\n%s", what, d)
	}
}

// logTo returns a logger that writes to b.
func logTo(mu *sync.Mutex, b *strings.Builder) *slog.Logger {
	return slog.New(slog.NewTextHandler(lockedWriter{mu, b}, nil))
}

type lockedWriter struct {
	mu *sync.Mutex
	b  *strings.Builder
}

func (w lockedWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.b.Write(p)
}
