package ipam

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/cluster/clustertest"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/memory"
)

// disk is a [Journal] that tests look into.
type disk struct {
	file string // of the cluster's copy; empty: it is not kept

	mu      sync.Mutex
	entries map[string]json.RawMessage
}

func (d *disk) Put(key string, value any) error {
	b, err := json.Marshal(value)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.entries == nil {
		d.entries = map[string]json.RawMessage{}
	}
	d.entries[key] = b
	return err
}

func (d *disk) Delete(key string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.entries, key)
	return nil
}

func (d *disk) Entries() map[string]json.RawMessage {
	d.mu.Lock()
	defer d.mu.Unlock()
	return maps.Clone(d.entries)
}

// reserving runs an allocator that holds a reserve. It must be stopped.
func reserving(t fataler, st store.Store, node string, now func() time.Time, r ReserveConfig) *host {
	t.Helper()
	_, piecewise := st.(*memory.Sequential)
	if w, ok := st.(*writeCounter); ok {
		_, piecewise = w.Store.(*memory.Sequential)
	}
	a := New(Config{Store: st, Node: node, Log: slog.New(slog.DiscardHandler), Clock: now, Timeout: 20 * time.Second, Reserve: r, Piecewise: piecewise})
	return run(t, a, st)
}

// filled waits until a host holds so many addresses of a pool ready, or more.
func filled(t fataler, h *host, pool string, n int) {
	t.Helper()
	settle(t, h, fmt.Sprintf("%d ready in %s", n, pool), func(s *state) bool {
		return s.pools[pool] != nil && len(s.ready(s.pools[pool], h.cfg.Clock())) >= n
	})
}

func part4(handle string) Part { return Part{Request: v4(handle)} }

func mustTake(t fataler, h *host, parts ...Part) []Assignment {
	t.Helper()
	got, ok := h.Take(parts...)
	if !ok {
		t.Fatalf("the reserve gives nothing: %v", h.Ready())
	}
	return got
}

func confirm(t *testing.T, h *host, as ...Assignment) {
	t.Helper()
	for i, err := range h.Confirm(await.Context(t), confirmations(as)...) {
		if err != nil {
			t.Errorf("confirm %s: %v", as[i].Addr, err)
		}
	}
}

func confirmations(as []Assignment) []Confirmation {
	var cs []Confirmation
	for _, a := range as {
		cs = append(cs, Confirmation{Addr: a.Addr, Handle: a.Handle, Attributes: map[string]string{AttrPod: "p-" + a.Handle}})
	}
	return cs
}

func TestReserve(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/16"), newPool("p6", "fd00::/64"), newNode("a", nil))
	h := reserving(t, w.st, "a", w.clock.time, ReserveConfig{Min: 16, Max: 64})
	defer h.stop()
	filled(t, h, "p", 16)
	filled(t, h, "p6", 16)
	got := map[netip.Addr]string{}
	var all []Assignment
	for i := range 12 {
		handle := fmt.Sprint("net.", i)
		as := mustTake(t, h, part4(handle), Part{Request: Request{Family: dataplane.IPv6, Handle: handle}})
		if len(as) != 2 || !as[0].Addr.Is4() || !as[1].Addr.Is6() || as[0].Pool != "p" {
			t.Fatalf("took %+v", as)
		}
		for _, a := range as {
			if got[a.Addr] != "" {
				t.Errorf("%s was given twice", a.Addr)
			}
			got[a.Addr] = handle
		}
		all = append(all, as...)
	}
	if _, ok := h.Take(part4("net.0")); ok {
		t.Error("a handle that has an address got another")
	}
	confirm(t, h, all...)
	confirm(t, h, all...) // twice does no harm
	have := audit(t, w.st)
	maps.DeleteFunc(have, func(_ netip.Addr, handle string) bool { return handle == store.ReserveHandle("a") })
	mustDiff(t, "what the store holds but for the reserve", got, have)
	filled(t, h, "p", 12)
	for i := range 12 {
		handle := fmt.Sprint("net.", i)
		if _, err := h.ReleaseHandleHere(await.Context(t), handle); err != nil {
			t.Error(err)
		}
		h.Unclaim(handle)
	}
	have = audit(t, w.st)
	for a, handle := range have {
		if handle != store.ReserveHandle("a") {
			t.Errorf("%s is left to %s", a, handle)
		}
	}
}

