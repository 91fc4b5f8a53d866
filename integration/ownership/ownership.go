package ownership

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/control/collect"
	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

const (
	// chaosEnv says for how long hosts are killed and the datastore is harmed, as Go writes
	// times.
	chaosEnv = "ROUTERD_CHAOS"
	// attemptTime bounds one of several tries.
	attemptTime = 5 * time.Second

	hosts = 8

	// minGains is how many addresses a run gives at least, however slow the machine.
	minGains = 50
)

// Datastore is what the hosts share. Its methods are safe for concurrent use.
type Datastore interface {
	// Open returns a client for the life of a host's process.
	Open() (store.Store, error)
	// MakeNode and DeleteNode make and delete a host's Node. That it is there already, or
	// not there, is no error.
	MakeNode(ctx context.Context, s store.Store, name string) error
	DeleteNode(ctx context.Context, s store.Store, name string) error
	// Harm has the datastore fail at random until ctx ends, and mends it.
	Harm(ctx context.Context, s store.Store)
	// Harmed is how much harm was done until now.
	Harmed() int
}

// Config says how a run is to be.
type Config struct {
	Datastore Datastore     // empty
	Time      time.Duration // for which hosts are killed and the datastore is harmed, unless $ROUTERD_CHAOS says it
	Life      time.Duration // of a host's process, the shortest; the longest is eight times that
	MinHarmed int           // how much harm a run is worth at least, however slow the machine
}

// world is a cluster of hosts over a datastore.
type world struct {
	Config
	t    *testing.T
	hist *history
	all  []*host
}

// until tries until it works, each time for so long at most.
func (*world) until(ctx context.Context, what string, attempt time.Duration, try func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, await.Patience)
	defer cancel()
	for {
		once, done := context.WithTimeout(ctx, attempt)
		err := try(once)
		done()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: not within %s: %w", what, await.Patience, err)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func (w *world) putNode(st store.Store, name string) error {
	return w.until(context.Background(), "make Node "+name, attemptTime, func(ctx context.Context) error {
		return w.Datastore.MakeNode(ctx, st, name)
	})
}

// dieAndReturn is the life of a host that is declared dead in the middle of it,
// and comes back when others have had time to take its addresses.
func (w *world) dieAndReturn(ctx context.Context, h *host, total time.Duration, returns bool) {
	first, cancel := context.WithTimeout(ctx, total/3)
	h.live(first)
	cancel()
	st, err := w.Datastore.Open()
	if err != nil {
		w.t.Error(err)
		return
	}
	defer st.Close()
	h.declareDead()
	err = w.until(context.Background(), "delete Node "+h.name, attemptTime, func(ctx context.Context) error {
		return w.Datastore.DeleteNode(ctx, st, h.name)
	})
	if err != nil {
		w.t.Error(err)
		return
	}
	if !returns {
		return
	}
	away, cancel := context.WithTimeout(ctx, total/3)
	<-away.Done()
	cancel()
	if err := w.putNode(st, h.name); err != nil {
		w.t.Error(err)
		return
	}
	h.live(ctx)
}

// collect looks for leaks of the cluster until ctx ends.
func (w *world) collect(ctx context.Context, c *collect.Collector) {
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			look, cancel := context.WithTimeout(ctx, 3*time.Second)
			_, _ = c.LookCluster(look) // what it could not do the next one does
			cancel()
		}
	}
}

// stored returns who holds what in the datastore.
func stored(ctx context.Context, st store.Store) (map[netip.Addr]string, error) {
	blocks, _, err := st.List(ctx, store.KindIPAMBlock, "")
	if err != nil {
		return nil, err
	}
	out := map[netip.Addr]string{}
	for _, o := range blocks {
		b, _ := o.Value.(*store.Block)
		all, err := ipam.Allocations(o.Key.CIDR(), b)
		if err != nil {
			return nil, err
		}
		for _, a := range all {
			out[a.Addr] = a.Handle
		}
	}
	return out, nil
}

// differences compares what is stored with who owns what; reserves of hosts that
// live are theirs.
func differences(have, want map[netip.Addr]string, reserves map[string]bool) error {
	var errs []error
	for a, owner := range want {
		if have[a] != owner {
			errs = append(errs, fmt.Errorf("%s is lost: %s owns it, and %q is stored", a, owner, have[a]))
		}
	}
	for a, handle := range have {
		if want[a] == "" && !reserves[handle] {
			errs = append(errs, fmt.Errorf("%s has no owner: it is held by %s", a, handle))
		}
	}
	return errors.Join(errs[:min(len(errs), 5)]...)
}

