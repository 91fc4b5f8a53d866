package attach

import (
	"errors"
	"fmt"
	"strings"
	"testing"
)

// namesakes are attachments of which two each have one handle.
func (w *world) namesakes() [][2]AddRequest {
	w.t.Helper()
	var out [][2]AddRequest
	for _, ids := range [][2]ID{
		{{Network: "net1", ContainerID: "c1", Interface: "eth1"}, {Network: "net1", ContainerID: "c1.eth1", Interface: "eth0"}},
		{{Network: "a", ContainerID: "b.c", Interface: "eth0"}, {Network: "a.b", ContainerID: "c", Interface: "eth0"}},
	} {
		one, two := w.request(1), w.request(2)
		one.ID, two.ID = ids[0], ids[1]
		out = append(out, [2]AddRequest{one, two}, [2]AddRequest{two, one})
	}
	return out
}

func eitherWorld(t *testing.T, test func(t *testing.T, w *world)) {
	t.Helper()
	for name, make := range map[string]func(*testing.T) *world{
		"at once": func(t *testing.T) *world { t.Helper(); return newWorld(t) },
		"behind":  newBehind,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, make(t))
		})
	}
}

// An attachment whose handle another one has gets nothing, and nothing that is
// done about it takes the other's address.
func TestNamesake(t *testing.T) {
	t.Parallel()
	eitherWorld(t, func(t *testing.T, w *world) {
		a := w.start()
		for _, reqs := range w.namesakes() {
			live, never := reqs[0], reqs[1]
			h := handle(live.ID)
			if handle(never.ID) != h {
				t.Fatalf("%v and %v have different handles", live.ID, never.ID)
			}
			want := w.add(a, live)
			hasAddress := func(after string) {
				t.Helper()
				// In the reserve's world the datastore may not know of it yet.
				if got := fmt.Sprint(w.ipam.claimed(), w.ipam.has(h)); !strings.Contains(got, want.Addresses[0].Addr.String()) {
					t.Errorf("%v: after %s its address %s is free", live.ID, after, want.Addresses[0].Addr)
				}
				w.check(a, live)
				diff(t, "again after "+after, want, w.add(a, live))
			}
			_, addErr := a.Add(t.Context(), never)
			_, allocateErr := a.Allocate(t.Context(), AllocateRequest{ID: never.ID, IPv4: true})
			for _, err := range []error{addErr, allocateErr} {
				says := fmt.Sprintf("container %s, interface %s in network %s ", live.ID.ContainerID, live.ID.Interface, live.ID.Network)
				if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), says) || !strings.Contains(err.Error(), "detach it first") {
					t.Errorf("ADD of %v: %v, want ErrInvalid that names %v", never.ID, err, live.ID)
				}
			}
			hasAddress("ADD")
			w.del(a, never)
			hasAddress("DEL before the datastore is told")
			if a.behind() {
				if _, err := a.Add(t.Context(), never); !errors.Is(err, ErrInvalid) {
					t.Errorf("ADD of %v after its DEL: %v, want ErrInvalid", never.ID, err)
				}
				settle(t, a)
			}
			hasAddress("DEL")
			if done, err := a.GC(t.Context(), never.ID.Network, []ID{live.ID}); err != nil || len(done.Removed) > 0 {
				t.Errorf("GC: %v, %v", done, err)
			}
			if !a.Uses(h) {
				t.Errorf("%s is not in use", h)
			}
			w.del(a, live)
			if a.behind() {
				if _, err := a.Add(t.Context(), never); !errors.Is(err, ErrNotReady) {
					t.Errorf("ADD of %v while %v is released: %v, want ErrNotReady", never.ID, live.ID, err)
				}
				settle(t, a)
			}
			w.add(a, never)
			w.del(a, never)
			if a.behind() {
				settle(t, a)
			}
			w.expectClean()
		}
		if len(a.ledger.byHandle) > 0 {
			t.Errorf("handles are kept: %v", a.ledger.byHandle)
		}
	})
}

// Of two that are added at once one is refused.
func TestNamesakesAtOnce(t *testing.T) {
	t.Parallel()
	eitherWorld(t, func(t *testing.T, w *world) {
		a := w.start()
		reqs := w.namesakes()[0]
		var errs [2]chan error
		for i, req := range reqs {
			errs[i] = make(chan error, 1)
			go func() {
				_, err := a.Add(t.Context(), req)
				errs[i] <- err
			}()
		}
		first, second := <-errs[0], <-errs[1]
		if (first == nil) == (second == nil) || !errors.Is(errors.Join(first, second), ErrInvalid) {
			t.Fatalf("got %v and %v, want one ErrInvalid", first, second)
		}
		if first != nil {
			reqs[0], reqs[1] = reqs[1], reqs[0]
		}
		w.check(a, reqs[0])
		diff(t, "addresses", 1, len(w.ipam.claimed())+len(w.ipam.has(handle(reqs[0].ID))))
	})
}

// A journal may have both, written by an earlier version: the handle goes with
// the last one.
func TestNamesakesOfBefore(t *testing.T) {
	t.Parallel()
	eitherWorld(t, func(t *testing.T, w *world) {
		for _, reqs := range w.namesakes() {
			a := w.start()
			live, other := reqs[0], reqs[1]
			w.add(a, live)
			if a.behind() {
				settle(t, a)
			}
			r := recordOf(other.ID, Workload{})
			r.Version, r.State, r.MTU = recordVersion, attachedStored, 1450
			if err := w.journal.Put(recordKey(other.ID), r); err != nil {
				t.Fatal(err)
			}
			a = w.start()
			w.del(a, other)
			if a.behind() {
				settle(t, a)
			}
			if got := w.ipam.has(handle(live.ID)); len(got) != 1 {
				t.Errorf("after DEL of %v its namesake has %v", other.ID, got)
			}
			w.check(a, live)
			w.del(a, live)
			if a.behind() {
				settle(t, a)
			}
			w.expectClean()
		}
	})
}
