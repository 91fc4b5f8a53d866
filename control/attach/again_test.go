package attach

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/await"
)

// TestAgainWithoutStore: a container that the datastore knows ends and begins
// anew while the datastore is away, or hangs: at once, with another address, for
// what became of the former is not known. When the datastore is back, only the
// new address is the container's.
func TestAgainWithoutStore(t *testing.T) {
	t.Parallel()
	for _, hang := range []bool{false, true} {
		for _, pod := range []bool{false, true} {
			for _, killed := range append([]string{""}, points("intent", "address", "record", "wire", "endpoint", "done", "confirm addresses", "write endpoints", "note flushed")...) {
				t.Run(fmt.Sprintf("hang %v/pod %v/killed %q", hang, pod, killed), func(t *testing.T) {
					t.Parallel()
					againWithoutStore(t, hang, pod, killed)
				})
			}
		}
	}
}

func againWithoutStore(t *testing.T, hang, pod bool, killed string) {
	w := newBehind(t)
	cfg := w.cfg
	w.cfg = func(c *Config) { cfg(c); c.StoreTimeout = time.Hour }
	a := w.start()
	req := w.request(1)
	if pod {
		req = podRequest(req, "ns", "web-0")
	}
	first := w.add(a, req)
	settle(t, a)
	if hang {
		w.ipam.set(nil, true)
	} else {
		w.away(true)
	}
	running, stop := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); a.Run(running) }()
	w.del(a, req)
	await.True(w.t, "the wire is cut", func() bool { r, _ := a.ledger.get(req.ID); return r.State.detached() })
	next := req
	if pod { // the pod's next container
		next.ID.ContainerID = "next"
		next.Netns = w.request(2).Netns
	}
	second, err := a.Add(await.Context(t), next)
	if err != nil {
		t.Fatalf("add without the datastore: %v", err)
	}
	if second.Addresses[0].Addr == first.Addresses[0].Addr {
		t.Errorf("%s is given again, and nobody knows whether it is another's by now", first.Addresses[0].Addr)
	}
	if err := a.Del(await.Context(t), delOf(next)); err != nil {
		t.Fatalf("del without the datastore: %v", err)
	}
	stop()
	<-ended
	// A third life, in which the daemon may be killed.
	if killed != "" {
		killAt(a, killed)
		dies(t, func() {
			if _, err := a.Add(await.Context(t), next); err != nil {
				t.Errorf("add: %v", err)
			}
			if flushes(killed) {
				w.away(false)
				a.flusher.all(t.Context(), now)
			}
		})
	}
	w.ipam.forgetClaims() // what IPAM itself knew of claims goes with the daemon
	b := w.start()
	w.run(b)
	third, err := b.Add(await.Context(t), next)
	if err != nil {
		t.Fatalf("add after the daemon was killed: %v", err)
	}
	w.away(false)
	await.True(w.t, "told", func() bool {
		r, _ := b.ledger.get(next.ID)
		return r.State == attachedStored && !r.Reused && w.endpoints() == 1 && len(w.ipam.claimed()) == 0 && len(w.ipam.handles()) == 1
	})
	diff(t, "handles", []string{handle(next.ID)}, w.ipam.handles())
	if got := w.ipam.has(handle(next.ID)); !slices.Equal(got, []netip.Addr{third.Addresses[0].Addr}) {
		t.Errorf("the handle has %v, the container %s", got, third.Addresses[0].Addr)
	}
	w.check(b, next)
	w.del(b, next)
	await.Until(w.t, "clean", w.clean)
}

// forgetClaims forgets claims, as a daemon that ends does.
func (f *fakeIPAM) forgetClaims() {
	f.mu.Lock()
	defer f.mu.Unlock()
	clear(f.claims)
}

// has returns the addresses that the datastore shows as a handle's.
func (f *fakeIPAM) has(handle string) []netip.Addr {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []netip.Addr
	for _, a := range f.held[handle] {
		out = append(out, a)
	}
	return out
}