// What cannot be read of one workload does not keep the others from being
// confirmed.
func TestConfirmUnreadable(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/16"), newNode("a", nil))
	h := reserving(t, w.st, "a", w.clock.time, ReserveConfig{Min: 8, Max: 8})
	defer h.stop()
	filled(t, h, "p", 8)
	as := mustTake(t, h, part4("net.bad"))
	as = append(as, mustTake(t, h, part4("net.good"))...)
	w.st.PutRaw(store.HandleKey("net.bad").Path(), []byte(`nonsense`))
	errs := h.Confirm(await.Context(t), confirmations(as)...)
	if !errors.Is(errs[0], store.ErrDecode) || errs[1] != nil {
		t.Errorf("confirm: %v, want ErrDecode for the first alone", errs)
	}
	obj, err := w.st.Get(await.Context(t), store.HandleKey("net.good"))
	if err != nil || len(obj.Value.(*store.Handle).Block) != 1 {
		t.Errorf("the handle of the other: %+v, %v", obj.Value, err)
	}
}

// What makes a request unfit for the reserve goes the long way.
func TestReserveRefuses(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/16"), newPool("q", "10.1.0.0/16", func(s *v3.IPPoolSpec) { s.Disabled = true }), newNode("a", nil))
	h := reserving(t, w.st, "a", w.clock.time, ReserveConfig{Min: 8, Max: 8})
	defer h.stop()
	filled(t, h, "p", 8)
	if _, err := h.Assign(await.Context(t), v4("has one")); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*Part){
		"handle that holds one": func(p *Part) { p.Handle = "has one" },
		"named address":         func(p *Part) { p.Addr = netip.MustParseAddr("10.0.9.9") },
		"two":                   func(p *Part) { p.Count = 2 },
		"limit of blocks":       func(p *Part) { p.MaxBlocks = 1 },
		"other use":             func(p *Part) { p.Use = Tunnel },
		"other family":          func(p *Part) { p.Family = dataplane.IPv6 },
		"disabled pool":         func(p *Part) { p.Pools = []string{"q"} },
		"no handle":             func(p *Part) { p.Handle = "" },
	} {
		p := part4("new")
		change(&p)
		if got, ok := h.Take(p); ok {
			t.Errorf("%s: took %+v", name, got)
		}
	}
	// All or nothing.
	if got, ok := h.Take(part4("new"), Part{Request: Request{Family: dataplane.IPv6, Handle: "new"}}); ok {
		t.Errorf("took %+v", got)
	}
	if n := h.Ready()["p"]; n < 8 {
		t.Errorf("%d are ready after requests that were refused", n)
	}
}

// Blocks are claimed before the last one is full, and a pool that has none to
// spare is shared.
func TestReserveSharesASmallPool(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/28", blockSize(30)), newNode("a", nil), newNode("b", nil))
	a := reserving(t, w.st, "a", w.clock.time, ReserveConfig{Min: 16, Max: 64})
	defer a.stop()
	filled(t, a, "p", 2) // half a block
	b := w.host("b", nil)
	for i := range 8 {
		mustAssign(t, b, v4(fmt.Sprint("net.", i)))
	}
	held := map[string]int{}
	for _, handle := range audit(t, w.st) {
		held[handle]++
	}
	if n := held[store.ReserveHandle("a")]; n > 2 {
		t.Errorf("the reserve holds %d of 16 addresses", n)
	}
}

// Demand makes the reserve grow, and its end makes it shrink.
func TestReserveFollowsDemand(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/16"), newNode("a", nil))
	h := reserving(t, w.st, "a", w.clock.time, ReserveConfig{Min: 8, Max: 40})
	defer h.stop()
	filled(t, h, "p", 8)
	n := 0
	for range 100 {
		if as, ok := h.Take(part4(fmt.Sprint("net.", n))); ok {
			n++
			confirm(t, h, as...)
			continue
		}
		filled(t, h, "p", 1)
	}
	filled(t, h, "p", 30) // three quarters of it: then it is filled again
	if n < 60 {
		t.Errorf("%d of 100 came out of the reserve", n)
	}
	w.clock.turn(3 * demandPeriod)
	h.reserveChanged.Set()
	settle(t, h, "a small reserve", func(s *state) bool { return len(s.ready(s.pools["p"], h.cfg.Clock())) == 8 })
	audit(t, w.st)
}

