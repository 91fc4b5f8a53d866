package attach

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/control/journal"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/workload"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/memory"
)

// life is that of one daemon: it ends at one of the points that the daemon comes by.
type life struct {
	end  func()        // what the daemon's end leaves is kept
	over chan struct{} // closed with the test

	mu    sync.Mutex
	at    int      // the point at which it ends; 0: at none
	came  []string // points
	ended chan struct{}
}

// reach lets the daemon go on from a point, unless it ends there or has ended: nothing that follows
// takes place then.
func (l *life) reach(point string) error {
	l.mu.Lock()
	if !l.hasEnded() {
		if l.came = append(l.came, point); len(l.came) != l.at {
			l.mu.Unlock()
			return nil
		}
		l.kill()
	}
	l.mu.Unlock()
	<-l.over
	return errKilled
}

func (l *life) hasEnded() bool {
	select {
	case <-l.ended:
		return true
	default:
		return false
	}
}

// kill ends it, if it lasts. The lock is held.
func (l *life) kill() {
	if !l.hasEnded() {
		close(l.ended)
		l.end()
	}
}

// death is a node whose daemons die, on Kubernetes' API, beside another node that takes every
// address that it can have.
type death struct {
	t     *testing.T
	db    *memory.Store
	ctx   context.Context // ends with the test, before what it made is removed
	over  chan struct{}
	tasks sync.WaitGroup

	mu      sync.Mutex
	devices map[string]string       // those of the kernel, with their aliases
	live    map[string][]netip.Addr // by handle, of containers that were attached and whose end nobody asked for
	pods    map[string]*mortalPod   // by name
}

// mortalPod is a pod as the kubelet has it.
type mortalPod struct {
	req      AddRequest
	begun    bool // ADD was asked for
	attached bool // and answered
	leaving  bool // DEL was asked for
	gone     bool // and answered
}

// mortalDaemon is a daemon with what it has in memory.
type mortalDaemon struct {
	*Attacher
	w    *death
	ipam *ipam.Allocator
	sink *mortalSink
	life *life
	left string        // the state directory as its end left it
	back chan struct{} // closed when the API answers
}

func newDeath(t *testing.T) *death {
	t.Helper()
	_ = t.TempDir() // is removed after what comes now
	ctx, cancel := context.WithCancel(context.Background())
	w := &death{
		t: t, db: memory.New(), ctx: ctx, over: make(chan struct{}), devices: make(map[string]string), live: make(map[string][]netip.Addr),
		pods: make(map[string]*mortalPod),
	}
	t.Cleanup(func() {
		cancel()
		close(w.over)
		w.tasks.Wait()
		_ = w.db.Close()
	})
	pool := func(name, cidr string, bits int) *v3.IPPool {
		p := v3.NewIPPool()
		p.Name, p.Spec.CIDR, p.Spec.BlockSize = name, cidr, bits
		return p
	}
	node := func(name string) *store.Node {
		return &store.Node{TypeMeta: metav1.TypeMeta{Kind: "Node", APIVersion: store.APIVersion}, ObjectMeta: metav1.ObjectMeta{Name: name}}
	}
	for _, v := range []any{pool("four", "10.0.0.0/27", 29), pool("six", "fd00:10::/123", 125), node("node-a"), node("node-b")} {
		if _, err := store.Create(t.Context(), w.db, v); err != nil {
			t.Fatal(err)
		}
	}
	for i, name := range []string{"a", "b", "c", "d"} {
		p := kubePod(types.UID("uid-"+name), nil)
		p.Name, p.Spec.Pod = "node--a-k8s-"+name+"-eth0", name
		if _, err := store.Create(t.Context(), w.db, p); err != nil {
			t.Fatal(err)
		}
		req := AddRequest{ID: ID{Network: "net1", ContainerID: fmt.Sprintf("%016x", i+1), Interface: "eth0"}, Netns: "/run/netns/" + name, IPv4: true, IPv6: true, PodUID: string(p.UID)}
		w.pods[name] = &mortalPod{req: podRequest(req, "ns1", name)}
	}
	return w
}

// api is Kubernetes' API as one daemon, or another node, sees it.
type api struct {
	store.Store // one object at a time
	w           *death
	back        <-chan struct{}
	life        *life
}

var errAway = fmt.Errorf("%w: connection refused", store.ErrUnavailable)

func (w *death) api(l *life, back <-chan struct{}) *api {
	x := &api{w: w, life: l, back: back}
	x.Store = memory.SequentialOn(w.db, func(op store.Op) error { return l.reach("before the write of " + op.Object.Key.String()) })
	return x
}

func (x *api) away() bool {
	select {
	case <-x.back:
		return false
	default:
		return true
	}
}

func (x *api) Get(ctx context.Context, key store.Key) (store.Object, error) {
	if x.away() {
		return store.Object{}, errAway
	}
	return x.Store.Get(ctx, key)
}

