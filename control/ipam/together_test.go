package ipam

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

// countingStore counts what is asked of a store.
type countingStore struct {
	store.Store
	txns, reads atomic.Int64
}

func (s *countingStore) Txn(ctx context.Context, ops ...store.Op) ([]store.Object, error) {
	s.txns.Add(1)
	return s.Store.Txn(ctx, ops...)
}

func (s *countingStore) Get(ctx context.Context, key store.Key) (store.Object, error) {
	s.reads.Add(1)
	return s.Store.Get(ctx, key)
}

func dualParts(handle string) []Part {
	var parts []Part
	for _, f := range dataplane.Families() {
		parts = append(parts, Part{Request: Request{Family: f, Handle: handle, Idempotent: true}})
	}
	return parts
}

// Both addresses of a workload cost what one does: one transaction, no read.
// The IPv6 pool, a /48, is not walked through.
func TestTogetherIsOneTransaction(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("four", "10.0.0.0/16"), newPool("six", "fd00:10::/48"))
	put(t, w.st, newNode("a", nil))
	st := &countingStore{Store: w.st}
	h := start(t, st, "a", newClock().time)
	t.Cleanup(h.stop)
	settle(t, h, "pools and node", func(s *state) bool { return len(s.pools) == 2 && s.registered })
	for i := range 3 { // the first takes blocks too
		before := st.txns.Load()
		got, err := h.AssignTogether(await.Context(t), dualParts(fmt.Sprint("net.", i))...)
		if err != nil {
			t.Fatal(err)
		}
		if len(got) != 2 || !got[0][0].Addr.Is4() || !got[1][0].Addr.Is6() || got[1][0].Block.Bits() != 122 {
			t.Errorf("got %v", got)
		}
		if n := st.txns.Load() - before; n != 1 {
			t.Errorf("workload %d: %d transactions, want 1", i, n)
		}
	}
	if n := st.reads.Load(); n != 0 {
		t.Errorf("%d reads, want none", n)
	}
	again, err := h.AssignTogether(await.Context(t), dualParts("net.0")...)
	if err != nil || len(again) != 2 || len(again[0]) != 1 || len(again[1]) != 1 {
		t.Errorf("a repeat: %v, %v", again, err)
	}
	released, err := h.ReleaseHandle(await.Context(t), "net.0")
	if err != nil || len(released) != 2 {
		t.Errorf("released %v, %v; want both", released, err)
	}
}

// When one family is exhausted, nothing of the other is given.
func TestTogetherOrNothing(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ four, six, says string }{
		{"10.0.0.0/24", "fd00::/128", "IPv6"},
		{"10.0.0.0/32", "fd00::/64", "IPv4"},
	} {
		six, four := netip.MustParsePrefix(tt.six), netip.MustParsePrefix(tt.four)
		w := newWorld(t,
			newPool("four", tt.four, blockSize(max(26, four.Bits()))), newPool("six", tt.six, blockSize(max(122, six.Bits()))))
		h := w.host("a", nil)
		if _, err := h.AssignTogether(await.Context(t), dualParts("net.1")...); err != nil {
			t.Fatal(err)
		}
		before := audit(t, w.st)
		_, err := h.AssignTogether(await.Context(t), dualParts("net.2")...)
		if !errors.Is(err, ErrExhausted) || !strings.Contains(err.Error(), "1 of 1 "+tt.says) {
			t.Errorf("%s: got %v, want ErrExhausted", tt.says, err)
		}
		mustDiff(t, tt.says+": assigned", before, audit(t, w.st))
		if _, err := w.st.Get(await.Context(t), store.HandleKey("net.2")); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("%s: the handle: %v", tt.says, err)
		}
	}
}