// TestTakeWhileGivenBack: an address that is on its way back is given to nobody
// while the transaction is under way, nor where nobody knows what became of it.
func TestTakeWhileGivenBack(t *testing.T) {
	t.Parallel()
	for name, outcome := range map[string]func(do func() ([]store.Object, error)) ([]store.Object, error){
		"done": func(do func() ([]store.Object, error)) ([]store.Object, error) { return do() },
		"done, and the answer is lost": func(do func() ([]store.Object, error)) ([]store.Object, error) {
			_, _ = do()
			return nil, fmt.Errorf("%w: connection reset", store.ErrUnavailable)
		},
		"not done, and nobody knows": func(func() ([]store.Object, error)) ([]store.Object, error) {
			return nil, fmt.Errorf("%w: connection reset", store.ErrUnavailable)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, newPool("p", "10.0.0.0/16"), newNode("a", nil))
			f := &faulty{Store: w.st}
			h := reserving(t, f, "a", w.clock.time, ReserveConfig{Min: 4, Max: 16})
			stop := sync.OnceFunc(h.stop)
			defer stop()
			filled(t, h, "p", 4)
			for n := range 40 {
				if as, ok := h.Take(part4(fmt.Sprint("net.", n))); ok {
					confirm(t, h, as...)
				} else {
					filled(t, h, "p", 1)
				}
			}
			filled(t, h, "p", 12)
			gate, entered := make(chan struct{}), make(chan struct{}, 1000)
			f.arrange(func(n int, _ context.Context, do func() ([]store.Object, error)) ([]store.Object, error) {
				entered <- struct{}{}
				if <-gate; n == 1 {
					return outcome(do)
				}
				return do()
			})
			w.clock.turn(3 * demandPeriod)
			h.reserveChanged.Set()
			<-entered
			var taken []Assignment
			for n := range 16 {
				as, ok := h.Take(part4(fmt.Sprint("late.", n)))
				if !ok {
					break
				}
				taken = append(taken, as...)
			}
			if len(taken) == 0 {
				t.Error("what stays in the reserve is not given")
			}
			close(gate)
			await.True(t, "it is known what became of it", func() bool {
				h.mu.Lock()
				defer h.mu.Unlock()
				return len(h.state.reserve.leaving) == 0
			})
			confirm(t, h, taken...)
			stop() // the audit wants a store that nobody changes
			held := audit(t, w.st)
			for _, a := range taken {
				if held[a.Addr] != a.Handle {
					t.Errorf("%s was given to %s, and the datastore has it for %q", a.Addr, a.Handle, held[a.Addr])
				}
			}
		})
	}
}

// TestLateConfirm: a confirmation of which nobody knows what became takes place
// after its workload is gone. The address is not another workload's by then.
func TestLateConfirm(t *testing.T) {
	t.Parallel()
	for _, restarted := range []bool{false, true} {
		t.Run(fmt.Sprintf("restarted=%v", restarted), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, newPool("p", "10.0.0.0/16"), newNode("a", nil))
			f := &faulty{Store: w.st}
			cfg := ReserveConfig{Min: 4, Max: 4, Journal: &disk{}}
			h := reserving(t, f, "a", w.clock.time, cfg)
			defer func() { h.stop() }()
			filled(t, h, "p", 4)
			gone := mustTake(t, h, part4("net.gone"))
			sent := make(chan func() ([]store.Object, error), 100)
			f.arrange(func(_ int, _ context.Context, do func() ([]store.Object, error)) ([]store.Object, error) {
				sent <- do
				return nil, fmt.Errorf("%w: connection reset", store.ErrUnavailable)
			})
			if errs := h.Confirm(t.Context(), confirmations(gone)...); !errors.Is(errs[0], store.ErrUnavailable) {
				t.Fatal(errs)
			}
			late := <-sent
			if restarted {
				h.stop()
				f.arrange(nil)
				a := New(Config{Store: f, Node: "a", Log: slog.New(slog.DiscardHandler), Clock: w.clock.time, Reserve: cfg})
				a.Claim(gone[0].Handle, gone[0].Addr)
				h = run(t, a, f)
			}
			f.arrange(nil)
			if _, err := h.ReleaseHandleHere(t.Context(), gone[0].Handle); err != nil {
				t.Fatal(err)
			}
			h.Unclaim(gone[0].Handle)
			if _, err := late(); !errors.Is(err, store.ErrConflict) {
				t.Errorf("the late confirmation: %v", err)
			}
			filled(t, h, "p", 4)
			var taken []Assignment
			for n := range 4 {
				taken = append(taken, mustTake(t, h, part4(fmt.Sprint("net.", n)))...)
			}
			confirm(t, h, taken...)
		})
	}
}