func (x *api) List(ctx context.Context, kind store.Kind, namespace string) ([]store.Object, store.Revision, error) {
	if x.away() {
		return nil, 0, errAway
	}
	return x.Store.List(ctx, kind, namespace)
}

func (x *api) Txn(ctx context.Context, ops ...store.Op) ([]store.Object, error) {
	if x.away() {
		return nil, errAway
	}
	var out []store.Object
	var err error
	if len(ops) == 1 && ops[0].Object.Key.Kind == store.KindWorkloadEndpoint {
		out, err = x.patch(ctx, ops[0])
	} else {
		out, err = x.Store.Txn(ctx, ops...)
	}
	x.w.look()
	if dead := x.life.reach("after the write of " + ops[0].Object.Key.String()); dead != nil {
		return nil, dead
	}
	return out, err
}

// patch writes the addresses of a pod that exists, or that it has none any more, and no more of it.
func (x *api) patch(ctx context.Context, op store.Op) ([]store.Object, error) {
	says, _ := op.Object.Value.(*store.WorkloadEndpoint)
	for {
		cur, err := x.Store.Get(ctx, op.Object.Key)
		if errors.Is(err, store.ErrNotFound) && op.Action == store.Remove {
			return []store.Object{{}}, nil
		}
		if err != nil {
			return nil, err
		}
		next := store.Clone(cur.Value).(*store.WorkloadEndpoint)
		switch {
		case op.Action == store.Put:
			next.Spec.ContainerID, next.Spec.IPNetworks = says.Spec.ContainerID, says.Spec.IPNetworks
		case next.Spec.ContainerID == says.Spec.ContainerID:
			next.Spec.IPNetworks = nil
		}
		out, err := x.Store.Txn(ctx, store.Op{If: store.IfRevision(cur.Revision), Action: store.Put, Object: store.Object{Key: op.Object.Key, Value: next}})
		if !errors.Is(err, store.ErrConflict) {
			return out, err
		}
	}
}

func (x *api) Watch(ctx context.Context, kinds ...store.Kind) <-chan store.Batch {
	out := make(chan store.Batch)
	x.w.tasks.Go(func() {
		defer close(out)
		send := func(b store.Batch) bool {
			select {
			case out <- b:
				return true
			case <-ctx.Done():
				return false
			}
		}
		if x.away() && !send(store.Batch{Err: errAway}) {
			return
		}
		select {
		case <-x.back:
		case <-ctx.Done():
			return
		}
		for b := range x.Store.Watch(ctx, kinds...) {
			if !send(b) {
				return
			}
		}
	})
	return out
}

// look looks whether the address of a container that lives is another's in the datastore.
func (w *death) look() {
	w.mu.Lock()
	defer w.mu.Unlock()
	blocks, _, err := w.db.List(context.Background(), store.KindIPAMBlock, "")
	if err != nil {
		return // the test is over
	}
	for _, o := range blocks {
		b := o.Value.(*store.Block)
		for handle, addrs := range w.live {
			for _, a := range addrs {
				n, ok := b.Ordinal(a)
				if !ok || !o.Key.CIDR().Contains(a) {
					continue
				}
				at, has := b.Attribute(n), "nobody"
				if at != nil && at.HandleID != nil {
					has = *at.HandleID
				}
				if has != handle && has != store.ReserveHandle("node-a") {
					w.t.Errorf("%s of %s, which lives, is %s's", a, handle, has)
				}
			}
		}
	}
}

// mortalWire is the kernel's wires as a daemon makes them.
type mortalWire struct{ *mortalDaemon }

func (x mortalWire) change(what string, change func(devices map[string]string)) error {
	if err := x.life.reach("before " + what); err != nil {
		return err
	}
	x.w.mu.Lock()
	change(x.w.devices)
	x.w.mu.Unlock()
	return x.life.reach("after " + what)
}

func (x mortalWire) Attach(_ context.Context, s workload.Spec) (workload.End, error) {
	return workload.End{}, x.change("the wire", func(devices map[string]string) { devices[s.Device] = s.Owner.Alias() })
}

func (x mortalWire) Detach(_ context.Context, device string, owner workload.Owner) error {
	return x.change("the wire's end", func(devices map[string]string) {
		if devices[device] == owner.Alias() {
			delete(devices, device)
		}
	})
}

func (x mortalWire) Devices(context.Context) (map[string]string, error) {
	x.w.mu.Lock()
	defer x.w.mu.Unlock()
	return maps.Clone(x.w.devices), nil
}

func (mortalWire) Verify(context.Context, workload.Spec, dataplane.MAC) error { return nil }
func (mortalWire) SetMTU(context.Context, workload.Spec, ...int) error        { return nil }
func (mortalWire) VerifyRoute(context.Context, string, netip.Addr) error      { return nil }
func (mortalWire) HostSysctls(string, []netip.Addr) []dataplane.Sysctl        { return nil }
func (mortalWire) Mark(context.Context, string, workload.Owner) error         { return nil }
func (mortalWire) Inspect(context.Context, string, workload.Owner) (workload.Found, error) {
	return workload.Found{}, workload.ErrDiffers
}

