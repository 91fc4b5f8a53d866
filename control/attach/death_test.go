package attach

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/control/ipam/audit"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

// ask has the runtime ask for something, and notes the answer of a daemon that still lives.
func (d *mortalDaemon) ask(what string, call func(context.Context) error, answered func()) error {
	d.w.t.Helper()
	done := make(chan error, 1)
	d.w.tasks.Go(func() {
		err := call(d.w.ctx)
		d.life.mu.Lock()
		defer d.life.mu.Unlock()
		if err == nil && !d.life.hasEnded() {
			d.w.mu.Lock()
			answered()
			d.w.mu.Unlock()
		}
		done <- err
	})
	select {
	case err := <-done:
		if err != nil {
			err = fmt.Errorf("%s: %w", what, err)
		}
		return err
	case <-d.life.ended:
		return errKilled
	}
}

func (d *mortalDaemon) attach(name string) error {
	p := d.w.pods[name]
	p.begun = true
	var res Result
	return d.ask("ADD of "+name, func(ctx context.Context) (err error) {
		res, err = d.Add(ctx, p.req)
		return err
	}, func() {
		p.attached = true
		for _, a := range res.Addresses {
			for h, addrs := range d.w.live {
				if slices.Contains(addrs, a.Addr) {
					d.w.t.Errorf("%s was given %s, which %s has", name, a.Addr, h)
				}
			}
			d.w.live[handle(p.req.ID)] = append(d.w.live[handle(p.req.ID)], a.Addr)
		}
	})
}

func (d *mortalDaemon) detach(name string) error {
	p := d.w.pods[name]
	d.w.mu.Lock()
	p.leaving = true
	delete(d.w.live, handle(p.req.ID))
	d.w.mu.Unlock()
	return d.ask("DEL of "+name, func(ctx context.Context) error { return d.Del(ctx, delOf(p.req)) }, func() { p.gone = true })
}

// until waits for something, or for the daemon's death: with one of its locks held, nothing that it
// is asked has an answer.
func (d *mortalDaemon) until(what string, check func() error) error {
	d.w.t.Helper()
	var err error
	await.Until(d.w.t, what, func() error {
		checked := make(chan error, 1)
		d.w.tasks.Go(func() { checked <- check() })
		select {
		case <-d.life.ended:
			err = errKilled
			return nil
		case err := <-checked:
			return err
		}
	})
	return err
}

// is waits for the state of a pod.
func (d *mortalDaemon) is(name string, far func(r record, known bool) bool) error {
	d.w.t.Helper()
	return d.until("what is to be of "+name, func() error {
		r, known := d.ledger.get(d.w.pods[name].req.ID)
		if !far(r, known) {
			return fmt.Errorf("%s, endpoint %d", r.State, r.Endpoint)
		}
		return nil
	})
}

func written(r record, _ bool) bool       { return r.State == attachedStored }
func patched(r record, _ bool) bool       { return r.Endpoint != 0 }
func forgotten(_ record, known bool) bool { return !known }

// script is a part of a node's life, up to the end of the daemon: pods that live on and end before
// and after their addresses are confirmed, whose pods the API still has then and has no more.
func (d *mortalDaemon) script() error {
	for _, do := range []func() error{
		func() error { return d.until("the reserve has both families", d.filled) },
		func() error { return d.attach("a") },
		func() error { return d.is("a", written) },
		func() error { return d.attach("b") },
		func() error { return d.is("b", patched) },
		func() error { return d.detach("b") },
		func() error { return d.is("b", forgotten) },
		func() error { return d.attach("c") },
		func() error { return d.detach("a") },
		func() error { return d.w.deletePod("a") },
		func() error { return d.is("a", forgotten) },
		func() error { return d.is("c", written) },
		func() error { return d.attach("d") },
		func() error {
			return d.ask("settle", func(ctx context.Context) error { d.Settle(ctx); return nil }, func() {})
		},
	} {
		if err := do(); err != nil {
			return err
		}
	}
	return nil
}

func (d *mortalDaemon) filled() error {
	if got := d.ipam.Ready(); len(got) < 2 {
		return fmt.Errorf("ready: %v", got)
	}
	return nil
}

