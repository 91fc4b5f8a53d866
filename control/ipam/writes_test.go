package ipam

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"testing"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/memory"
)

// writeCounter counts what is written, by object.
type writeCounter struct {
	store.Store
	mu     sync.Mutex
	writes map[string]int
}

func (w *writeCounter) Txn(ctx context.Context, ops ...store.Op) ([]store.Object, error) {
	out, err := w.Store.Txn(ctx, ops...)
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, op := range ops {
		if op.Action != store.Check && err == nil {
			w.writes[op.Object.Key.String()]++
		}
	}
	return out, err
}

// take returns what was written since the last call.
func (w *writeCounter) take() map[string]int {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := maps.Clone(w.writes)
	clear(w.writes)
	return out
}

// TestReserveHandleIsABound: a datastore that writes one object at a time is not written the
// reserve's handle when workloads take of it, nor when it is filled again; that it is there is
// looked at, and what it says of its blocks holds.
func TestReserveHandleIsABound(t *testing.T) {
	t.Parallel()
	seq := memory.NewSequential()
	t.Cleanup(func() { _ = seq.Close() })
	st := &writeCounter{Store: seq, writes: map[string]int{}}
	put(t, st, newPool("four", "10.0.0.0/24", blockSize(26)), newNode("a", nil))
	h := reserving(t, st, "a", newClock().time, ReserveConfig{Min: 8, Max: 8})
	t.Cleanup(h.stop)
	filled(t, h, "four", 8)
	own := store.HandleKey(store.ReserveHandle("a")).String()
	st.take()
	const rounds = 20
	written := 0
	for round := range rounds {
		var cs []Confirmation
		for i := range 2 {
			handle := fmt.Sprintf("net.%d-%d", round, i)
			got := mustTake(t, h, part4(handle))
			cs = append(cs, Confirmation{Addr: got[0].Addr, Handle: handle})
		}
		for _, err := range h.Confirm(await.Context(t), cs...) {
			if err != nil {
				t.Fatal(err)
			}
		}
		if round == 0 { // six are ready, which are enough
			if got := st.take(); got[own] != 0 || len(got) != 3 {
				t.Errorf("two addresses were taken with %v, want two handles and a block written", got)
			}
		}
		for _, c := range cs {
			if _, err := h.ReleaseHandleHere(await.Context(t), c.Handle); err != nil {
				t.Fatal(err)
			}
		}
		filled(t, h, "four", 6)
		sound(t, st)
		written += st.take()[own]
	}
	if written > rounds/4 {
		t.Errorf("the reserve's handle was written %d times in %d rounds", written, rounds)
	}
}