// TestLateGiveBack: a transaction of the previous run that gives addresses back takes
// place when this run knows the datastore already.
func TestLateGiveBack(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/16"), newNode("a", nil))
	f := &faulty{Store: w.st}
	cfg := ReserveConfig{Min: 4, Max: 16, Journal: &disk{}}
	h := reserving(t, f, "a", w.clock.time, cfg)
	defer func() { h.stop() }()
	filled(t, h, "p", 4)
	for n := range 40 {
		if as, ok := h.Take(part4(fmt.Sprint("net.", n))); ok {
			confirm(t, h, as...)
		} else {
			filled(t, h, "p", 1)
		}
	}
	filled(t, h, "p", 12)
	sent := make(chan func() ([]store.Object, error), 100)
	f.arrange(func(_ int, _ context.Context, do func() ([]store.Object, error)) ([]store.Object, error) {
		sent <- do
		return nil, fmt.Errorf("%w: connection reset", store.ErrUnavailable)
	})
	w.clock.turn(3 * demandPeriod)
	h.reserveChanged.Set()
	late := <-sent
	h.stop()

	// Of this run nothing is written before the late transaction has taken place.
	gate := make(chan struct{})
	f.arrange(func(_ int, _ context.Context, do func() ([]store.Object, error)) ([]store.Object, error) {
		<-gate
		return do()
	})
	h = run(t, New(Config{Store: f, Node: "a", Log: slog.New(slog.DiscardHandler), Clock: w.clock.time, Reserve: cfg}), f)
	if err := h.waitSynced(t.Context()); err != nil {
		t.Fatal(err)
	}
	var taken []Assignment
	for n := range 16 {
		as, ok := h.Take(part4(fmt.Sprint("late.", n)))
		if !ok {
			break
		}
		taken = append(taken, as...)
	}
	if len(taken) == 0 {
		t.Error("what was not on its way back is not given")
	}
	if _, err := late(); err != nil {
		t.Fatal(err)
	}
	close(gate)
	filled(t, h, "p", 4)
	confirm(t, h, taken...)
}

// TestLateWriteOfBlock: where one object is written at a time, the previous run's write of a block,
// which gives addresses back, takes place when this run has the reserve's handle already. What this
// run gave is not among them.
func TestLateWriteOfBlock(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/16"), newNode("a", nil))
	begun, goOn := make(chan struct{}), make(chan struct{})
	var hold atomic.Bool
	f := &faulty{Store: memory.SequentialOn(w.st, func(op store.Op) error {
		if op.Object.Key.Kind == store.KindIPAMBlock && hold.CompareAndSwap(true, false) {
			close(begun)
			<-goOn
		}
		return nil
	})}
	cfg := Config{Store: f, Node: "a", Log: slog.New(slog.DiscardHandler), Clock: w.clock.time, Timeout: 20 * time.Second, Reserve: ReserveConfig{Min: 4, Max: 16, Journal: &disk{}}, Piecewise: true}
	h := run(t, New(cfg), f)
	defer func() { h.stop() }()
	for n := range 40 {
		if as, ok := h.Take(part4(fmt.Sprint("net.", n))); ok {
			confirm(t, h, as...)
		} else {
			filled(t, h, "p", 1)
		}
	}
	filled(t, h, "p", 12)
	late := make(chan error, 1)
	f.arrange(func(_ int, _ context.Context, do func() ([]store.Object, error)) ([]store.Object, error) {
		go func() { _, err := do(); late <- err }()
		return nil, fmt.Errorf("%w: connection reset", store.ErrUnavailable)
	})
	hold.Store(true)
	w.clock.turn(3 * demandPeriod)
	h.reserveChanged.Set()
	<-begun // the handle was looked at, and the block is about to be written
	h.stop()

	cfg.Store, cfg.Reserve.Min = memory.SequentialOn(w.st, nil), 8 // so many that this run gives none back
	h = run(t, New(cfg), cfg.Store)
	settle(t, h, "the reserve is known for certain", func(s *state) bool {
		return s.reserve.fenced && len(s.reserve.filling) == 0 && len(s.ready(s.pools["p"], w.clock.time())) >= 4
	})
	var taken []Assignment
	for n := 0; ; n++ {
		as, ok := h.Take(part4(fmt.Sprint("late.", n)))
		if !ok {
			break
		}
		taken = append(taken, as...)
	}
	close(goOn)
	if err := <-late; err != nil && !errors.Is(err, store.ErrConflict) {
		t.Error(err)
	}
	for _, a := range taken {
		o, err := w.st.Get(t.Context(), store.BlockKey(a.Block))
		if err != nil {
			t.Fatal(err)
		}
		all, err := Allocations(a.Block, o.Value.(*store.Block))
		if err != nil {
			t.Fatal(err)
		}
		if !slices.ContainsFunc(all, func(have Allocation) bool { return have.Addr == a.Addr }) {
			t.Errorf("%s is %s's, and free in the datastore", a.Addr, a.Handle)
		}
	}
	confirm(t, h, taken...)
}

