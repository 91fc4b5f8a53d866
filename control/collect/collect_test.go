package collect

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/memory"
)

func (w *world) lookCluster(c *Collector) Report {
	w.t.Helper()
	r, err := c.LookCluster(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	return r
}

// What nodes left that are gone is freed after the grace period; what anybody
// uses, or what is not understood, stays.
func TestCluster(t *testing.T) {
	t.Parallel()
	w, m := newWorld(t)
	w.node("node-a")
	w.block("10.0.0.0/30", "node-a", "net1.live@node-a", "net1.leak@node-a") // the host's own affair
	w.block("10.0.0.4/30", "gone", "net1.x@gone", "vxlan-tunnel-addr-gone@gone", "net1.borrowed@node-a")
	w.block("10.0.0.8/30", "gone")
	w.block("10.0.0.12/30", "node-a", "net1.left@gone")       // borrowed by the node that is gone
	w.block("10.0.0.16/30", "", "net1.nobody@")               // names no node
	w.block("10.0.0.20/30", "gone", "net1.endpoint@gone-too") // an endpoint of a node that exists has it
	w.endpoint("node-a", "endpoint", "10.0.0.20/32")
	w.endpoint("gone", "x", "10.0.0.4/32")
	w.put(store.HandleKey("net1.empty"), &store.Handle{Block: map[string]int{"10.0.0.0/30": 1}})
	w.put(store.HandleKey("net1.lost"), &store.Handle{Block: map[string]int{"10.9.0.0/30": 1}})
	w.put(store.AffinityKey("gone", netip.MustParsePrefix("10.0.0.24/30")), &store.Affinity{State: store.AffinityPending})
	m.PutRaw(store.BlockKey(netip.MustParsePrefix("10.0.0.28/30")).Path(), []byte(`{"cidr":"10.0.0.28/30","allocations":[7,null,null,null]}`))
	lb, b := blockOf("10.0.0.32/30", "", "lb-x@")
	virtual := "virtual:load-balancer"
	b.Affinity = &virtual
	w.put(lb, b)
	w.put(store.HandleKey("lb-x"), &store.Handle{Block: map[string]int{"10.0.0.32/30": 1}})
	before, err := count(w)
	if err != nil {
		t.Fatal(err)
	}

	c := w.collector(nil)
	var log strings.Builder
	c.cfg.Log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey || a.Key == "error" {
			return slog.Attr{}
		}
		return a
	}}))
	for _, pause := range []time.Duration{0, 5 * time.Minute, 9 * time.Minute} {
		w.now = w.now.Add(pause)
		if r := w.lookCluster(c); r.freed() || r.Suspects == 0 || r.Unreadable == 0 {
			t.Errorf("%s later: %+v, want suspects alone", pause, r)
		}
	}
	if after, _ := count(w); after != before {
		t.Errorf("%d records of %d are left before the grace period is over", after, before)
	}
	w.now = w.now.Add(time.Minute)
	c.SetGrace(0) // while a look is about to begin
	if r := w.lookCluster(c); r != (Report{}) {
		t.Errorf("leaks are to stay: %+v", r)
	}
	c.SetGrace(DefaultGrace)
	log.Reset()
	r := w.lookCluster(c)
	named := []string{
		`level=INFO msg="leaked endpoint freed" endpoint=gone-cni-x-eth0 namespace=default node=gone`,
		`level=WARN msg="block left alone" block=10.0.0.28/30`,
		`level=INFO msg="leaked address freed" address=10.0.0.12 handle=net1.left node=gone`,
		`level=INFO msg="leaked address freed" address=10.0.0.16 handle=net1.nobody node=""`,
		`level=INFO msg="leaked block freed" block=10.0.0.16/30 node=""`,
		`level=INFO msg="leaked block freed" block=10.0.0.20/30 node=gone`,
		`level=INFO msg="leaked address freed" address=10.0.0.4 handle=net1.x node=gone`,
		`level=INFO msg="leaked address freed" address=10.0.0.5 handle=vxlan-tunnel-addr-gone node=gone`,
		`level=INFO msg="leaked block freed" block=10.0.0.4/30 node=gone`,
		`level=INFO msg="leaked block freed" block=10.0.0.8/30 node=gone`,
		`level=INFO msg="leaked claim freed" block=10.0.0.20/30 node=gone`,
		`level=INFO msg="leaked claim freed" block=10.0.0.24/30 node=gone`,
		`level=INFO msg="leaked claim freed" block=10.0.0.4/30 node=gone`,
		`level=INFO msg="leaked claim freed" block=10.0.0.8/30 node=gone`,
		`level=INFO msg="leaked handle freed" handle=net1.empty`,
		`level=INFO msg="leaked handle freed" handle=net1.lost`,
	}
	if diff := cmp.Diff(named, strings.Split(strings.TrimSpace(log.String()), "\n")); diff != "" {
		t.Errorf("the log (-want +got):\n%s", diff)
	}
	if r.Addresses != 4 || r.Endpoints != 1 || r.Suspects != 1 {
		t.Errorf("report %+v, want 4 addresses, 1 endpoint and 1 suspect", r)
	}
	want := []string{
		"IPAMBlock(10.0.0.0/30) of node-a 10.0.0.0=net1.live 10.0.0.1=net1.leak",
		"IPAMBlock(10.0.0.12/30) of node-a",
		"IPAMBlock(10.0.0.20/30) of  10.0.0.20=net1.endpoint",
		"IPAMBlock(10.0.0.32/30) of  10.0.0.32=lb-x",
		"IPAMBlock(10.0.0.4/30) of  10.0.0.6=net1.borrowed",
		"IPAMAffinity(node-a/10.0.0.0/30)",
		"IPAMAffinity(node-a/10.0.0.12/30)",
		"IPAMHandle(lb-x)",
		"IPAMHandle(net1.borrowed)",
		"IPAMHandle(net1.endpoint)",
		"IPAMHandle(net1.leak)",
		"IPAMHandle(net1.live)",
		"WorkloadEndpoint(default/node--a-cni-endpoint-eth0)",
	}
	m.PutRaw(store.BlockKey(netip.MustParsePrefix("10.0.0.28/30")).Path(), nil)
	if diff := cmp.Diff(want, w.state()); diff != "" {
		t.Errorf("left (-want +got):\n%s", diff)
	}
	if r := w.lookCluster(c); r.freed() {
		t.Errorf("freed again: %+v", r)
	}
}

