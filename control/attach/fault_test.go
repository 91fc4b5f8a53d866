package attach

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

var (
	errInjected = errors.New("injected")
	errKilled   = errors.New("killed")
)

// points are the moments before and after each of some steps.
func points(steps ...string) []string {
	var out []string
	for _, s := range steps {
		out = append(out, "before "+s, "after "+s)
	}
	return out
}

func addSteps() []string {
	return points("intent", "address", "vacant", "record", "wire", "route", "endpoint", "rules", "done")
}

func delSteps() []string {
	return points("mark", "detach", "delete endpoint", "release address", "forget")
}

// flushes reports whether a point is one of the flush to the datastore.
func flushes(point string) bool {
	return slices.Contains(points("confirm addresses", "write endpoints", "note flushed"), point)
}

// at has fn called at each point; its error is the step's.
func at(a *Attacher, fn func(point string) error) {
	a.steps.around = func(step string, do func() error) error {
		if err := fn("before " + step); err != nil {
			return err
		}
		if err := do(); err != nil {
			return err
		}
		return fn("after " + step)
	}
}

// watch has fn called at each point.
func watch(a *Attacher, fn func(point string)) {
	at(a, func(point string) error { fn(point); return nil })
}

// killAt makes the daemon die at a point: nothing after it runs, no undo either.
func killAt(a *Attacher, point string) {
	watch(a, func(p string) {
		if p == point {
			panic(errKilled)
		}
	})
}

// dies calls fn, which must be killed.
func dies(t *testing.T, fn func()) {
	t.Helper()
	defer func() {
		if r := recover(); r != errKilled { //nolint:errorlint // the very value that killAt panics with
			t.Fatalf("not killed: the step was not reached (%v)", r)
		}
	}()
	fn()
}

// The daemon is killed at each step of ADD. Whatever comes then sets it right:
// the runtime's repeated ADD, its DEL with and without a record, its GC, or
// the daemon by itself.
func TestKilledInAdd(t *testing.T) {
	t.Parallel()
	after := []struct {
		name string
		then func(t *testing.T, w *world, req AddRequest)
	}{
		{"ADD again", func(t *testing.T, w *world, req AddRequest) {
			a := w.start()
			w.add(a, req)
			w.check(a, req)
			w.del(a, req)
		}},
		{"DEL", func(_ *testing.T, w *world, req AddRequest) { w.del(w.start(), req) }},
		{"DEL without a record", func(t *testing.T, w *world, req AddRequest) {
			a := w.start()
			if err := a.addresses.forget(req.ID); err != nil {
				t.Fatal(err)
			}
			w.del(a, req)
			// The desired state died with the record.
			w.sink.Replace(0, nil)
		}},
		{"GC", func(t *testing.T, w *world, req AddRequest) {
			a := w.start()
			if _, err := a.GC(t.Context(), req.ID.Network, nil); err != nil {
				t.Error(err)
			}
		}},
		{"background", func(_ *testing.T, w *world, req AddRequest) {
			a := w.start()
			if slices.ContainsFunc(a.Endpoints(), func(e Endpoint) bool { return e.State == phaseAttached }) {
				w.del(a, req) // complete, but the runtime never heard of it
				return
			}
			w.run(a)
			await.Until(w.t, "clean", w.clean)
		}},
	}
	for _, step := range addSteps() {
		for _, tt := range after {
			for _, pod := range []string{"", "web-0"} {
				t.Run(step+"/"+tt.name+"/"+pod, func(t *testing.T) {
					t.Parallel()
					w := newWorld(t)
					req := w.request(1)
					if pod != "" {
						req = podRequest(req, "ns1", pod)
					}
					a := w.start()
					killAt(a, step)
					dies(t, func() { _, _ = a.Add(t.Context(), req) })
					tt.then(t, w, req)
					w.expectClean()
				})
			}
		}
	}
}

func TestKilledInDel(t *testing.T) {
	t.Parallel()
	for _, step := range delSteps() {
		for _, again := range []string{"DEL", "ADD", "background"} {
			t.Run(step+"/"+again, func(t *testing.T) {
				t.Parallel()
				w := newWorld(t)
				req := w.request(1)
				a := w.start()
				w.add(a, req)
				killAt(a, step)
				dies(t, func() { _ = a.Del(t.Context(), delOf(req)) })
				b := w.start()
				switch again {
				case "ADD":
					w.add(b, req)
					w.check(b, req)
					w.del(b, req)
				case "background":
					w.run(b)
					if step == "before mark" {
						w.check(b, req) // nothing was begun
						w.del(b, req)
					}
					await.Until(w.t, "clean", w.clean)
				default:
					w.del(b, req)
				}
				w.expectClean()
			})
		}
	}
}

// A failure at each step of ADD is undone by ADD itself.
func TestFailureInAddIsUndone(t *testing.T) {
	t.Parallel()
	for _, step := range addSteps() {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			a := w.start()
			req := w.request(1)
			failAt(a, step)
			if _, err := a.Add(t.Context(), req); !errors.Is(err, errInjected) {
				t.Fatalf("got %v", err)
			}
			w.expectClean()
			a.steps.around = nil
			w.add(a, req)
			w.check(a, req)
		})
	}
}

func failAt(a *Attacher, points ...string) {
	at(a, func(p string) error {
		if slices.Contains(points, p) {
			return fmt.Errorf("%s: %w", p, errInjected)
		}
		return nil
	})
}