// TestRepairKeepsAddress: an attachment that is made whole keeps its address,
// also one that IPAM does not find in this host's blocks, and without the
// datastore.
func TestRepairKeepsAddress(t *testing.T) {
	t.Parallel()
	for _, away := range []bool{false, true} {
		t.Run(fmt.Sprintf("away %v", away), func(t *testing.T) {
			t.Parallel()
			w := newBehind(t)
			a := w.start()
			req := w.request(1)
			first := w.add(a, req)
			settle(t, a)
			if err := w.wire.Detach(t.Context(), first.Device, req.ID); err != nil {
				t.Fatal(err)
			}
			// The address is borrowed: the reserve does not see that the handle has one.
			w.ipam.mu.Lock()
			w.ipam.more[first.Addresses[0].Addr] = handle(req.ID)
			delete(w.ipam.held, handle(req.ID))
			w.ipam.mu.Unlock()
			w.away(away)
			again, err := a.Add(await.Context(t), req)
			if err != nil {
				t.Fatal(err)
			}
			diff(t, "addresses", first.Addresses, again.Addresses)
			w.check(a, req)
			w.away(false)
			settle(t, a)
			if w.endpoints() != 1 {
				t.Errorf("%d endpoints", w.endpoints())
			}
			w.del(a, req)
			settle(t, a)
			w.expectClean()
			if len(w.sink.wanted()) > 0 {
				t.Errorf("left: %v", w.sink.wanted())
			}
		})
	}
}

// TestDelIsDurable: when DEL answers, the disk says that the attachment goes; the
// kernel need not have heard of it. The daemon that comes after a loss of power
// gives the attachment no route and finishes.
func TestDelIsDurable(t *testing.T) {
	t.Parallel()
	w := newBehind(t)
	a := w.start()
	req := w.request(1)
	w.add(a, req)
	settle(t, a)
	w.sink.mu.Lock()
	w.sink.fail = errors.New("the kernel does not answer")
	w.sink.mu.Unlock()
	before := w.journal.Flushes()
	w.del(a, req)
	if w.journal.Flushes() == before {
		t.Error("DEL did not wait for the disk")
	}
	disk, err := os.ReadFile(filepath.Join(w.dir, "journal"))
	if err != nil {
		t.Fatal(err)
	}
	// The power is lost here: this is what the disk has.
	if err := os.WriteFile(filepath.Join(w.dir, "journal"), disk, 0o600); err != nil {
		t.Fatal(err)
	}
	b := w.start()
	for _, want := range w.sink.wanted() {
		if strings.HasPrefix(want, "route") {
			t.Errorf("after the restart there is still %s", want)
		}
	}
	w.sink.mu.Lock()
	w.sink.fail = nil
	w.sink.mu.Unlock()
	w.run(b)
	await.Until(w.t, "clean", w.clean)
}

// What the handle of a container has of an earlier container goes back also when two
// lives with given addresses follow, and when such a life ends untold.
func TestStaleThroughGivenLives(t *testing.T) {
	t.Parallel()
	for _, lives := range []int{1, 2} {
		for _, last := range []string{"told", "ended"} {
			t.Run(fmt.Sprint(lives, " lives, the last ", last), func(t *testing.T) {
				t.Parallel()
				w := newBehind(t)
				a := w.start()
				req := w.numbered(1)
				w.add(a, req)
				settle(t, a)
				w.del(a, req)
				w.away(true)
				given := req
				given.Given = []netip.Addr{netip.MustParseAddr("10.9.0.5")}
				for n := range lives {
					if n > 0 {
						w.del(a, given)
					}
					w.add(a, given)
				}
				if last == "ended" {
					w.del(a, given)
				}
				w.away(false)
				settle(t, a)
				if got := w.ipam.handles(); len(got) > 0 {
					t.Errorf("held: %v", got)
				}
				if last == "told" {
					w.del(a, given)
					settle(t, a)
				}
				w.expectClean()
			})
		}
	}
}