func count(w *world) (int, error) {
	n := 0
	for _, kind := range []store.Kind{store.KindIPAMBlock, store.KindIPAMAffinity, store.KindIPAMHandle, store.KindWorkloadEndpoint} {
		err := store.Pages(w.t.Context(), w.store, kind, "", func(objs []store.Object) error { n += len(objs); return nil })
		if err != nil {
			return 0, err
		}
	}
	return n, nil
}

// Whatever comes between the looks saves an address.
func TestClusterSpares(t *testing.T) {
	t.Parallel()
	for name, meanwhile := range map[string]func(*world){
		"the node is back": func(w *world) { w.node("gone") },
		"the address was given anew": func(w *world) {
			key, b := blockOf("10.0.0.4/30", "gone", "net1.y@gone")
			b.SequenceNumberForAllocation["0"] = 50
			w.put(key, b)
			w.put(store.HandleKey("net1.y"), &store.Handle{Block: map[string]int{"10.0.0.4/30": 1}})
		},
		"an endpoint appears": func(w *world) { w.endpoint("node-a", "x", "10.0.0.4/32") },
		"an endpoint that cannot be read appears": func(w *world) {
			key := store.Key{Kind: store.KindWorkloadEndpoint, Namespace: "default", Name: "node--a-cni-z-eth0"}
			w.store.(interface {
				PutRaw(string, []byte) store.Revision
			}).PutRaw(key.Path(), []byte("{"))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, _ := newWorld(t)
			w.node("node-a")
			w.block("10.0.0.4/30", "gone", "net1.x@gone")
			c := w.collector(nil)
			w.lookCluster(c)
			w.now = w.now.Add(20 * time.Minute)
			meanwhile(w)
			r, err := c.LookCluster(t.Context())
			if r.Addresses > 0 || err != nil && !errors.Is(err, store.ErrDecode) {
				t.Errorf("report %+v, %v: want no address freed", r, err)
			}
		})
	}
}

