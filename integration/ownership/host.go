package ownership

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/routerd/routerd/control/cluster/clustertest"
	"github.com/routerd/routerd/control/collect"
	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// grace is how long a leak must have been one: long beside a look, short beside
// the test.
const grace = 500 * time.Millisecond

// disk is a journal that outlives its host's processes.
type disk struct {
	mu     sync.Mutex
	values map[string]json.RawMessage
}

func (d *disk) Put(key string, value any) error {
	b, err := json.Marshal(value)
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.values[key] = b
	return nil
}

func (d *disk) Delete(key string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.values, key)
	return nil
}

func (d *disk) Entries() map[string]json.RawMessage {
	d.mu.Lock()
	defer d.mu.Unlock()
	return maps.Clone(d.values)
}

// host is a host with its workloads, as control/attach keeps them: what it has
// promised is on its disk before anybody uses it. One goroutine plays it; what
// it knows others read under its lock.
type host struct {
	t    *testing.T
	name string
	hist *history
	open func() (store.Store, error)
	disk *disk
	life time.Duration // the shortest; the longest is eight times that

	mu      sync.Mutex
	held    map[string]netip.Addr // by handle
	told    map[string]bool       // the datastore knows of the handle, or may
	pending map[string]bool       // asked for, the outcome unknown; or on their way back
	doubt   map[string]netip.Addr // held before its Node was deleted
	doubted bool                  // its Node was deleted, or its journal damaged, since it booted
	forgot  int                   // what its disk lost of what was pending: leaks
	fenced  int                   // what was another's when it came back

	store store.Store
	ipam  *ipam.Allocator
	leaks *collect.Collector
	stop  func()
	next  int
}

// boot starts the host's process.
func (h *host) boot(life context.Context) (err error) {
	if h.store, err = h.open(); err != nil {
		return fmt.Errorf("%s: boot: %w", h.name, err)
	}
	a := ipam.New(ipam.Config{
		Store: h.store, Node: h.name, Log: slog.New(slog.DiscardHandler), Timeout: 2 * time.Second,
		Reserve: ipam.ReserveConfig{Min: 4, Max: 16, Journal: h.disk},
	})
	for handle, addr := range h.held {
		a.Claim(handle, addr)
		h.told[handle] = true
	}
	for handle, addr := range h.doubt {
		a.Claim(handle, addr)
	}
	if h.doubted {
		if err := a.Doubt(); err != nil {
			return fmt.Errorf("%s: boot: %w", h.name, err)
		}
		h.doubted = false
	}
	h.ipam = a
	h.leaks = collect.New(collect.Config{Store: h.store, Node: h.name, Host: h, Grace: grace})
	ctx, cancel := context.WithCancel(life)
	steps, followed := clustertest.Follow(ctx, h.name, h.store, ipam.Kinds()...)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := a.Run(ctx, steps); err != nil {
			h.t.Errorf("%s: run: %v", h.name, err)
		}
	}()
	h.stop = func() {
		cancel()
		<-done
		<-followed
		_ = h.store.Close()
	}
	return nil
}

// Allocations, Uses, Wired and Release are what the host's collector asks.
func (h *host) Allocations() []ipam.Allocation { return h.ipam.Allocations() }

func (h *host) Uses(handle string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	_, held := h.held[handle]
	_, doubted := h.doubt[handle]
	return held || doubted || h.pending[handle] || handle == store.ReserveHandle(h.name)
}

func (h *host) Wired(context.Context) (map[string]bool, error) { return nil, nil }

func (h *host) Release(ctx context.Context, used func(ipam.Claim) bool, claims ...ipam.Claim) ([]netip.Addr, error) {
	return h.ipam.ReleaseUnless(ctx, used, claims...)
}