func (w *death) deletePod(name string) error {
	err := store.Delete(w.ctx, w.db, store.Key{Kind: store.KindWorkloadEndpoint, Namespace: "ns1", Name: "node--a-k8s-" + name + "-eth0"}, 0)
	if errors.Is(err, store.ErrNotFound) {
		return nil
	}
	return err
}

// resume is what a kubelet does with a daemon that starts: what was not answered ends, as does what
// was to end, and what was not begun is begun.
func (d *mortalDaemon) resume() error {
	for _, name := range slices.Sorted(maps.Keys(d.w.pods)) {
		p := d.w.pods[name]
		if p.begun && !p.gone && (!p.attached || p.leaving) {
			if err := d.detach(name); err != nil {
				return err
			}
		}
		if p.begun {
			continue
		}
		// With the API away there may be nothing to give, and one more who asks is enough.
		err := d.attach(name)
		if errors.Is(err, errKilled) || err != nil && d.answers() {
			return err
		}
		if err != nil {
			return nil
		}
	}
	return nil
}

// answers reports whether the API answers.
func (d *mortalDaemon) answers() bool {
	select {
	case <-d.back:
		return true
	default:
		return false
	}
}

// others has the other node take all addresses that are free, or gives them back.
func (w *death) others(b *ipam.Allocator, give bool) {
	w.t.Helper()
	for _, f := range []dataplane.Family{dataplane.IPv4, dataplane.IPv6} {
		for n := 0; ; n++ {
			h := fmt.Sprintf("others.%s-%d", f, n)
			if !give {
				back, err := b.ReleaseHandle(w.ctx, h)
				if err != nil {
					w.t.Fatal(err)
				}
				if len(back) == 0 {
					break
				}
				continue
			}
			if _, err := b.Assign(w.ctx, ipam.Request{Family: f, Handle: h}); errors.Is(err, ipam.ErrExhausted) {
				break
			} else if err != nil {
				w.t.Fatal(err)
			}
		}
	}
}