// Of many suspects the memory holds a part; the others come later.
func TestSuspectsHaveALimit(t *testing.T) {
	t.Parallel()
	s := newSuspects()
	now := time.Now()
	s.begin()
	for i := range maxSuspects + 10 {
		s.see(fmt.Sprint(i), 1, now, time.Minute)
	}
	s.end()
	if len(s.known) != maxSuspects {
		t.Errorf("%d suspects are known, want %d", len(s.known), maxSuspects)
	}
	s.begin()
	if !s.see("1", 1, now.Add(time.Minute), time.Minute) {
		t.Error("a suspect is not due")
	}
	if s.see("2", 2, now.Add(time.Minute), time.Minute) {
		t.Error("a suspect that changed is due")
	}
	s.end()
	if len(s.known) != 2 {
		t.Errorf("%d suspects are known, want the 2 of the last look", len(s.known))
	}
}

func TestHost(t *testing.T) {
	t.Parallel()
	w, _ := newWorld(t)
	alloc := func(addr, handle string, age time.Duration) ipam.Allocation {
		return ipam.Allocation{
			Addr: netip.MustParseAddr(addr), Handle: handle, Node: "node-a", Sequence: 7,
			Attributes: map[string]string{"timestamp": w.now.Add(-age).String()},
		}
	}
	h := &fakeHost{
		given: []ipam.Allocation{
			alloc("10.0.0.1", "net1.leak", time.Hour),
			alloc("10.0.0.2", "net1.record", time.Hour),
			alloc("10.0.0.3", "net1.wired", time.Hour),
			alloc("10.0.0.4", "net1.endpoint", time.Hour),
			alloc("10.0.0.5", "net1.late", time.Hour),
			{Addr: netip.MustParseAddr("10.0.0.6"), Handle: "net1.elsewhere", Node: "node-b"},
			{Addr: netip.MustParseAddr("10.0.0.7"), Node: "node-a", ReleasedAt: w.now},
			alloc("10.0.0.8", "net1.young", 0),
		},
		used:  map[string]bool{"net1.record": true},
		wired: map[string]bool{"net1.wired": true},
	}
	w.endpoint("node-a", "endpoint", "10.0.0.4/32")
	// An ADD that comes between the last look and the release.
	h.before = func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.used["net1.late"] = true
	}
	c := w.collector(h)
	look := func(want int) {
		t.Helper()
		r, err := c.LookHost(t.Context())
		if err != nil || r.Addresses != want {
			t.Errorf("report %+v, %v: want %d addresses freed", r, err, want)
		}
	}
	look(0)
	w.now = w.now.Add(14 * time.Minute)
	look(0)
	w.now = w.now.Add(time.Minute)
	look(1)
	if diff := cmp.Diff("[10.0.0.1]", printed(h.released)); diff != "" {
		t.Errorf("released (-want +got):\n%s", diff)
	}
}

// What the host borrowed is found in the blocks of others.
func TestBorrowed(t *testing.T) {
	t.Parallel()
	w, m := newWorld(t)
	w.node("node-a")
	w.node("node-b")
	w.block("10.0.0.0/30", "node-b", "net1.theirs@node-b", "net1.leak@node-a", "net1.record@node-a")
	w.block("10.0.0.4/30", "node-a", "net1.own@node-a", "routerd-reserve-node-a@node-a") // what LookHost looks at
	// A block that another program took from this host, with its reserve.
	w.block("10.0.0.12/30", "", "routerd-reserve-node-a@node-a", "routerd-reserve-node-b@node-b", "net1.kept@node-a")
	m.PutRaw(store.BlockKey(netip.MustParsePrefix("10.0.0.8/30")).Path(), []byte("{"))
	h := &fakeHost{used: map[string]bool{"net1.record": true, "net1.kept": true, "routerd-reserve-node-a": true}}
	c := w.collector(h)
	for _, want := range []int{0, 2} {
		r, err := c.LookBorrowed(t.Context())
		if err != nil || r.Addresses != want || r.Unreadable != 1 {
			t.Errorf("report %+v, %v: want %d addresses freed and 1 record unreadable", r, err, want)
		}
		w.now = w.now.Add(time.Hour)
	}
	if diff := cmp.Diff("[10.0.0.1 10.0.0.12]", printed(h.released)); diff != "" {
		t.Errorf("released (-want +got):\n%s", diff)
	}
}