// mortalSink is the kernel's routes, as the present daemon wants them.
type mortalSink struct {
	mu   sync.Mutex
	want map[dataplane.Key]dataplane.Object
}

func (s *mortalSink) Replace(src dataplane.Source, objs []dataplane.Object) dataplane.Revision {
	s.mu.Lock()
	clear(s.want)
	s.mu.Unlock()
	return s.Update(src, objs, nil)
}

func (s *mortalSink) Update(_ dataplane.Source, put []dataplane.Object, del []dataplane.Key) dataplane.Revision {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range del {
		delete(s.want, k)
	}
	for _, o := range put {
		s.want[o.Key()] = o
	}
	return 1
}

func (*mortalSink) Synced(dataplane.Source)                        {}
func (*mortalSink) Wait(context.Context, dataplane.Revision) error { return nil }

// mortalJournal is what IPAM writes down.
type mortalJournal struct {
	*journal.Journal
	life *life
}

func (j mortalJournal) Put(key string, value any) error {
	if err := j.life.reach("before " + key + " is written down"); err != nil {
		return err
	}
	return errors.Join(j.Journal.Put(key, value), j.life.reach("after "+key+" is written down"))
}

func (j mortalJournal) Delete(key string) error {
	if err := j.life.reach("before " + key + " is struck out"); err != nil {
		return err
	}
	return errors.Join(j.Journal.Delete(key), j.life.reach("after "+key+" is struck out"))
}

// The waits of [death]'s daemons: long enough for a container to end within them, and short
// enough for others to outlive them.
const (
	mortalConfirm = 60 * time.Millisecond
	mortalEnd     = 30 * time.Millisecond
)

// start starts a daemon on a state directory, that dies at a point, 0: at none.
func (w *death) start(dir string, point int, away bool) *mortalDaemon {
	w.t.Helper()
	d := &mortalDaemon{w: w, left: w.t.TempDir(), back: make(chan struct{}), sink: &mortalSink{want: make(map[dataplane.Key]dataplane.Object)}}
	d.life = &life{at: point, over: w.over, ended: make(chan struct{}), end: func() { copyFiles(w.t, dir, d.left) }}
	if !away {
		close(d.back)
	}
	log := slog.New(slog.DiscardHandler)
	j, err := journal.Open(filepath.Join(dir, "journal"), log)
	if err != nil {
		w.t.Fatal(err)
	}
	db := w.api(d.life, d.back)
	d.ipam = ipam.New(ipam.Config{Store: db, Node: "node-a", Log: log, Piecewise: true, Reserve: ipam.ReserveConfig{Min: 2, Max: 2, Journal: mortalJournal{j, d.life}}})
	d.Attacher, err = New(Config{
		Node: "node-a", Dir: dir, Journal: j, IPAM: d.ipam, Sink: d.sink, Store: db, Wire: mortalWire{d}, Kubernetes: true, Behind: true,
		Retry: time.Millisecond, Linger: time.Millisecond, LingerConfirm: mortalConfirm, LingerEnd: mortalEnd, StoreTimeout: 5 * time.Second, Log: log,
	})
	if err != nil {
		w.t.Fatal(err)
	}
	d.pods.patience = 100 * time.Millisecond
	at(d.Attacher, d.life.reach)
	c := cluster.New(cluster.Config{Store: db, Node: "node-a", Log: log, File: filepath.Join(dir, "cluster")})
	ofIPAM, ofAttach, ofPods := c.Follow(ipam.Kinds()...), c.Follow(Kinds()...), c.Follow(PodKinds()...)
	c.Load(ofIPAM, ofAttach, ofPods)
	if err := d.Restore(w.ctx); err != nil {
		w.t.Fatal(err)
	}
	if err := d.SetMTU(w.ctx, MTU{IPv4: 1450, IPv6: 1450}); err != nil {
		w.t.Fatal(err)
	}
	var parts sync.WaitGroup
	parts.Go(func() { _ = c.Run(w.ctx); _ = c.Close() })
	parts.Go(func() { _ = d.ipam.Run(w.ctx, ofIPAM) })
	parts.Go(func() {
		_ = ofAttach.Each(w.ctx, func(_ context.Context, s cluster.Step) error { d.HandleStore(s); return nil })
	})
	parts.Go(func() {
		_ = ofPods.Each(w.ctx, func(_ context.Context, s cluster.Step) error { d.HandlePods(s); return nil })
	})
	parts.Go(func() { d.Run(w.ctx) })
	w.tasks.Go(func() { parts.Wait(); _ = j.Close() })
	return d
}

// copyFiles copies a directory that is written to.
func copyFiles(t *testing.T, from, to string) {
	entries, err := os.ReadDir(from)
	if err != nil {
		t.Error(err)
	}
	for _, e := range entries {
		b, err := os.ReadFile(filepath.Join(from, e.Name()))
		if err == nil {
			err = os.WriteFile(filepath.Join(to, e.Name()), b, 0o600)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Error(err)
		}
	}
}
