package ipam

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

// podHost starts a host that keeps to the pod CIDRs of its Node.
func (w *world) podHost(r ReserveConfig, name string, podCIDRs ...string) *host {
	w.t.Helper()
	n := newNode(name, nil)
	n.Status.PodCIDRs = podCIDRs
	put(w.t, w.st, n)
	h := run(w.t, New(Config{
		Store: w.st, Node: name, Log: slog.New(slog.DiscardHandler), Clock: w.clock.time, Timeout: 20 * time.Second, UsePodCIDR: true, Reserve: r,
	}), w.st)
	w.t.Cleanup(h.stop)
	return h
}

func assigned(t *testing.T, h *host, n int, handle string) []netip.Addr {
	t.Helper()
	r := v4(handle)
	r.Count = n
	var out []netip.Addr
	for _, s := range mustAssign(t, h, r) {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

// TestPodCIDR: addresses come out of the Node's own pod CIDR, all of it, and none of
// another Node's, whichever way they are asked for.
func TestPodCIDR(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("pods", "10.244.0.0/16", blockSize(26)))
	a, b := w.podHost(ReserveConfig{}, "a", "10.244.3.0/24"), w.podHost(ReserveConfig{}, "b", "10.244.4.0/25")
	for h, want := range map[*host]string{a: "10.244.3.0/24", b: "10.244.4.0/25"} {
		cidr := netip.MustParsePrefix(want)
		for _, got := range assigned(t, h, 1<<(32-cidr.Bits()), "net."+h.cfg.Node) {
			if !cidr.Contains(got) {
				t.Errorf("%s was given %s, which is not in %s", h.cfg.Node, got, cidr)
			}
		}
	}
	_, err := b.AssignAddr(await.Context(t), netip.MustParseAddr("10.244.3.9"), v4("net.named"))
	if !errors.Is(err, ErrOutsidePools) || !strings.Contains(err.Error(), "10.244.4.0/25") {
		t.Errorf("an address of another's: %v", err)
	}
	_, err = b.Assign(await.Context(t), v4("net.more"))
	if !errors.Is(err, ErrExhausted) || !strings.Contains(err.Error(), "the pod CIDRs [10.244.4.0/25]") {
		t.Errorf("more than there is: %v", err)
	}
}

// TestNoPodCIDR: a Node that was given none has no addresses, and hears why; one that
// gets its pod CIDR later has some.
func TestNoPodCIDR(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("pods", "10.244.0.0/16"))
	h := w.podHost(ReserveConfig{}, "a")
	if _, err := h.Assign(await.Context(t), v4("net.1")); !errors.Is(err, ErrExhausted) || !strings.Contains(err.Error(), "--allocate-node-cidrs") {
		t.Errorf("without a pod CIDR: %v", err)
	}
	n := newNode("a", nil)
	n.Status.PodCIDRs = []string{"fd00::/64", "nonsense", "10.244.7.0/24"}
	put(t, w.st, n)
	settle(t, h, "its pod CIDR", func(s *state) bool { return len(s.podCIDRs) == 2 })
	if got := assigned(t, h, 1, "net.1")[0]; !netip.MustParsePrefix("10.244.7.0/24").Contains(got) {
		t.Errorf("was given %s", got)
	}
}

// TestPodCIDRTurnedOn: a host that held blocks before goes on with what its workloads
// have, and takes nothing new out of them.
func TestPodCIDRTurnedOn(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("pods", "10.244.0.0/16"))
	before := w.host("a", nil)
	old := assigned(t, before, 1, "net.old")[0]
	before.stop()
	inside := netip.MustParsePrefix("10.244.9.0/24")
	if inside.Contains(old) {
		inside = netip.MustParsePrefix("10.244.10.0/24")
	}
	h := w.podHost(ReserveConfig{Min: 4, Max: 8, Journal: &disk{}}, "a", inside.String())
	filled(t, h, "pods", 4)
	for _, a := range mustTake(t, h, part4("net.ready")) {
		if !inside.Contains(a.Addr) {
			t.Errorf("the reserve gave %s outside of %s", a.Addr, inside)
		}
	}
	if got := assigned(t, h, 10, "net.new"); slices.ContainsFunc(got, func(a netip.Addr) bool { return !inside.Contains(a) }) {
		t.Errorf("was given %v outside of %s", got, inside)
	}
	r := v4("net.old")
	r.Idempotent = true
	if got := mustAssign(t, h, r); len(got) != 1 || got[0] != old.String() {
		t.Errorf("the address of before is %v, want %s", got, old)
	}
}