// countingStore counts how often all blocks are read.
type countingStore struct {
	store.Store
	reads atomic.Int64
}

func (s *countingStore) List(ctx context.Context, kind store.Kind, namespace string) ([]store.Object, store.Revision, error) {
	if kind == store.KindIPAMBlock {
		s.reads.Add(1)
	}
	return s.Store.List(ctx, kind, namespace)
}

// A host that starts does not read all blocks: it looks for what it borrowed within
// borrowedEvery intervals, and then once in as many.
func TestBorrowedIsNotLookedForAtTheStart(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, m := newWorld(t)
		s := &countingStore{Store: m}
		w.store = s
		c := w.collector(&fakeHost{})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			c.RunHost(ctx)
		}()
		first := 0
		for i := range 3 * borrowedEvery {
			synctest.Wait()
			n := int(s.reads.Load())
			if first == 0 && n > 0 {
				first = i
			}
			want := 0
			if first > 0 {
				want = 1 + (i-first)/borrowedEvery
			}
			if n != want {
				t.Errorf("after %d intervals, the first reading being after %d: blocks read %d times, want %d", i, first, n, want)
			}
			time.Sleep(c.cfg.Grace / 3) //nolint:forbidigo // virtual time
		}
		if first < 1 || first > borrowedEvery {
			t.Errorf("blocks were read first after %d intervals, want 1 to %d", first, borrowedEvery)
		}
		cancel()
		<-done
	})
}

// The host that looks after the cluster does not read all records as soon as it does so, and then
// once in an interval.
func TestClusterIsNotLookedAtAtTheStart(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, m := newWorld(t)
		s := &countingStore{Store: m}
		w.store = s
		c := w.collector(nil)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			c.RunCluster(ctx)
		}()
		for i := range 4 {
			time.Sleep(time.Second) //nolint:forbidigo // virtual time
			synctest.Wait()
			if n := int(s.reads.Load()); n != i {
				t.Errorf("a moment after %d intervals blocks were read %d times", i, n)
			}
			time.Sleep(c.cfg.Grace/3 - time.Second) //nolint:forbidigo // virtual time
		}
		cancel()
		<-done
	})
}

// TestSetGrace: nothing is looked at while leaks stay, and at once and as often as it should be when that changes.
func TestSetGrace(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		looks := 0
		c := New(Config{Store: memory.New(), Node: "node-a"})
		if grace, _ := c.grace(); grace != 0 {
			t.Errorf("without a grace period it is %s", grace)
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			c.every(ctx, "test", func(context.Context) (Report, error) { looks++; return Report{}, nil })
		}()
		for _, step := range []struct {
			grace time.Duration
			looks int // in an hour from then on
		}{{DefaultGrace, 13}, {0, 0}, {time.Hour, 4}, {time.Minute, 181}, {time.Minute, 180}} {
			c.SetGrace(step.grace)
			synctest.Wait()
			time.Sleep(time.Hour) //nolint:forbidigo // virtual time
			synctest.Wait()
			if looks != step.looks {
				t.Errorf("grace period %s: %d looks in an hour, want %d", step.grace, looks, step.looks)
			}
			looks = 0
		}
		cancel()
		<-done
	})
}

func printed(list []netip.Addr) string {
	out := "["
	for i, a := range list {
		if i > 0 {
			out += " "
		}
		out += a.String()
	}
	return out + "]"
}