// An address that the caller names goes with one of any other family.
func TestTogetherWithNamedAddress(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("four", "10.0.0.0/24"), newPool("six", "fd00::/64"))
	h := w.host("a", nil)
	parts := dualParts("net.1")
	parts[1].Addr = netip.MustParseAddr("fd00::77")
	got, err := h.AssignTogether(await.Context(t), parts...)
	if err != nil || got[1][0].Addr != parts[1].Addr {
		t.Fatalf("got %v, %v", got, err)
	}
	before := audit(t, w.st)
	other := dualParts("net.2")
	other[1].Addr = parts[1].Addr
	if _, err := h.AssignTogether(await.Context(t), other...); !errors.Is(err, ErrTaken) {
		t.Errorf("an address of another: %v, want ErrTaken", err)
	}
	mustDiff(t, "assigned", before, audit(t, w.st))
}

func TestTogetherRefuses(t *testing.T) {
	t.Parallel()
	h := newWorld(t, newPool("four", "10.0.0.0/24")).host("a", nil)
	four := Part{Request: Request{Family: dataplane.IPv4, Handle: "net.1"}}
	for name, parts := range map[string][]Part{
		"one family twice": {four, four},
		"two handles":      {four, {Request: Request{Family: dataplane.IPv6, Handle: "net.2"}}},
		"no handle":        {{Request: Request{Family: dataplane.IPv4}}},
	} {
		if _, err := h.AssignTogether(await.Context(t), parts...); !errors.Is(err, ErrInvalidRequest) {
			t.Errorf("%s: %v, want ErrInvalidRequest", name, err)
		}
	}
	if got, err := h.AssignTogether(await.Context(t)); err != nil || len(got) != 0 {
		t.Errorf("nothing asked for: %v, %v", got, err)
	}
}

// A caller that gives up while both are being given gets neither.
func TestTogetherGivesUp(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("four", "10.0.0.0/24"), newPool("six", "fd00::/64"))
	put(t, w.st, newNode("a", nil))
	ctx, cancel := context.WithCancel(await.Context(t))
	st := &cancellingStore{Store: w.st, cancel: cancel, gaveUp: make(chan struct{})}
	h := start(t, st, "a", newClock().time)
	t.Cleanup(h.stop)
	settle(t, h, "pools and node", func(s *state) bool { return len(s.pools) == 2 && s.registered })
	if _, err := h.AssignTogether(ctx, dualParts("net.1")...); !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v, want that the caller gave up", err)
	}
	close(st.gaveUp)
	// What was given goes back before any later call is served.
	if _, err := h.AssignTogether(await.Context(t), dualParts("net.2")...); err != nil {
		t.Fatal(err)
	}
	for addr, handle := range audit(t, w.st) {
		if handle != "net.2" {
			t.Errorf("%s is held by %s", addr, handle)
		}
	}
}

// cancellingStore ends a context when it has carried out a transaction, and
// answers when whom that concerns has given up.
type cancellingStore struct {
	store.Store
	cancel context.CancelFunc
	gaveUp chan struct{}
}

func (s *cancellingStore) Txn(ctx context.Context, ops ...store.Op) ([]store.Object, error) {
	out, err := s.Store.Txn(ctx, ops...)
	s.cancel()
	<-s.gaveUp
	return out, err
}

func TestIPv6Tunnels(t *testing.T) {
	t.Parallel()
	vxlan := func(s *v3.IPPoolSpec) { s.VXLANMode = v3.VXLANModeAlways }
	ipip := func(s *v3.IPPoolSpec) { s.IPIPMode = v3.IPIPModeCrossSubnet }
	w := newWorld(t,
		newPool("vx", "fd00:1::/64", vxlan), newPool("ip", "fd00:2::/64", ipip), newPool("four", "10.0.0.0/24", vxlan))
	h := w.host("a", nil)
	for kind, want := range map[TunnelKind]string{VXLANv6Tunnel: "fd00:1::/64", IPIPv6Tunnel: "fd00:2::/64", VXLANTunnel: "10.0.0.0/24"} {
		got, _, err := h.EnsureTunnel(await.Context(t), kind, false)
		if err != nil || !netip.MustParsePrefix(want).Contains(got.Addr) {
			t.Errorf("%s: got %v, %v; want one of %s", kind, got, err, want)
		}
		if !strings.HasSuffix(got.Handle, "-tunnel-addr-a") {
			t.Errorf("%s: handle %s", kind, got.Handle)
		}
	}
}
