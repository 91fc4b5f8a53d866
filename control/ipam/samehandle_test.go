package ipam

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/routerd/routerd/integration/await"
)

// TestOneHandleOnTwoNodes: two hosts come to one handle, for containers of
// their own. Neither gets the other's address, nor gives it back.
func TestOneHandleOnTwoNodes(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("pool", "10.0.0.0/24", blockSize(30)))
	a, b := w.host("a", nil), w.host("b", nil)
	of := func(node string) Request {
		r := v4("net.pod1")
		r.Idempotent, r.Attributes = true, map[string]string{"node": node}
		return r
	}
	onA := mustAssign(t, a, of("a"))
	onB := mustAssign(t, b, of("b"))
	if onA[0] == onB[0] {
		t.Fatalf("both nodes have %s", onA[0])
	}
	mustDiff(t, "repeated on a", onA, mustAssign(t, a, of("a")))
	mustDiff(t, "repeated on b", onB, mustAssign(t, b, of("b")))
	if _, err := b.AssignAddr(await.Context(t), netip.MustParseAddr(onA[0]), of("b")); !errors.Is(err, ErrTaken) {
		t.Errorf("b asks for a's address: %v", err)
	}

	got, err := b.ReleaseHandleHere(await.Context(t), "net.pod1")
	if err != nil || len(got) != 1 || got[0].String() != onB[0] {
		t.Errorf("b released %v, %v; want %s", got, err, onB[0])
	}
	mustDiff(t, "a's address after b's release", 1, len(audit(t, w.st)))
	mustDiff(t, "repeated on a", onA, mustAssign(t, a, of("a")))
	if got, err := b.ReleaseHandleHere(await.Context(t), "net.pod1"); err != nil || len(got) != 0 {
		t.Errorf("b released again: %v, %v", got, err)
	}
	if got, err := a.ReleaseHandleHere(await.Context(t), "net.pod1"); err != nil || len(got) != 1 {
		t.Errorf("a released %v, %v", got, err)
	}
	mustDiff(t, "left", 0, len(audit(t, w.st)))
	if _, err := a.ReleaseHandleHere(await.Context(t), ""); !errors.Is(err, ErrInvalidRequest) {
		t.Errorf("without a handle: %v", err)
	}
}
