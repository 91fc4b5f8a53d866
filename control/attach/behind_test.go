package attach

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/cluster/clustertest"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

// newBehind returns a host whose datastore is told afterwards.
func newBehind(t *testing.T) *world {
	t.Helper()
	w := newWorld(t)
	w.ipam.reserve = true
	w.cfg = func(c *Config) {
		c.Behind, c.Linger, c.StoreTimeout = true, time.Millisecond, 10*time.Second
	}
	return w
}

// settle does what the background would, once.
func settle(t *testing.T, a *Attacher) {
	t.Helper()
	told := a.flusher.all(t.Context(), now)
	if !a.releaser.detachAll(t.Context()) || !told || !a.releaser.complete(t.Context(), now) {
		t.Error("the datastore is not told of everything")
	}
}

// numbered is a request whose device is named after the number.
func (w *world) numbered(i int) AddRequest {
	w.t.Helper()
	req := w.request(i)
	req.ID.ContainerID = fmt.Sprint("c", i)
	return req
}

// away makes the datastore unreachable, or reachable again.
func (w *world) away(away bool) {
	if !away {
		w.store.Fail(nil)
		w.ipam.set(nil, false)
		return
	}
	w.store.Fail(errors.New("connection refused"))
	w.ipam.set(fmt.Errorf("%w: connection refused", store.ErrUnavailable), false)
}

func (w *world) endpoints() int {
	w.t.Helper()
	list, _, err := w.store.List(w.t.Context(), store.KindWorkloadEndpoint, "")
	if err != nil {
		w.t.Fatal(err)
	}
	return len(list)
}

// announcedTo is called with what is announced.
type announcedTo func(store.Event)

func (f announcedTo) Announce(ev store.Event)         { f(ev) }
func (announcedTo) Written(store.Key, store.Revision) {}
func (announcedTo) Ended(store.Key, bool)             {}

// ADD and DEL do not ask the datastore, which hears of both afterwards.
func TestBehind(t *testing.T) {
	t.Parallel()
	w := newBehind(t)
	a := w.start()
	w.away(true)
	var reqs []AddRequest
	for i := range 5 {
		reqs = append(reqs, w.numbered(i))
		w.add(a, reqs[i])
		w.check(a, reqs[i])
	}
	if err := a.Status(t.Context()); err != nil {
		t.Errorf("status: %v", err)
	}
	w.del(a, reqs[4]) // nobody has heard of it, and nobody will
	if !a.releaser.detachAll(t.Context()) || !a.releaser.complete(t.Context(), now) {
		t.Error("what the datastore never heard of waits for it")
	}
	if got := len(w.ipam.claimed()); got != 4 {
		t.Errorf("%d addresses are claimed, want 4: %v", got, w.ipam.claimed())
	}
	if a.flusher.all(t.Context(), now) {
		t.Error("a datastore that is away was told")
	}
	w.del(a, reqs[3]) // it may have heard of this one
	if !a.releaser.detachAll(t.Context()) || a.releaser.complete(t.Context(), now) {
		t.Error("released without the datastore")
	}
	if got := len(w.ipam.claimed()); got != 4 {
		t.Errorf("%d addresses are claimed, want 4: an address is free before the datastore knows", got)
	}
	w.away(false)
	settle(t, a)
	if got := w.endpoints(); got != 3 {
		t.Errorf("%d endpoints, want 3", got)
	}
	diff(t, "handles", []string{handle(reqs[0].ID), handle(reqs[1].ID), handle(reqs[2].ID)}, w.ipam.handles())
	e := w.endpoint("default", "node--a-cni-c1-eth0")
	if e.Spec.MAC == "" || e.Spec.IPNetworks[0] != "192.168.0.2/32" {
		t.Errorf("endpoint %+v", e.Spec)
	}
	for _, r := range reqs[:3] {
		w.check(a, r)
		w.del(a, r)
		w.del(a, r)
	}
	settle(t, a)
	w.expectClean()
}