// A pool that serves this node no more gets its addresses and its blocks back,
// but for what is in use.
func TestReserveIsGivenBack(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*testing.T, *world){
		"disabled": func(t *testing.T, w *world) {
			put(t, w.st, newPool("p", "10.0.0.0/16", func(s *v3.IPPoolSpec) { s.Disabled = true }))
		},
		"not selected": func(t *testing.T, w *world) {
			put(t, w.st, newPool("p", "10.0.0.0/16", func(s *v3.IPPoolSpec) { s.NodeSelector = "has(nothing)" }))
		},
		"deleted": func(t *testing.T, w *world) { remove(t, w.st, store.ResourceKey(store.KindIPPool, "p")) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, newPool("p", "10.0.0.0/16"), newNode("a", nil))
			h := reserving(t, w.st, "a", w.clock.time, ReserveConfig{Min: 8, Max: 40})
			defer h.stop()
			filled(t, h, "p", 8)
			used := mustTake(t, h, part4("net.1"))[0]
			end(t, w)
			settle(t, h, "no reserve", func(s *state) bool {
				n := 0
				for _, b := range s.own {
					n += len(b.ready)
				}
				return n == 1
			})
			confirm(t, h, used)
			mustDiff(t, "held", map[netip.Addr]string{used.Addr: "net.1"}, audit(t, w.st))
			if _, err := h.ReleaseHandle(await.Context(t), "net.1"); err != nil {
				t.Fatal(err)
			}
			if _, err := h.Tidy(await.Context(t)); err != nil {
				t.Fatal(err)
			}
			if name != "disabled" {
				settle(t, h, "no block", func(s *state) bool { return len(s.own) == 0 })
			}
			mustDiff(t, "held", map[netip.Addr]string{}, audit(t, w.st))
		})
	}
}

// Somebody takes away what this host was about to use.
func TestConfirmOfWhatIsLost(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/16"), newNode("a", nil))
	h := reserving(t, w.st, "a", w.clock.time, ReserveConfig{Min: 8, Max: 8})
	defer h.stop()
	b := w.host("b", nil)
	filled(t, h, "p", 8)
	lost, kept := mustTake(t, h, part4("net.1"))[0], mustTake(t, h, part4("net.2"))[0]
	if _, err := b.Release(await.Context(t), Claim{Addr: lost.Addr}); err != nil {
		t.Fatal(err)
	}
	errs := h.Confirm(await.Context(t), confirmations([]Assignment{lost, kept})...)
	if !errors.Is(errs[0], ErrNotHolder) || errs[1] != nil {
		t.Errorf("errors %v", errs)
	}
	if _, err := b.AssignAddr(await.Context(t), lost.Addr, v4("other")); err != nil {
		t.Fatal(err)
	}
	if errs := h.Confirm(await.Context(t), confirmations([]Assignment{lost})...); !errors.Is(errs[0], ErrNotHolder) {
		t.Errorf("errors %v", errs)
	}
	if got := audit(t, w.st)[kept.Addr]; got != "net.2" {
		t.Errorf("%s is held by %q", kept.Addr, got)
	}
}

