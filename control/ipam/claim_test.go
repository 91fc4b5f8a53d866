package ipam

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

// TestFreedInUse: an address that lives here is given to nobody else, workload or tunnel,
// though somebody deleted its block; its own handle gets it again.
func TestFreedInUse(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("pool", "10.0.0.0/30", blockSize(30)))
	h := w.host("a", nil)
	lives := netip.MustParseAddr(mustAssign(t, h, v4("net.pod1"))[0])
	h.Claim("net.pod1", lives)
	remove(t, w.st, store.BlockKey(netip.MustParsePrefix("10.0.0.0/30")))
	catchUp(t, h, w.st)

	if _, err := h.AssignAddr(await.Context(t), lives, v4("net.other")); !errors.Is(err, ErrTaken) {
		t.Errorf("another asks for %s: %v, want %v", lives, err, ErrTaken)
	}
	for _, handle := range []string{"net.pod2", "vxlan-tunnel-addr-a", "net.pod4"} {
		if got := mustAssign(t, h, v4(handle)); got[0] == lives.String() {
			t.Errorf("%s was given to %s", lives, handle)
		}
	}
	if got, err := h.Assign(await.Context(t), v4("net.pod3")); !errors.Is(err, ErrExhausted) {
		t.Errorf("one more: %v, %v, want %v", got, err, ErrExhausted)
	}
	again := v4("net.pod1")
	again.Again = true
	if _, err := h.AssignAddr(await.Context(t), lives, again); err != nil {
		t.Errorf("its own handle: %v", err)
	}
	h.Unclaim("net.pod1")
	if _, err := h.ReleaseHandle(await.Context(t), "net.pod1"); err != nil {
		t.Fatal(err)
	}
	mustDiff(t, "given when it is free", []string{lives.String()}, mustAssign(t, h, v4("net.pod3")))
}