// unknown reports whether an error leaves open what became of an operation, or
// says that it did not take place for a reason that passes.
func unknown(err error) bool {
	return errors.Is(err, store.ErrUnavailable) || errors.Is(err, ipam.ErrStopped) || errors.Is(err, ipam.ErrNotReady) ||
		errors.Is(err, ipam.ErrNodeMissing) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

func (h *host) note(change func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	change()
}

func request(handle string) ipam.Request {
	return ipam.Request{
		Family: dataplane.IPv4, Handle: handle, Idempotent: true,
		Attributes: map[string]string{ipam.AttrTimestamp: time.Now().UTC().Round(0).String()},
	}
}

// add gives a workload an address, out of the reserve or the long way.
func (h *host) add(ctx context.Context) {
	h.next++
	h.addAs(ctx, fmt.Sprintf("net.%s-%d", h.name, h.next))
}

func (h *host) addAs(ctx context.Context, handle string) {
	h.note(func() { h.pending[handle] = true })
	if got, ok := h.ipam.Take(ipam.Part{Request: request(handle)}); ok {
		h.gain(ctx, handle, got[0].Addr)
		return
	}
	h.note(func() { h.told[handle] = true })
	got, err := h.ipam.Assign(ctx, request(handle))
	switch {
	case err == nil:
		h.gain(ctx, handle, got[0].Addr)
	case errors.Is(err, ipam.ErrExhausted):
		h.note(func() { delete(h.pending, handle); delete(h.told, handle) })
	case !unknown(err):
		h.t.Errorf("%s: assign: %v", h.name, err)
	}
}

// gain answers a workload. A process that is killed first has not answered.
func (h *host) gain(ctx context.Context, handle string, addr netip.Addr) {
	if ctx.Err() != nil {
		return
	}
	h.note(func() { h.held[handle] = addr; delete(h.pending, handle) })
	h.hist.note(addr, handle, true)
}

// del ends a workload.
func (h *host) del(ctx context.Context, handle string) {
	addr := h.held[handle]
	h.hist.note(addr, handle, false)
	h.note(func() { delete(h.held, handle); h.pending[handle] = true })
	h.giveBack(ctx, handle)
}

// giveBack releases what a handle may hold. If that is not known to have taken
// place it is tried again, or the disk loses it.
func (h *host) giveBack(ctx context.Context, handle string) {
	if h.told[handle] {
		if _, err := h.ipam.ReleaseHandleHere(ctx, handle); err != nil {
			switch {
			case !unknown(err):
				h.t.Errorf("%s: release: %v", h.name, err)
			case rand.N(3) == 0:
				h.note(func() { delete(h.pending, handle); delete(h.told, handle); h.forgot++; h.doubted = true })
			}
			return
		}
	}
	h.note(func() { delete(h.pending, handle); delete(h.told, handle) })
	h.ipam.Unclaim(handle)
}

// again takes up what was left open: it is asked for once more, or given back.
func (h *host) again(ctx context.Context) {
	for _, handle := range slices.Sorted(maps.Keys(h.pending)) {
		h.giveBack(ctx, handle)
	}
}

// confirm tells the datastore of all that it may not know.
func (h *host) confirm(ctx context.Context) {
	var cs []ipam.Confirmation
	for handle, addr := range h.held {
		cs = append(cs, ipam.Confirmation{Addr: addr, Handle: handle, Attributes: request(handle).Attributes})
	}
	h.note(func() {
		for _, c := range cs {
			h.told[c.Handle] = true
		}
	})
	for i, err := range h.ipam.Confirm(ctx, cs...) {
		if err != nil && !unknown(err) {
			h.t.Errorf("%s: confirm %s of %s: %v", h.name, cs[i].Addr, cs[i].Handle, err)
		}
	}
}

// declareDead is what the deletion of the host's Node says: nobody owns by it
// what it held.
func (h *host) declareDead() {
	h.note(func() {
		for handle, addr := range h.held {
			h.hist.note(addr, handle, false)
			h.doubt[handle] = addr
		}
		clear(h.held)
		h.doubted = true
	})
}

// verify is what a host does before it serves when it comes back after that: it
// takes its addresses again, and gives up those that are others' by now.
func (h *host) verify(ctx context.Context) error {
	for _, handle := range slices.Sorted(maps.Keys(h.doubt)) {
		addr := h.doubt[handle]
		_, err := h.ipam.AssignAddr(ctx, addr, request(handle))
		switch {
		case err == nil && ctx.Err() == nil:
			h.hist.note(addr, handle, true)
			h.note(func() { h.held[handle], h.told[handle] = addr, true; delete(h.doubt, handle) })
		case errors.Is(err, ipam.ErrTaken):
			h.note(func() { delete(h.doubt, handle); h.fenced++ })
			h.ipam.Unclaim(handle)
		case err != nil:
			return err
		}
	}
	return nil
}

// play makes random moves until ctx ends.
func (h *host) play(ctx context.Context) {
	for ctx.Err() == nil {
		step, cancel := context.WithTimeout(ctx, 3*time.Second)
		if err := h.verify(step); err != nil {
			if !unknown(err) {
				h.t.Errorf("%s: verify: %v", h.name, err)
			}
			cancel()
			continue
		}
		switch n := rand.N(20); {
		case n < 9:
			h.add(step)
		case n < 13:
			if handles := slices.Sorted(maps.Keys(h.held)); len(handles) > 0 {
				h.del(step, handles[rand.N(len(handles))])
			}
		case n < 16:
			h.confirm(step)
		case n < 18:
			h.again(step)
		default:
			_, _ = h.leaks.LookHost(step) // what it could not do the next one does
		}
		cancel()
	}
}

// live plays lives that are cut short at random until ctx ends.
func (h *host) live(ctx context.Context) {
	for ctx.Err() == nil {
		life, cancel := context.WithTimeout(ctx, h.life+rand.N(7*h.life))
		err := h.boot(life)
		if err == nil {
			h.play(life)
			h.stop()
		}
		cancel()
		if err != nil {
			h.t.Error(err)
			return
		}
	}
}