// Whoever asks for an address by name gets it also out of this node's reserve,
// not out of another's, and not when it was given.
func TestNamedAddressInReserve(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/16"), newNode("a", nil))
	h := reserving(t, w.st, "a", w.clock.time, ReserveConfig{Min: 8, Max: 8})
	defer h.stop()
	b := w.host("b", nil)
	filled(t, h, "p", 8)
	given := mustTake(t, h, part4("net.1"))[0]
	h.mu.Lock()
	free := h.state.ready(h.state.pools["p"], time.Time{})[0].Addr
	h.mu.Unlock()
	if _, err := b.AssignAddr(await.Context(t), free, v4("other")); !errors.Is(err, ErrTaken) {
		t.Errorf("another node's reserve: %v", err)
	}
	if _, err := h.AssignAddr(await.Context(t), given.Addr, v4("other")); !errors.Is(err, ErrTaken) {
		t.Errorf("an address that was given: %v", err)
	}
	if _, err := h.AssignAddr(await.Context(t), free, v4("net.2")); err != nil {
		t.Errorf("this node's reserve: %v", err)
	}
	confirm(t, h, given)
	have := audit(t, w.st)
	if have[free] != "net.2" || have[given.Addr] != "net.1" {
		t.Errorf("stored: %v", have)
	}
}

// Released addresses rest, whether they were confirmed or not.
func TestReserveRests(t *testing.T) {
	t.Parallel()
	cool := 60
	config := store.DefaultIPAMConfig()
	config.IPCooldownSeconds = &cool
	w := newWorld(t, newPool("p", "10.0.0.0/28", blockSize(30)), newNode("a", nil), &config)
	h := reserving(t, w.st, "a", w.clock.time, ReserveConfig{Min: 2, Max: 2})
	defer h.stop()
	filled(t, h, "p", 2)
	first := mustTake(t, h, part4("net.1"))[0]
	h.Unclaim("net.1")
	for i := range 3 {
		as, ok := h.Take(part4(fmt.Sprint("net.x", i)))
		if ok && as[0].Addr == first.Addr {
			t.Errorf("%s is given again at once", first.Addr)
		}
	}
	w.clock.turn(61 * time.Second)
	// The reserve may have been filled up meanwhile: it comes in its turn.
	i := 0
	await.True(t, first.Addr.String()+" is given after its rest", func() bool {
		i++
		as, ok := h.Take(part4(fmt.Sprint("net.y", i)))
		return ok && as[0].Addr == first.Addr
	})
}

