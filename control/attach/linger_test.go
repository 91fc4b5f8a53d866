package attach

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

// endsOf counts the endpoints whose end a store is told.
type endsOf struct {
	store.Store
	mu   sync.Mutex
	ends int
	puts int // endpoints that are written
}

func (s *endsOf) Txn(ctx context.Context, ops ...store.Op) ([]store.Object, error) {
	for _, op := range ops {
		if op.Object.Key.Kind != store.KindWorkloadEndpoint {
			continue
		}
		s.mu.Lock()
		switch op.Action {
		case store.Remove:
			s.ends++
		case store.Put:
			s.puts++
		case store.Check:
		}
		s.mu.Unlock()
	}
	return s.Store.Txn(ctx, ops...)
}

func (s *endsOf) told() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ends
}

// onKubernetes is a world on the API of Kubernetes in which something waits, with a pod that the
// watch told of and that is as far as it is to be.
func onKubernetes(t *testing.T, waits func(*Config), what string, far func(record) bool) (*world, *Attacher, *endsOf, AddRequest, *store.WorkloadEndpoint) {
	t.Helper()
	w := newWorld(t)
	ends := &endsOf{Store: w.store}
	w.ipam.reserve = true
	w.cfg = func(c *Config) {
		c.Kubernetes, c.Behind, c.Linger, c.Store = true, true, time.Millisecond, ends
		waits(c)
	}
	a := w.start()
	pod := kubePod("u1", nil)
	a.HandlePods(told(t, pod))
	w.run(a)
	req := podRequest(w.request(1), "ns1", "web-0")
	req.PodUID = "u1"
	w.add(a, req)
	await.True(t, what, func() bool { r, _ := a.ledger.get(req.ID); return far(r) })
	return w, a, ends, req, pod
}

// lingering is that in which what ended waits for its pod's end, with a pod that is written.
func lingering(t *testing.T, linger time.Duration) (*world, *Attacher, *endsOf, AddRequest, *store.WorkloadEndpoint) {
	t.Helper()
	return onKubernetes(t, func(c *Config) { c.LingerEnd = linger }, "written", func(r record) bool { return r.State == attachedStored })
}

// attachedAs is what the watch shows of a pod that has its address, or with none had it.
func attachedAs(pod *store.WorkloadEndpoint, req AddRequest, addrs ...string) *store.WorkloadEndpoint {
	next := store.Clone(pod).(*store.WorkloadEndpoint)
	next.Spec.ContainerID, next.Spec.IPNetworks = req.ID.ContainerID, addrs
	return next
}

// TestEndOfPod: the API is told that a pod has no address any more only where it does not know
// that by the end of the pod itself, and nobody gets the address before.
func TestEndOfPod(t *testing.T) {
	t.Parallel()
	const address = "192.168.0.1/32"
	for _, tc := range []struct {
		name string
		then func(t *testing.T, pod *store.WorkloadEndpoint, req AddRequest) cluster.Step
		want int // how often the API is told
	}{
		{"the pod stays", nil, 1},
		{"the pod goes", func(t *testing.T, pod *store.WorkloadEndpoint, _ AddRequest) cluster.Step {
			s := told(t, pod)
			s.Changes[0].Value, s.Changes[0].Object.Value = nil, nil
			return s
		}, 0},
		{"the pod is made anew", func(t *testing.T, _ *store.WorkloadEndpoint, _ AddRequest) cluster.Step {
			return told(t, kubePod("u2", nil))
		}, 0},
		{"the pod finishes", func(t *testing.T, pod *store.WorkloadEndpoint, req AddRequest) cluster.Step {
			s := told(t, attachedAs(pod, req))
			s.Changes[0] = &cluster.Change{Event: store.Event{Key: s.Changes[0].Key}, Own: true, Hidden: attachedAs(pod, req)}
			return s
		}, 0},
		{"the pod is changed", func(t *testing.T, pod *store.WorkloadEndpoint, req AddRequest) cluster.Step {
			return told(t, attachedAs(pod, req, address))
		}, 1},
		{"a pod without an address yet is of another container", func(t *testing.T, pod *store.WorkloadEndpoint, _ AddRequest) cluster.Step {
			return told(t, pod)
		}, 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			w, a, ends, req, pod := lingering(t, 300*time.Millisecond)
			a.HandlePods(told(t, attachedAs(pod, req, address)))
			w.del(a, req)
			begin := time.Now()
			if tc.then != nil {
				a.HandlePods(tc.then(t, pod, req))
			}
			await.Until(t, "clean", func() error {
				if time.Since(begin) < 200*time.Millisecond && !slices.Contains(w.ipam.handles(), handle(req.ID)) && ends.told() == 0 {
					return errors.New("the address is free before anybody can know that the pod has it no more")
				}
				if _, known := a.ledger.get(req.ID); known {
					return errors.New("it is not released")
				}
				return nil
			})
			if got := ends.told(); got != tc.want {
				t.Errorf("the API was told %d times, want %d", got, tc.want)
			}
			if held := w.ipam.handles(); len(held) > 0 {
				t.Errorf("handles %v are left", held)
			}
		})
	}
}

