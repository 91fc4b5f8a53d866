package ipam

import (
	"log/slog"
	"net/netip"
	"testing"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

// TestGiveBack: the reserve of a node that is taken away goes back, and nothing
// else; the journal gives none of it afterwards.
func TestGiveBack(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/16"), newPool("p6", "fd00::/64"), newNode("a", nil))
	d := &disk{}
	cfg := ReserveConfig{Min: 8, Max: 8, Journal: d}
	h := reserving(t, w.st, "a", w.clock.time, cfg)
	defer h.stop()
	filled(t, h, "p", 8)
	filled(t, h, "p6", 8)
	kept := mustTake(t, h, part4("net.1"))[0]
	confirm(t, h, kept)
	filled(t, h, "p", 7)
	h.stop()
	held, err := Held(await.Context(t), w.st, "a")
	if err != nil || held < 15 {
		t.Errorf("held %d, %v", held, err)
	}
	if err := ForgetReserve(d); err != nil {
		t.Fatal(err)
	}
	if n, err := GiveBack(await.Context(t), w.st, "a"); n != held || err != nil {
		t.Errorf("gave %d of %d back, %v", n, held, err)
	}
	mustDiff(t, "stored", map[netip.Addr]string{kept.Addr: "net.1"}, audit(t, w.st))
	if n, err := GiveBack(await.Context(t), w.st, "a"); n != 0 || err != nil {
		t.Errorf("gave %d back again, %v", n, err)
	}
	if n, err := Held(await.Context(t), w.st, "nobody"); n != 0 || err != nil {
		t.Errorf("nobody holds %d, %v", n, err)
	}
	a := New(Config{Store: w.st, Node: "a", Log: slog.New(slog.DiscardHandler), Reserve: cfg})
	a.apply(fromDisk(t, w.st))
	if got, ok := a.Take(part4("net.2")); ok {
		t.Errorf("took %v by the journal", got)
	}
	// A handle that names a block that is gone ends too.
	put(t, w.st, newNode("b", nil))
	putAt(t, w.st, store.HandleKey(store.ReserveHandle("b")), &store.Handle{Block: map[string]int{"10.9.0.0/26": 3}})
	if n, err := GiveBack(await.Context(t), w.st, "b"); n != 0 || err != nil {
		t.Errorf("gave %d back of a block that is gone, %v", n, err)
	}
	if n, err := Held(await.Context(t), w.st, "b"); n != 0 || err != nil {
		t.Errorf("b holds %d, %v", n, err)
	}
}