// sound compares IPAM's records with the containers that live: each has its addresses, nobody else
// of this node has any, and "ipam check" finds nothing.
func (w *death) sound(full bool) error {
	r, err := audit.Read(w.ctx, w.db)
	if err != nil {
		return err
	}
	all, found := r.Check()
	var errs []error
	counts := make(map[string]map[string]int)
	have := make(map[string][]netip.Addr)
	for _, a := range all {
		if a.Handle == "" || !a.ReleasedAt.IsZero() {
			continue
		}
		if counts[a.Handle] == nil {
			counts[a.Handle] = make(map[string]int)
		}
		counts[a.Handle][a.Block.String()]++
		if a.Handle != store.ReserveHandle("node-a") && a.Node == "node-a" {
			have[a.Handle] = append(have[a.Handle], a.Addr)
		}
	}
	for _, f := range found {
		if others := f.Problem == "leaked" && strings.Contains(f.Why, "held by others.") || f.Problem == "empty handle" && full; !others {
			errs = append(errs, fmt.Errorf("%s: %s: %s", f.Problem, f.What, f.Why))
		}
	}
	for _, o := range r.Handles {
		for cidr, n := range counts[o.Key.Name] {
			if known := o.Value.(*store.Handle).Block[cidr]; known < n {
				errs = append(errs, fmt.Errorf("handle %s has %d addresses of %s and knows of %d", o.Key.Name, n, cidr, known))
			}
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if !maps.EqualFunc(have, w.live, sameAddrs) {
		errs = append(errs, fmt.Errorf("%v have addresses, and %v live", have, w.live))
	}
	if len(w.devices) != len(w.live) {
		errs = append(errs, fmt.Errorf("devices %v, and %v live", w.devices, w.live))
	}
	return errors.Join(errs...)
}

// end is what becomes of the node and its neighbour after the deaths: nothing of one who lives is
// another's, whatever the neighbour takes, and nothing is left when all have ended.
func (d *mortalDaemon) end(b *ipam.Allocator) {
	w := d.w
	w.others(b, true)
	await.Until(w.t, "all who live have their addresses", func() error { return w.sound(true) })
	d.sink.mu.Lock()
	for h, addrs := range w.live {
		for _, a := range addrs {
			if _, ok := d.sink.want[dataplane.RouteKey{Prefix: netip.PrefixFrom(a, a.BitLen()), Table: dataplane.MainTable}]; !ok {
				w.t.Errorf("there is no route to %s of %s", a, h)
			}
		}
	}
	d.sink.mu.Unlock()
	w.others(b, false)
	for _, name := range slices.Sorted(maps.Keys(w.pods)) {
		if p := w.pods[name]; p.begun && !p.gone {
			if err := d.detach(name); err != nil {
				w.t.Error(err)
			}
		}
	}
	await.Until(w.t, "nothing is left", func() error {
		left := d.ledger.snapshot()
		if err := w.sound(false); err != nil || len(left) == 0 {
			return err
		}
		return fmt.Errorf("records: %v", left)
	})
}

// another starts the neighbour's allocator.
func (w *death) another() *ipam.Allocator {
	back := make(chan struct{})
	close(back)
	db := w.api(&life{over: w.over, ended: make(chan struct{})}, back)
	log := slog.New(slog.DiscardHandler)
	b := ipam.New(ipam.Config{Store: db, Node: "node-b", Log: log, Piecewise: true})
	c := cluster.New(cluster.Config{Store: db, Node: "node-b", Log: log})
	steps := c.Follow(ipam.Kinds()...)
	w.tasks.Go(func() { _ = c.Run(w.ctx); _ = c.Close() })
	w.tasks.Go(func() { _ = b.Run(w.ctx, steps) })
	return b
}

// deathEvery is at which of the points of [mortalDaemon.script] a daemon dies: 1 tries all, in some
// minutes.
var deathEvery = flag.Int("death-every", 32, "let daemons die at each so manyth point of their script, from a random one")

// TestDeathWhileWaiting: on Kubernetes' API what a container had waits for its pod's end, and whose
// an address is is written when the pod has lived for a while. The daemon dies before and after each
// step and each write of that, and another one goes on from its disk, with the API there or away at
// first, or dies as well. No address ever has two owners, that of a pod that lives is never another's,
// and none is left.
func TestDeathWhileWaiting(t *testing.T) {
	t.Parallel()
	probe := newDeath(t)
	d := probe.start(t.TempDir(), 0, false)
	if err := d.script(); err != nil {
		t.Fatal(err)
	}
	d.end(probe.another())
	points := d.life.passed()
	for point := 1 + rand.N(*deathEvery); point <= points; point += *deathEvery {
		for _, then := range []string{"there", "away", "again"} {
			t.Run(fmt.Sprintf("%d, the API is %s", point, then), func(t *testing.T) {
				t.Parallel()
				diesAt(t, point, then)
			})
		}
	}
}

func diesAt(t *testing.T, point int, then string) {
	t.Helper()
	w := newDeath(t)
	d := w.start(t.TempDir(), point, false)
	if err := d.script(); err != nil && !errors.Is(err, errKilled) {
		t.Fatal(err)
	}
	d.life.finish()
	deaths := []string{d.life.last()}
	again := 0
	if then == "again" {
		again = 1 + point*7%60
	}
	next := w.start(d.left, again, then == "away")
	err := next.resume()
	if then == "away" {
		close(next.back)
	}
	if again != 0 {
		if err == nil {
			_ = next.until("all who live have their addresses", func() error { return w.sound(false) })
		}
		next.life.finish()
		deaths = append(deaths, next.life.last())
		next = w.start(next.left, 0, false)
		err = next.resume()
	}
	if err != nil {
		t.Error(err)
	}
	next.end(w.another())
	if t.Failed() {
		t.Logf("died %s", strings.Join(deaths, ", then "))
	}
}

// finish ends it, if it has not ended.
func (l *life) finish() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.kill()
}

// passed is how many points it came by.
func (l *life) passed() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.came)
}

// last is the point that it came to last.
func (l *life) last() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.came) == 0 {
		return "at its start"
	}
	return l.came[len(l.came)-1]
}