// TestHurry: who can have no address for what lingers has it released first, and an address
// that was asked for by name does not linger.
func TestHurry(t *testing.T) {
	t.Parallel()
	for pod, told := range map[string]int{"web-0": 0, "web-1": 1} { // made anew under its name, and another
		t.Run(pod, func(t *testing.T) {
			t.Parallel()
			hurries(t, pod, told)
		})
	}
}

func hurries(t *testing.T, pod string, wantTold int) {
	t.Helper()
	w, a, ends, req, _ := lingering(t, time.Hour)
	w.del(a, req)
	second := podRequest(w.request(2), "ns1", pod)
	next := kubePod("u2", nil)
	next.Name, next.Spec.Pod = "node--a-k8s-"+strings.ReplaceAll(pod, "-", "--")+"-eth0", pod
	next.Annotations = map[string]string{"cni.projectcalico.org/ipAddrs": `["192.168.0.1"]`}
	a.HandlePods(told(t, next))
	w.ipam.mu.Lock()
	w.ipam.reserve = false
	w.ipam.mu.Unlock()
	got := w.add(a, second)
	if got.Addresses[0].Addr.String() != "192.168.0.1" || ends.told() != wantTold {
		t.Errorf("the second pod has %v, and the API was told %d times", got.Addresses, ends.told())
	}
	await.True(t, "written", func() bool { return a.ledger.state(second.ID) == attachedStored })
	w.del(a, second)
	await.Until(t, "clean", func() error {
		if held := w.ipam.handles(); len(held) > 0 {
			return errors.New("it lingers")
		}
		return nil
	})
	w.ipam.deny(handle(second.ID), ipam.ErrExhausted)
	if _, err := a.Add(t.Context(), second); !errors.Is(err, ipam.ErrExhausted) {
		t.Errorf("%v, want that there is no address", err)
	}
}

// confirming is that in which addresses are confirmed later than pods are told them, with a pod
// that was told.
func confirming(t *testing.T, linger time.Duration) (*world, *Attacher, *endsOf, AddRequest) {
	t.Helper()
	w, a, ends, req, _ := onKubernetes(t, func(c *Config) { c.LingerConfirm = linger }, "the pod is told", func(r record) bool { return r.Endpoint != 0 })
	return w, a, ends, req
}