// The host loses its power while the datastore is away: the daemon and the
// namespaces are gone, the disk stays. More comes and goes, and then the
// datastore is back.
func TestBehindReboot(t *testing.T) {
	t.Parallel()
	w := newBehind(t)
	w.mtu = MTU{IPv4: 1450}
	a := w.start()
	var before []AddRequest
	for i := range 6 {
		before = append(before, w.numbered(i))
		res := w.add(a, before[i])
		if i == 2 {
			settle(t, a) // the datastore knows of three
			w.away(true)
		}
		if err := w.wire.Detach(t.Context(), res.Device, before[i].ID); err != nil {
			t.Fatal(err)
		}
	}
	w.sink.Replace(dataplane.SourceWorkload, nil)
	b := w.start()
	got := map[netip.Addr]bool{}
	for _, r := range b.ledger.snapshot() {
		for _, addr := range r.addrs() {
			got[addr] = true
		}
	}
	var after []AddRequest
	for i := range 10 {
		after = append(after, w.numbered(100+i))
		res := w.add(b, after[i])
		if addr := res.Addresses[0].Addr; got[addr] {
			t.Errorf("%s is given twice", addr)
		}
		got[res.Addresses[0].Addr] = true
	}
	// The runtime cleans up after the reboot, and some of the new ones end.
	for _, r := range append(before, after[:5]...) {
		w.del(b, r)
	}
	w.run(b)
	w.away(false)
	await.True(w.t, "five attachments", func() bool { return len(b.ledger.snapshot()) == 5 && w.endpoints() == 5 && len(w.ipam.claimed()) == 0 })
	for _, r := range after[5:] {
		w.check(b, r)
		w.del(b, r)
	}
	await.Until(w.t, "clean", w.clean)
}

func behindAddSteps() []string {
	return append(addSteps(), points("confirm addresses", "write endpoints", "note flushed")...)
}

func behindDelSteps() []string {
	return points("mark", "answer", "detach", "delete endpoint", "release address", "forget")
}

// The daemon is killed at each step of ADD and of what follows it. Then the
// runtime tries again, gives up, or does nothing, with the datastore there or
// away at first.
func TestKilledInAddBehind(t *testing.T) {
	t.Parallel()
	for _, step := range behindAddSteps() {
		for _, then := range []string{"ADD", "DEL", "GC", "background"} {
			for _, away := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/%s/away %v", step, then, away), func(t *testing.T) {
					t.Parallel()
					w := newBehind(t)
					req := w.request(1)
					a := w.start()
					killAt(a, step)
					dies(t, func() { _, _ = a.Add(t.Context(), req); a.flusher.all(t.Context(), now) })
					w.away(away)
					b := w.start()
					w.run(b)
					switch then {
					case "ADD":
						if _, err := b.Add(t.Context(), req); err != nil && !away {
							t.Errorf("add: %v", err)
						}
					case "DEL":
						w.del(b, req)
					case "GC":
						if _, err := b.GC(t.Context(), req.ID.Network, nil); err != nil && !away {
							t.Error(err)
						}
					}
					w.away(false)
					if then == "ADD" {
						await.Until(t, "added", func() error { _, err := b.Add(t.Context(), req); return err })
						w.check(b, req)
					}
					w.del(b, req)
					await.Until(w.t, "clean", w.clean)
				})
			}
		}
	}
}