// TestPodCIDROfAnotherNow: a pod CIDR that was a deleted Node's is its successor's at
// once, but for what is still recorded as in use there.
func TestPodCIDROfAnotherNow(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("pods", "10.244.0.0/16", blockSize(26)))
	gone := w.podHost(ReserveConfig{}, "gone", "10.244.3.0/26")
	left := assigned(t, gone, 2, "net.left")
	gone.stop()
	remove(t, w.st, store.ResourceKey(store.KindNode, "gone"))
	h := w.podHost(ReserveConfig{}, "new", "10.244.3.0/26")
	got := assigned(t, h, 20, "net.1")
	for _, a := range got {
		if slices.Contains(left, a) || !netip.MustParsePrefix("10.244.3.0/26").Contains(a) {
			t.Errorf("was given %s", a)
		}
	}
}

// TestWithout: what is left of a range is disjoint, outside of the others, and with them
// all of it.
func TestWithout(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		p := netip.MustParsePrefix("10.0.0.0/24")
		var others []netip.Prefix
		for range rapid.IntRange(0, 5).Draw(t, "n") {
			bits := rapid.IntRange(22, 32).Draw(t, "bits")
			a := netip.AddrFrom4([4]byte{10, 0, byte(rapid.IntRange(0, 1).Draw(t, "third")), rapid.Byte().Draw(t, "last")})
			others = append(others, netip.PrefixFrom(a, bits).Masked())
		}
		rest := without(p, others)
		for i := range 256 {
			a := netip.AddrFrom4([4]byte{10, 0, 0, byte(i)})
			in := 0
			for _, r := range rest {
				if r.Contains(a) {
					in++
				}
			}
			want := 1
			if containsAddr(others, a) {
				want = 0
			}
			if in != want {
				t.Fatalf("%s without %v is %v: %s is in %d of them", p, others, rest, a, in)
			}
		}
	})
}

// TestRangesOfPool: of a pool a node may have what it shares with its pod CIDRs.
func TestRangesOfPool(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ pool, pods, want string }{
		{"10.244.0.0/16", "10.244.3.0/24", "[10.244.3.0/24]"},
		{"10.244.3.0/26", "10.244.3.0/24", "[10.244.3.0/26]"},
		{"10.9.0.0/16", "10.244.3.0/24", "[]"},
		{"fd00:1::/48", "fd00:1:0:7::/64", "[fd00:1:0:7::/64]"},
	} {
		s := newState("a")
		s.usePodCIDR, s.podCIDRs = true, []netip.Prefix{netip.MustParsePrefix(tt.pods)}
		if got := fmt.Sprint(s.rangesOf(poolFrom("p", &cluster.Pool{CIDR: netip.MustParsePrefix(tt.pool)}))); got != tt.want {
			t.Errorf("of %s with %s: %s, want %s", tt.pool, tt.pods, got, tt.want)
		}
	}
}

// TestOccupied: what others than IPAM gave on this host is given to nobody, nor held
// ready, until they let go of it; what a workload has is its own whoever says what.
func TestOccupied(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("pods", "10.244.0.0/16", blockSize(29)))
	h := w.podHost(ReserveConfig{Min: 2, Max: 4}, "a", "10.244.3.0/29")
	own := assigned(t, h, 1, "net.own")[0]
	var occupied []netip.Prefix
	free := netip.Addr{}
	for a := netip.MustParseAddr("10.244.3.0"); netip.MustParsePrefix("10.244.3.0/29").Contains(a); a = a.Next() {
		if a != own && !free.IsValid() {
			free = a
			continue
		}
		occupied = append(occupied, netip.PrefixFrom(a, 32))
	}
	h.SetOccupied("host-local", occupied)
	settle(t, h, "the reserve has what is free alone", func(s *state) bool {
		var ready []netip.Addr
		for _, p := range s.poolsByName() {
			for _, as := range s.ready(p, h.cfg.Clock()) {
				ready = append(ready, as.Addr)
			}
		}
		return slices.Equal(ready, []netip.Addr{free})
	})
	if got, ok := h.Take(part4("net.own2")); !ok || got[0].Addr != free {
		t.Errorf("was given %v, and %s alone is free", got, free)
	}
	if _, err := h.Assign(await.Context(t), v4("net.more")); !errors.Is(err, ErrExhausted) {
		t.Errorf("more than there is: %v", err)
	}
	again := v4("net.own")
	again.Idempotent = true
	if got, err := h.AssignAddr(await.Context(t), own, again); err != nil || got.Addr != own {
		t.Errorf("what it has already: %v, %v", got, err)
	}
	other := occupied[len(occupied)-1].Addr()
	if _, err := h.AssignAddr(await.Context(t), other, v4("net.named")); !errors.Is(err, ErrTaken) || !strings.Contains(err.Error(), "by host-local") {
		t.Errorf("one that is occupied: %v", err)
	}
	h.SetOccupied("host-local", nil)
	if got, err := h.AssignAddr(await.Context(t), other, v4("net.named")); err != nil || got.Addr != other {
		t.Errorf("one that was let go of: %v, %v", got, err)
	}
}