// The host boots while the datastore is away: what the journal has is given, but for
// what workloads have.
func TestReserveFromDisk(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/16"), newNode("a", nil))
	d := &disk{file: filepath.Join(t.TempDir(), "cluster.journal")}
	cfg := ReserveConfig{Min: 16, Max: 16, Journal: d}
	h := reserving(t, w.st, "a", w.clock.time, cfg)
	filled(t, h, "p", 16)
	before := mustTake(t, h, part4("net.before"))[0]
	h.stop()

	a := New(Config{Store: w.st, Node: "a", Log: slog.New(slog.DiscardHandler), Clock: w.clock.time, Reserve: cfg})
	a.Claim("net.before", before.Addr)
	w.st.Fail(errors.New("away"))
	h = run(t, a, w.st)
	defer h.stop()
	got := map[netip.Addr]string{before.Addr: "net.before"}
	all := []Assignment{before}
	for i := 0; ; i++ {
		handle := fmt.Sprint("net.", i)
		as, ok := h.Take(part4(handle))
		if !ok {
			break
		}
		if got[as[0].Addr] != "" {
			t.Errorf("%s was given twice", as[0].Addr)
		}
		got[as[0].Addr] = handle
		all = append(all, as...)
	}
	if len(got) != 16 {
		t.Errorf("%d addresses were given, want 16", len(got))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if errs := h.Confirm(ctx, confirmations(all[:1])...); !errors.Is(errs[0], ErrNotReady) {
		t.Errorf("confirm without the datastore: %v", errs)
	}
	w.st.Fail(nil)
	confirm(t, h, all...)
	filled(t, h, "p", 16)
	have := audit(t, w.st)
	maps.DeleteFunc(have, func(_ netip.Addr, handle string) bool { return handle == store.ReserveHandle("a") })
	mustDiff(t, "stored", got, have)
}

// TestReserveOfVersionBefore: its journal has pools and labels too. They count until
// the datastore's content is known, also where there is a copy of the cluster, which
// is older then; and they go with the next change.
func TestReserveOfVersionBefore(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/16"), newNode("a", nil))
	d := &disk{file: filepath.Join(t.TempDir(), "cluster.journal")}
	cfg := ReserveConfig{Min: 16, Max: 16, Journal: d}
	h := reserving(t, w.st, "a", w.clock.time, cfg)
	filled(t, h, "p", 16)
	h.stop()
	var entry map[string]any
	if err := json.Unmarshal(d.Entries()[rememberKey], &entry); err != nil || len(entry) != 1 {
		t.Errorf("the journal has more than addresses: %v, %v", entry, err)
	}
	old := newPool("old", "10.0.0.0/16")
	raw, err := store.Encode(store.ResourceKey(store.KindIPPool, "old"), old, nil)
	if err != nil {
		t.Fatal(err)
	}
	entry["pools"], entry["config"] = map[string]json.RawMessage{"old": raw}, store.DefaultIPAMConfig()
	if err := d.Put(rememberKey, entry); err != nil {
		t.Fatal(err)
	}
	w.st.Fail(errors.New("away"))
	h = run(t, New(Config{Store: w.st, Node: "a", Log: slog.New(slog.DiscardHandler), Clock: w.clock.time, Reserve: cfg}), w.st)
	defer func() { h.stop() }()
	if as := mustTake(t, h, part4("net.1")); as[0].Pool != "old" {
		t.Errorf("%v is not of the pool that the version before left", as)
	}
	w.st.Fail(nil)
	settle(t, h, "the datastore's state", func(s *state) bool { return s.synced && len(s.pools) == 1 && s.pools["p"] != nil })
	await.True(t, "the journal has addresses alone", func() bool { return !strings.Contains(string(d.Entries()[rememberKey]), "old") })
}

// This host's Node was deleted while it was away, and another has its addresses by
// now: what the journal has is not given, also not by the process after one
// that was killed at once.
func TestReserveDoubted(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/16"), newNode("a", nil))
	d := &disk{}
	cfg := ReserveConfig{Min: 16, Max: 16, Journal: d}
	h := reserving(t, w.st, "a", w.clock.time, cfg)
	filled(t, h, "p", 16)
	h.stop()

	restarted := func() *Allocator {
		a := New(Config{Store: w.st, Node: "a", Log: slog.New(slog.DiscardHandler), Clock: w.clock.time, Reserve: cfg})
		a.apply(fromDisk(t, w.st))
		return a
	}
	a := restarted()
	if len(a.Ready()) == 0 {
		t.Fatal("nothing is on disk: the test tests nothing")
	}
	if err := a.Doubt(); err != nil {
		t.Fatal(err)
	}
	for name, a := range map[string]*Allocator{"doubtful": a, "after it": restarted()} {
		if got, ok := a.Take(part4("x")); ok {
			t.Errorf("%s: took %v", name, got)
		}
	}
	h = run(t, a, w.st)
	defer h.stop()
	filled(t, h, "p", 16)
	mustTake(t, h, part4("x"))
	await.True(t, "the journal has the reserve", func() bool { return d.Entries()[rememberKey] != nil })
	if err := a.Doubt(); err != nil {
		t.Fatal(err)
	}
	mustTake(t, h, part4("y"))
}

// fromDisk is the step that a start has from disk which has what a datastore has.
func fromDisk(t *testing.T, st store.Store) cluster.Step {
	t.Helper()
	var b store.Batch
	for _, kind := range Kinds() {
		objects, _, err := st.List(t.Context(), kind, "")
		if err != nil {
			t.Fatal(err)
		}
		for _, o := range objects {
			b.Events = append(b.Events, store.Event{Key: o.Key, Object: o})
		}
	}
	step := clustertest.Step("a", b)
	step.Source, step.Synced = cluster.Disk, true
	return step
}

// A spoilt memory gives nothing, and the datastore puts all right.
func TestReserveMemorySpoilt(t *testing.T) {
	t.Parallel()
	for _, spoilt := range []string{`{`, `[]`, `{"pools":{"p":{"spec":7}},"addresses":{}}`, `{"pools":{},"addresses":{"x":[1]}}`} {
		st := memory.New()
		put(t, st, newPool("p", "10.0.0.0/16"), newNode("a", nil))
		d := &disk{entries: map[string]json.RawMessage{rememberKey: json.RawMessage(spoilt)}}
		a := New(Config{Store: st, Node: "a", Log: slog.New(slog.DiscardHandler), Reserve: ReserveConfig{Min: 8, Max: 8, Journal: d}})
		a.apply(fromDisk(t, st))
		if got, ok := a.Take(part4("x")); ok {
			t.Errorf("%s: took %v", spoilt, got)
		}
		h := run(t, a, st)
		filled(t, h, "p", 8)
		h.stop()
		_ = st.Close()
	}
}