// Where the undo fails as well, both errors are told and the rest is completed
// later.
func TestFailureInUndo(t *testing.T) {
	t.Parallel()
	for _, step := range delSteps() {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			a := w.start()
			req := w.request(1)
			failAt(a, "after endpoint", step)
			_, err := a.Add(t.Context(), req)
			if err == nil || !strings.Contains(err.Error(), "endpoint: injected") || !strings.Contains(err.Error(), "undo: "+step) {
				t.Fatalf("got %v", err)
			}
			b := w.start()
			w.run(b)
			await.Until(w.t, "clean", w.clean)
		})
	}
}

func TestKernelSaysNo(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.start()
	req := w.request(1)
	w.sink.fail = errors.New("operation not supported")
	if _, err := a.Add(t.Context(), req); err == nil || !strings.Contains(err.Error(), "program the host's route: operation not supported") {
		t.Errorf("got %v", err)
	}
	w.expectClean()
}

// The caller's deadline passes in the middle: the undo does not depend on it.
func TestCallerGone(t *testing.T) {
	t.Parallel()
	for _, step := range points("address", "record", "wire") {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			a := w.start()
			ctx, cancel := context.WithCancel(t.Context())
			watch(a, func(p string) {
				if p == step {
					cancel()
				}
			})
			if _, err := a.Add(ctx, w.request(1)); !errors.Is(err, context.Canceled) {
				t.Errorf("got %v", err)
			}
			w.expectClean()
		})
	}
}

// stalls is for how long a call waits for a datastore that does not answer. Calls that are
// answered have as long, on a machine without a processor to spare too.
const stalls = 2 * time.Second

// With the datastore away ADD fails within its deadline, names the datastore,
// and what it cannot undo is completed when the datastore is back.
func TestAddWithoutDatastore(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		fail func(w *world)
		heal func(w *world)
	}{
		{"IPAM refused", func(w *world) { w.ipam.set(fmt.Errorf("%w: connection refused", store.ErrUnavailable), false) }, func(w *world) { w.ipam.set(nil, false) }},
		{"IPAM stalls", func(w *world) { w.ipam.set(nil, true) }, func(w *world) { w.ipam.set(nil, false) }},
		{"store refused", func(w *world) { w.store.Fail(errors.New("connection refused")) }, func(w *world) { w.store.Fail(nil) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.cfg = func(c *Config) { c.StoreTimeout = stalls }
			a := w.start()
			w.run(a)
			req := w.request(1)
			tt.fail(w)
			ctx := await.Context(t)
			_, err := a.Add(ctx, req)
			if !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "datastore unavailable") {
				t.Errorf("got %v", err)
			}
			if ctx.Err() != nil {
				t.Error("the deadline passed")
			}
			devices, err := w.wire.Devices(t.Context())
			if err != nil || len(devices) != 0 || len(w.sink.wanted()) != 0 {
				t.Errorf("the wire stays: %v %v %v", devices, w.sink.wanted(), err)
			}
			tt.heal(w)
			await.Until(w.t, "clean", w.clean)
			w.add(a, req)
			w.check(a, req)
		})
	}
}

// With the datastore away DEL cuts the wire and says so; later all goes.
func TestDelWithoutDatastore(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"DEL again", "restart"} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.cfg = func(c *Config) { c.StoreTimeout = stalls }
			a := w.start()
			req := w.request(1)
			w.add(a, req)
			w.store.Fail(errors.New("connection refused"))
			w.ipam.set(nil, true)
			for range 2 {
				err := a.Del(t.Context(), delOf(req))
				if !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "datastore unavailable") {
					t.Errorf("got %v", err)
				}
			}
			devices, err := w.wire.Devices(t.Context())
			if err != nil || len(devices) != 0 || len(w.sink.wanted()) != 0 {
				t.Errorf("the wire is not cut: %v %v %v", devices, w.sink.wanted(), err)
			}
			// The address is still the old container's: nobody else gets it.
			diff(t, "handles", []string{"net1." + req.ID.ContainerID}, w.ipam.handles())
			w.store.Fail(nil)
			w.ipam.set(nil, false)
			if how == "restart" {
				w.run(w.start())
				await.Until(w.t, "clean", w.clean)
				return
			}
			w.del(a, req)
			w.expectClean()
		})
	}
}

// The address is given back, but the record stays for some reason; meanwhile
// the address is another container's. Completing the first must not touch the
// second's route.
func TestRepeatedReleaseSparesNextHolder(t *testing.T) {
	t.Parallel()
	for _, restart := range []bool{false, true} {
		t.Run(fmt.Sprintf("restart %v", restart), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			a := w.start()
			first, second := w.request(1), w.request(2)
			first.ID.ContainerID, second.ID.ContainerID = "first", "second"
			second.Addresses = []netip.Addr{w.add(a, first).Addresses[0].Addr}
			failAt(a, "after release address")
			if err := a.Del(t.Context(), delOf(first)); !errors.Is(err, errInjected) {
				t.Fatal(err)
			}
			a.steps.around = nil
			if restart {
				a = w.start()
			}
			w.add(a, second)
			w.del(a, first)
			w.check(a, second)
			if got := len(w.sink.wanted()); got != 7 {
				t.Errorf("wants: %v", w.sink.wanted())
			}
		})
	}
}