// Run has eight hosts share a pool that is too small for them. Hosts are killed at random and
// the datastore is harmed, one host is declared dead for good, another wrongly. Over the whole
// history no address may have two owners at any time; and after the collector ran none may be
// without one.
func Run(t *testing.T, c Config) {
	t.Helper()
	total := c.Time
	if s := os.Getenv(chaosEnv); s != "" {
		var err error
		if total, err = time.ParseDuration(s); err != nil {
			t.Fatalf("%s: %v", chaosEnv, err)
		}
	}
	w := &world{Config: c, t: t, hist: &history{}}
	st, err := c.Datastore.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	err = w.until(t.Context(), "make the pool", attemptTime, func(ctx context.Context) error {
		p := v3.NewIPPool()
		p.Name, p.Spec.CIDR, p.Spec.BlockSize = "p", "10.0.0.0/24", 28
		if _, err := store.Create(ctx, st, p); err != nil && !errors.Is(err, store.ErrExists) {
			return err
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for i := range hosts {
		h := &host{
			t: t, name: fmt.Sprint("node", i), hist: w.hist, open: c.Datastore.Open, life: c.Life, disk: &disk{values: map[string]json.RawMessage{}},
			held: map[string]netip.Addr{}, told: map[string]bool{}, pending: map[string]bool{}, doubt: map[string]netip.Addr{},
		}
		if err := w.putNode(st, h.name); err != nil {
			t.Fatal(err)
		}
		w.all = append(w.all, h)
	}
	cluster := collect.New(collect.Config{Store: st, Node: "collector", Grace: grace})
	w.chaos(total, st, cluster)
	if err := w.settle(st, cluster); err != nil {
		t.Fatal(err)
	}

	_, wrong := check(w.hist.events)
	for _, s := range wrong {
		t.Error(s)
	}
	gains, harmed, forgot, fenced := w.hist.gains(), c.Datastore.Harmed(), 0, 0
	for _, h := range w.all {
		forgot, fenced = forgot+h.forgot, fenced+h.fenced
	}
	t.Logf("%d addresses given, the datastore harmed %d times, %d leaks, %d fenced", gains, harmed, forgot, fenced)
	if gains < minGains || harmed < c.MinHarmed {
		t.Errorf("only %d addresses were given, and the datastore harmed %d times", gains, harmed)
	}
}

// chaos lets hosts live while they are killed and the datastore is harmed: for a
// time, and on a slow machine until enough has happened.
func (w *world) chaos(total time.Duration, st store.Store, cluster *collect.Collector) {
	ctx, cancel := context.WithTimeout(context.Background(), total+await.Patience)
	defer cancel()
	var wg sync.WaitGroup
	wg.Go(func() {
		defer cancel()
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for begun := time.Now(); time.Since(begun) < total || w.hist.gains() < minGains || w.Datastore.Harmed() < w.MinHarmed; {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
	})
	for i, h := range w.all {
		wg.Go(func() {
			if i < 2 {
				w.dieAndReturn(ctx, h, total, i == 0)
			} else {
				h.live(ctx)
			}
		})
	}
	wg.Go(func() { w.collect(ctx, cluster) })
	wg.Go(func() { w.Datastore.Harm(ctx, st) })
	wg.Wait()
}

// settle lets the hosts that are left end what was left open, and the
// collector look, until what is stored is what is owned.
func (w *world) settle(st store.Store, cluster *collect.Collector) error {
	reserves := map[string]bool{}
	left := slices.Delete(slices.Clone(w.all), 1, 2) // that one is dead for good
	for _, h := range left {
		reserves[store.ReserveHandle(h.name)] = true
		if err := h.boot(context.Background()); err != nil {
			return err
		}
		defer h.stop()
	}
	return w.until(context.Background(), "what is stored is what is owned", await.Patience, func(ctx context.Context) error {
		for _, h := range left {
			if err := h.verify(ctx); err != nil {
				return err
			}
			h.again(ctx)
			h.confirm(ctx)
			_, err := h.leaks.LookHost(ctx)
			_, err2 := h.leaks.LookBorrowed(ctx)
			if err := errors.Join(err, err2); err != nil {
				return err
			}
		}
		if _, err := cluster.LookCluster(ctx); err != nil {
			return err
		}
		have, err := stored(ctx, st)
		if err != nil {
			return err
		}
		owners, _ := check(w.hist.events)
		for _, h := range left {
			for handle := range h.pending {
				return fmt.Errorf("%s is not given back yet", handle)
			}
		}
		maps.DeleteFunc(owners, func(_ netip.Addr, owner string) bool { return strings.HasPrefix(owner, "net."+w.all[1].name+"-") })
		return differences(have, owners, reserves)
	})
}
