package ownership

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/control/collect"
	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/embedded/clustertest"
	"github.com/routerd/routerd/store/etcd"
)

func TestMain(m *testing.M) {
	clustertest.Main()
	os.Exit(m.Run())
}

const (
	// chaosEnv says for how long hosts and members are killed, as Go writes times.
	chaosEnv = "ROUTERD_CHAOS"
	// chaosTime is the default: about a hundred lives of hosts.
	chaosTime = 6 * time.Second
	// attemptTime bounds one of several tries.
	attemptTime = 5 * time.Second

	hosts, members = 8, 3

	// What a run is worth at least, however slow the machine.
	minGains, minKilled = 50, 2
)

// world is a cluster of hosts over a cluster of etcd.
type world struct {
	t    *testing.T
	etcd *clustertest.Cluster
	hist *history
	all  []*host

	killed atomic.Int64 // members of etcd, so far
}

func (w *world) open() (*etcd.Store, error) {
	return etcd.Open(context.Background(), etcd.Config{Endpoints: w.etcd.Endpoints(), DialTimeout: time.Second})
}

// until tries until it works, each time for so long at most.
func (w *world) until(ctx context.Context, what string, attempt time.Duration, try func(context.Context) error) error {
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
		n := &store.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
		store.SetDefaults(n)
		if _, err := store.Create(ctx, st, n); err != nil && !errors.Is(err, store.ErrExists) {
			return err
		}
		return nil
	})
}

// killMembers kills members of etcd, now and then two at once, and starts them
// again, until ctx ends. The next one is killed when the cluster answers again,
// so that there is something to be done between.
func (w *world) killMembers(ctx context.Context, st store.Store) {
	pause := func(least, more time.Duration) {
		select {
		case <-ctx.Done():
		case <-time.After(least + rand.N(more)):
		}
	}
	for ctx.Err() == nil {
		pause(500*time.Millisecond, time.Second)
		first := rand.N(members)
		w.etcd.Kill(first)
		w.killed.Add(1)
		if rand.N(4) == 0 {
			second := (first + 1) % members // nobody has a majority
			w.etcd.Kill(second)
			w.killed.Add(1)
			pause(100*time.Millisecond, 500*time.Millisecond)
			w.etcd.Up(second)
		}
		pause(200*time.Millisecond, 800*time.Millisecond)
		w.etcd.Up(first)
		err := w.until(ctx, "read from etcd", attemptTime, func(ctx context.Context) error {
			_, err := st.Get(ctx, store.ResourceKey(store.KindIPPool, "p"))
			return err
		})
		if err != nil && ctx.Err() == nil {
			w.t.Error(err)
			return
		}
	}
}

// dieAndReturn is the life of a host that is declared dead in the middle of it,
// and comes back when others have had time to take its addresses.
func (w *world) dieAndReturn(ctx context.Context, h *host, total time.Duration, returns bool) {
	first, cancel := context.WithTimeout(ctx, total/3)
	h.live(first)
	cancel()
	st, err := w.open()
	if err != nil {
		w.t.Error(err)
		return
	}
	defer st.Close()
	h.declareDead()
	err = w.until(context.Background(), "delete Node "+h.name, attemptTime, func(ctx context.Context) error {
		err := store.Delete(ctx, st, store.ResourceKey(store.KindNode, h.name), 0)
		if errors.Is(err, store.ErrNotFound) {
			return nil
		}
		return err
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

// TestOwnership: eight hosts share a pool that is too small for them, over a
// real etcd of three members. Hosts and members are killed at random, one host
// is declared dead for good, another wrongly. Over the whole history no address
// has two owners at any time; and after the collector ran none is without one.
func TestOwnership(t *testing.T) {
	t.Parallel()
	total := chaosTime
	if s := os.Getenv(chaosEnv); s != "" {
		var err error
		if total, err = time.ParseDuration(s); err != nil {
			t.Fatalf("%s: %v", chaosEnv, err)
		}
	}
	w := &world{t: t, etcd: clustertest.Start(t, members), hist: &history{}}
	st, err := w.open()
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
			t: t, name: fmt.Sprint("node", i), hist: w.hist, open: w.open, disk: &disk{values: map[string]json.RawMessage{}},
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
	gains, killed, forgot, fenced := w.hist.gains(), w.killed.Load(), 0, 0
	for _, h := range w.all {
		forgot, fenced = forgot+h.forgot, fenced+h.fenced
	}
	t.Logf("%d addresses given, %d members killed, %d leaks, %d fenced", gains, killed, forgot, fenced)
	if gains < minGains || killed < minKilled {
		t.Errorf("only %d addresses were given, and %d members killed", gains, killed)
	}
}

// chaos lets hosts live while they, and the members of etcd, are killed: for a
// time, and on a slow machine until enough has happened.
func (w *world) chaos(total time.Duration, st store.Store, cluster *collect.Collector) {
	ctx, cancel := context.WithTimeout(context.Background(), total+await.Patience)
	defer cancel()
	var wg sync.WaitGroup
	wg.Go(func() {
		defer cancel()
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for begun := time.Now(); time.Since(begun) < total || w.hist.gains() < minGains || w.killed.Load() < minKilled; {
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
	wg.Go(func() { w.killMembers(ctx, st) })
	wg.Wait()
	for i := range members {
		w.etcd.Up(i)
	}
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