// TestConfirmedLater: the datastore hears of a pod's addresses when the pod has lived for a
// while, when the daemon ends, or is started anew, and of those of one that ends before never;
// the pod is told once.
func TestConfirmedLater(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name   string
		linger time.Duration
		then   func(t *testing.T, w *world, a *Attacher)
		puts   int
	}{
		{"it lives on", 200 * time.Millisecond, func(*testing.T, *world, *Attacher) {}, 1},
		{"the daemon ends", time.Hour, func(t *testing.T, _ *world, a *Attacher) { a.Settle(t.Context()) }, 1},
		{"the daemon is killed", time.Hour, func(_ *testing.T, w *world, _ *Attacher) { w.run(w.start()) }, 2},
		{"the reserve is made to forget it", time.Hour, func(_ *testing.T, _ *world, a *Attacher) { a.reclaimer.later() }, 2},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			w, a, ends, req := confirming(t, tc.linger)
			if r, _ := a.ledger.get(req.ID); r.State == attachedPatched && len(w.ipam.handles()) > 0 {
				t.Errorf("handles %v, want none yet", w.ipam.handles())
			}
			tc.then(t, w, a)
			await.Until(t, "the addresses are confirmed", func() error {
				if got := w.ipam.handles(); !slices.Equal(got, []string{handle(req.ID)}) {
					return fmt.Errorf("handles %v", got)
				}
				return nil
			})
			await.Until(t, "the pod is told", func() error {
				ends.mu.Lock()
				defer ends.mu.Unlock()
				if ends.puts != tc.puts {
					return fmt.Errorf("%d times, want %d", ends.puts, tc.puts)
				}
				return nil
			})
		})
	}
	t.Run("it ends before", func(t *testing.T) {
		t.Parallel()
		w, a, ends, req := confirming(t, time.Hour)
		w.ipam.refuse(handle(req.ID), errors.New("the datastore is asked to release what it never heard of"))
		w.del(a, req)
		await.Until(t, "clean", func() error {
			if _, known := a.ledger.get(req.ID); known {
				return errors.New("the record is there")
			}
			return nil
		})
		await.True(t, "the address is in the reserve again", func() bool { return len(w.ipam.claimed()) == 0 })
		if ends.told() != 1 || len(w.ipam.handles()) > 0 || w.ipam.refusals() > 0 {
			t.Errorf("the API was told %d times, handles %v, %d releases", ends.told(), w.ipam.handles(), w.ipam.refusals())
		}
	})
}

// TestEndWaitsBesideCompletion: an end that is to wait for its pod's does, also where the background
// work saw it on its way out before the DEL had said so, and where the datastore returns.
func TestEndWaitsBesideCompletion(t *testing.T) {
	t.Parallel()
	_, a, _, req, _ := lingering(t, time.Hour)
	l, err := a.locks.lock(t.Context(), req.ID, Workload{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := a.ledger.advance(l.record, released); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- a.releaser.completeOne(t.Context(), req.ID, a.schedule.waits) }()
	a.schedule.await(req.ID, time.Hour)
	a.schedule.clear()
	l.unlock()
	if err := <-done; !errors.Is(err, errLater) {
		t.Errorf("%v, want that it waits", err)
	}
}

// TestHurryBesideOthers: another call about a pod's earlier container waits for the device, while the
// pod's next container has it and can have no address before the earlier one's is released.
func TestHurryBesideOthers(t *testing.T) {
	t.Parallel()
	for name, beside := range map[string]func(context.Context, *Attacher, record) error{
		"CHECK": func(ctx context.Context, a *Attacher, r record) error {
			if err := a.Check(ctx, CheckRequest{ID: r.id()}); !errors.Is(err, ErrUnknown) {
				return fmt.Errorf("%w, want %w", err, ErrUnknown)
			}
			return nil
		},
		"GC": func(ctx context.Context, a *Attacher, r record) error {
			_, err := a.collect(ctx, r)
			return err
		},
		"reclaim": func(ctx context.Context, a *Attacher, r record) error {
			_, err := a.reclaimer.one(ctx, r.id())
			return err
		},
		"completion": func(ctx context.Context, a *Attacher, r record) error {
			return a.releaser.completeOne(ctx, r.id(), func(ID) bool { return false })
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, a, _, earlier, _ := lingering(t, time.Hour)
			w.del(a, earlier)
			next := podRequest(w.request(2), "ns1", "web-0")
			pod := kubePod("u2", nil)
			pod.Annotations = map[string]string{"cni.projectcalico.org/ipAddrs": `["192.168.0.1"]`}
			a.HandlePods(told(t, pod))
			w.ipam.mu.Lock()
			w.ipam.reserve = false
			w.ipam.mu.Unlock()
			r, _ := a.ledger.get(earlier.ID)
			ctx := await.Context(t)
			ended := make(chan error, 1)
			watch(a, func(point string) {
				if point == "before address" {
					go func() { ended <- beside(ctx, a, r) }()
					await.True(t, "it waits for the device", func() bool { return users(&a.locks.keys, a.locks.shared(r)) > 1 })
				}
			})
			if _, err := a.Add(ctx, next); err != nil {
				t.Errorf("ADD of the next container: %v", err)
			}
			if err := <-ended; err != nil {
				t.Errorf("beside it: %v", err)
			}
		})
	}
}