func TestKilledInDelBehind(t *testing.T) {
	t.Parallel()
	for _, step := range behindDelSteps() {
		for _, then := range []string{"DEL", "ADD", "background"} {
			for _, told := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/%s/told %v", step, then, told), func(t *testing.T) {
					t.Parallel()
					if asks := strings.HasSuffix(step, "delete endpoint") || strings.HasSuffix(step, "release address"); asks && !told {
						return // the datastore is not asked
					}
					w := newBehind(t)
					req := w.request(1)
					a := w.start()
					w.add(a, req)
					if told {
						settle(t, a)
					}
					killAt(a, step)
					dies(t, func() {
						_ = a.Del(t.Context(), delOf(req))
						_ = a.releaser.completeOne(t.Context(), req.ID, a.schedule.waits)
					})
					b := w.start()
					w.run(b)
					switch then {
					case "ADD":
						w.add(b, req)
						w.check(b, req)
						w.del(b, req)
					case "DEL":
						w.del(b, req)
					case "background":
						if step == "before mark" {
							w.check(b, req) // nothing was begun
							w.del(b, req)
						}
					}
					await.Until(w.t, "clean", w.clean)
				})
			}
		}
	}
}

// A failure at each step of ADD is undone, and the address goes back.
func TestFailureInAddBehind(t *testing.T) {
	t.Parallel()
	for _, step := range addSteps() {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			w := newBehind(t)
			a := w.start()
			w.run(a)
			req := w.request(1)
			failAt(a, step)
			w.away(true)
			if _, err := a.Add(t.Context(), req); !errors.Is(err, errInjected) {
				t.Fatalf("got %v", err)
			}
			w.away(false)
			await.Until(w.t, "clean", w.clean)
		})
	}
}

// ADDs and DELs of one container at once, while the datastore is told.
func TestBehindAddAndDelAtOnce(t *testing.T) {
	t.Parallel()
	w := newBehind(t)
	a := w.start()
	w.run(a)
	req := w.request(1)
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() {
			if _, err := a.Add(t.Context(), req); err != nil {
				t.Error(err)
			}
		})
		wg.Go(func() {
			if err := a.Del(t.Context(), delOf(req)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	w.del(a, req)
	await.Until(w.t, "clean", w.clean)
}

// An address of a running workload is somebody else's in the datastore: its
// route goes and the workload is named; when the other is gone, it is served
// again.
func TestBehindAddressLost(t *testing.T) {
	t.Parallel()
	for _, told := range []bool{false, true} {
		t.Run(fmt.Sprint("told ", told), func(t *testing.T) {
			t.Parallel()
			w := newBehind(t)
			var log strings.Builder
			var mu sync.Mutex
			configure := w.cfg
			w.cfg = func(c *Config) { configure(c); c.Log = logTo(&mu, &log) }
			a := w.start()
			req := w.request(1)
			res := w.add(a, req)
			addr := res.Addresses[0].Addr
			if told {
				settle(t, a)
				w.forget() // with the Node
				a.HandleStore(clustertest.Step("node-a", nodeBatch("node-a", true, true)))
				a.HandleStore(clustertest.Step("node-a", nodeBatch("node-a", false, false)))
			}
			w.ipam.steal(addr, "thief")
			if a.flusher.all(t.Context(), now) != told {
				t.Error("an address of somebody else was confirmed")
			}
			if !a.reclaimer.all(t.Context()) {
				t.Error("what is somebody else's is asked for again and again")
			}
			for _, want := range w.sink.wanted() {
				if strings.Contains(want, "route ") {
					t.Errorf("there is still the %s", want)
				}
			}
			if e := a.Endpoints(); len(e) != 1 || !strings.Contains(e[0].Lost, "thief") {
				t.Errorf("endpoints %+v", e)
			}
			mu.Lock()
			if got := log.String(); !strings.Contains(got, "its route is removed") || !strings.Contains(got, req.ID.ContainerID) {
				t.Errorf("log: %s", got)
			}
			mu.Unlock()

			// It stays so across a restart.
			a = w.start()
			if got := w.sink.wanted(); len(got) > 0 && strings.Contains(strings.Join(got, " "), "route "+addr.String()) {
				t.Errorf("wants after a restart: %v", got)
			}
			w.ipam.steal(addr, "")
			a.HandleStore(clustertest.Step("node-a", nodeBatch("node-a", true, true)))
			a.HandleStore(clustertest.Step("node-a", nodeBatch("node-a", false, false)))
			if !a.reclaimer.all(t.Context()) {
				t.Error("not reclaimed")
			}
			w.check(a, req)
			w.del(a, req)
			settle(t, a)
			w.expectClean()
		})
	}
}

// Endpoints are announced to the parts of this host at once, also their end, and
// before them the profile of a new network.
func TestBehindAnnounces(t *testing.T) {
	t.Parallel()
	w := newBehind(t)
	var got []string
	configure := w.cfg
	w.cfg = func(c *Config) {
		configure(c)
		c.OwnWrites = announcedTo(func(ev store.Event) { got = append(got, fmt.Sprint(ev.Key.Name, " ", ev.Deleted())) })
	}
	a := w.start()
	req := w.request(1)
	w.away(true)
	w.add(a, req)
	w.del(a, req)
	want := []string{"net1 false", "node--a-cni-0000000000000001-eth0 false", "node--a-cni-0000000000000001-eth0 true"}
	diff(t, "announced", want, got)

	// A profile that the datastore has is not announced.
	key := store.ResourceKey(store.KindProfile, "net1")
	a.HandleStore(clustertest.Step("node-a", store.Batch{Events: []store.Event{{Key: key, Object: store.Object{Key: key, Value: profileOf("net1")}}}}))
	got = nil
	w.add(a, w.numbered(2))
	diff(t, "announced", []string{"node--a-cni-c2-eth0 false"}, got)
}

// A DEL for a pod's earlier container, or one that comes again, does not end
// the endpoint of the next one, which has the same name.
func TestBehindKeepsTheNextContainersEndpoint(t *testing.T) {
	t.Parallel()
	w := newBehind(t)
	var got []string
	configure := w.cfg
	w.cfg = func(c *Config) {
		configure(c)
		c.OwnWrites = announcedTo(func(ev store.Event) {
			if ev.Key.Kind == store.KindWorkloadEndpoint {
				got = append(got, fmt.Sprint(ev.Key.Name, " ", ev.Deleted()))
			}
		})
	}
	a := w.start()
	first, next := podRequest(w.request(1), "default", "web"), podRequest(w.request(2), "default", "web")
	w.add(a, first)
	w.add(a, next)
	w.del(a, first)
	settle(t, a)
	w.del(a, first) // there is no record of it any more
	const name = "node--a-k8s-web-eth0"
	diff(t, "announced", []string{name + " false", name + " false"}, got)
	w.del(a, next)
	diff(t, "announced", []string{name + " false", name + " false", name + " true"}, got)
	settle(t, a)
	w.expectClean()
}

// The datastore's word of an earlier container's end comes after the next one of
// the same name was announced, and does not take its endpoint along, until the
// datastore has that and says that it ended, too.
func TestBehindStandsAfterLateEnd(t *testing.T) {
	t.Parallel()
	for _, echo := range []bool{false, true} { // the same container's earlier write, late as well
		t.Run(fmt.Sprint("echo ", echo), func(t *testing.T) {
			t.Parallel()
			w := newBehind(t)
			for _, name := range []string{"n1", "n2", "n3"} { // the late events are older than what is written
				if _, err := store.Create(t.Context(), w.store, &store.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}); err != nil {
					t.Fatal(err)
				}
			}
			batches := make(chan store.Batch)
			c := cluster.New(cluster.Config{Store: clustertest.Says(batches), Node: "node-a", Log: slog.New(slog.DiscardHandler)})
			f := c.Follow(store.KindWorkloadEndpoint, store.KindProfile)
			running, stop := context.WithCancel(t.Context())
			ended := make(chan struct{})
			go func() { defer close(ended); _ = c.Run(running) }()
			defer func() { stop(); <-ended }()
			configure := w.cfg
			w.cfg = func(cfg *Config) { configure(cfg); cfg.OwnWrites = c }
			a := w.start()
			const name = "node--a-k8s-web-eth0"
			key := store.Key{Kind: store.KindWorkloadEndpoint, Namespace: "default", Name: name}
			var have *store.WorkloadEndpoint
			profile := false
			follow := func(rev store.Revision) {
				t.Helper()
				if rev > 0 {
					await.True(w.t, "the watch is as far", func() bool { return c.Revision() >= rev })
				}
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				reads := make(chan struct{})
				go func() {
					defer close(reads)
					for s := range f.Steps(ctx) {
						for _, ch := range s.Changes {
							if ch.Key == key {
								have, _ = ch.Value.(*store.WorkloadEndpoint)
							}
							profile = profile || ch.Key.Kind == store.KindProfile && ch.Own
						}
					}
				}()
				if err := f.CatchUp(await.Context(t)); err != nil {
					t.Fatal(err)
				}
				cancel()
				<-reads
			}
			stands := func(when string, want bool) {
				t.Helper()
				if (have != nil) != want {
					t.Errorf("%s the endpoint is %v", when, have)
				}
			}
			says := func(rev store.Revision, value any) {
				t.Helper()
				batches <- store.Batch{Events: []store.Event{{Key: key, Object: store.Object{Key: key, Value: value, Revision: rev}}}, Revision: rev}
				follow(rev)
			}
			req := podRequest(w.request(1), "default", "web")
			w.add(a, req)
			follow(0)
			if stands("announced", true); !profile {
				t.Error("the network's profile is not shown")
			}
			r, _ := a.ledger.get(req.ID)
			mine, _, err := a.endpoints.of(r)
			if err != nil {
				t.Fatal(err)
			}
			if echo {
				says(1, mine)
				stands("after the former's late write", true)
			}
			says(2, nil)
			stands("after the former's late end", true)
			settle(t, a)
			written, err := w.store.Get(t.Context(), key)
			if err != nil {
				t.Fatal(err)
			}
			if written.Revision <= 2 {
				t.Fatalf("it was written at %d", written.Revision)
			}
			follow(0)
			stands("written", true)
			says(written.Revision, written.Value)
			stands("after its own write", true)
			says(written.Revision+1, nil)
			stands("after its own end", false)
		})
	}
}

// A daemon that starts again announces what the datastore does not know yet,
// and nothing else.
func TestBehindAnnouncesAfterRestart(t *testing.T) {
	t.Parallel()
	w := newBehind(t)
	var got []string
	configure := w.cfg
	w.cfg = func(c *Config) {
		configure(c)
		c.OwnWrites = announcedTo(func(ev store.Event) {
			if ev.Key.Kind == store.KindWorkloadEndpoint {
				got = append(got, fmt.Sprint(ev.Key.Name, " ", ev.Deleted()))
			}
		})
	}
	a := w.start()
	w.add(a, w.numbered(1))
	settle(t, a)
	w.away(true)
	w.add(a, w.numbered(2))
	gone := w.numbered(3)
	if err := w.wire.Detach(t.Context(), w.add(a, gone).Device, gone.ID); err != nil {
		t.Fatal(err)
	}
	got = nil
	w.start()
	diff(t, "announced", []string{"node--a-cni-c2-eth0 false"}, got)
}

// While the watch says that the datastore is away, what it never heard of is
// not held to be known to it: it is released on this host alone.
func TestBehindAwayIsNotTold(t *testing.T) {
	t.Parallel()
	w := newBehind(t)
	a := w.start()
	w.away(true)
	a.HandleStore(clustertest.Step("node-a", store.Batch{Err: errors.New("connection refused")}))
	req := w.request(1)
	w.add(a, req)
	if a.flusher.all(t.Context(), now) {
		t.Error("the datastore is told of all, and it is away")
	}
	w.del(a, req)
	if !a.releaser.detachAll(t.Context()) || !a.releaser.complete(t.Context(), now) {
		t.Error("the release waits for the datastore")
	}
	a.HandleStore(clustertest.Step("node-a", store.Batch{}))
	if !a.flusher.all(t.Context(), now) {
		t.Error("something is left to be told")
	}
}
