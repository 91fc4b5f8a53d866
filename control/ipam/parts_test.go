package ipam

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/memory"
)

// TestCrashBetweenWrites lets a host die between any two writes of a transaction,
// on a datastore that writes one object at a time. What is left is sound: no block
// contradicts itself, each address has a handle that knows of it; and the host that
// starts anew can give and take back all.
func TestCrashBetweenWrites(t *testing.T) {
	t.Parallel()
	elsewhere := func(s *v3.IPPoolSpec) { s.NodeSelector = "rack == 'other'" }
	for name, tt := range map[string]struct {
		before []string // handles that have an address already
		do     func(t *testing.T, st *memory.Sequential, h *host) error
	}{
		"first address, with its block": {nil, func(t *testing.T, _ *memory.Sequential, h *host) error {
			_, err := h.Assign(await.Context(t), v4("new"))
			return err
		}},
		"another address": {[]string{"old"}, func(t *testing.T, _ *memory.Sequential, h *host) error {
			_, err := h.Assign(await.Context(t), v4("new"))
			return err
		}},
		"another address of one handle": {[]string{"old"}, func(t *testing.T, _ *memory.Sequential, h *host) error {
			_, err := h.Assign(await.Context(t), v4("old"))
			return err
		}},
		"release": {[]string{"old", "goes"}, func(t *testing.T, _ *memory.Sequential, h *host) error {
			_, err := h.ReleaseHandle(await.Context(t), "goes")
			return err
		}},
		"release from two blocks": {[]string{"goes", "a", "b", "c", "goes"}, func(t *testing.T, _ *memory.Sequential, h *host) error {
			_, err := h.ReleaseHandle(await.Context(t), "goes")
			return err
		}},
		"the block given up": {[]string{"goes"}, func(t *testing.T, st *memory.Sequential, h *host) error {
			if _, err := h.ReleaseHandle(await.Context(t), "goes"); err != nil {
				return err
			}
			put(t, st.Store, newPool("p", "10.0.0.0/24", blockSize(30), elsewhere)) // by an operator
			settle(t, h, "the pool", func(s *state) bool { return !s.pools["p"].nodes.Matches(s.labels) })
			_, err := h.Tidy(await.Context(t))
			return err
		}},
	} {
		for n := range 6 {
			t.Run(fmt.Sprintf("%s, after %d writes", name, n), func(t *testing.T) {
				t.Parallel()
				st, clock := memory.NewSequential(), newClock()
				t.Cleanup(func() { _ = st.Close() })
				put(t, st, newPool("p", "10.0.0.0/24", blockSize(30)), newNode("a", nil))
				h := start(t, st, "a", clock.time)
				for _, handle := range tt.before {
					mustAssign(t, h, v4(handle))
				}
				st.LetWrites(n)
				err := tt.do(t, st, h)
				if err != nil && !errors.Is(err, store.ErrUnavailable) {
					t.Errorf("it fails with %v", err)
				}
				h.stop()
				st.LetWrites(-1)

				sound(t, st)
				put(t, st, newPool("p", "10.0.0.0/24", blockSize(30)))
				again := start(t, st, "a", clock.time)
				defer again.stop()
				mustAssign(t, again, v4("after"))
				if _, err := again.Tidy(await.Context(t)); err != nil {
					t.Error(err)
				}
				sound(t, st)
				for _, handle := range append(tt.before, "new", "after") {
					if _, err := again.ReleaseHandle(await.Context(t), handle); err != nil {
						t.Errorf("release %s: %v", handle, err)
					}
				}
				if held := sound(t, st); len(held) > 0 {
					t.Errorf("leaked: %v", held)
				}
			})
		}
	}
}

// sound verifies what no crash may harm, and returns the handle of each assigned
// address: blocks are whole, an affinity is to a block that its node holds or that
// nobody else does, and a handle knows of each of its addresses. It may know of
// more.
func sound(t *testing.T, st store.Store) map[netip.Addr]string {
	t.Helper()
	records := atOneRevision(t, st)
	known := map[string]map[string]int{}
	for _, o := range records[store.KindIPAMHandle] {
		known[o.Key.Name] = o.Value.(*store.Handle).Block
	}
	owners, held, counts := map[string]string{}, map[netip.Addr]string{}, map[string]map[string]int{}
	for _, o := range records[store.KindIPAMBlock] {
		b, cidr := o.Value.(*store.Block), o.Key.CIDR()
		if err := checkBlock(b, cidr); err != nil {
			t.Errorf("block %s: %v\n%s", cidr, err, o.Raw)
		}
		owners[cidr.String()] = b.Holder()
		for i := range b.Allocations {
			if a := b.Attribute(i); a != nil && a.ReleasedAt == nil {
				held[addrAt(cidr, i)] = *a.HandleID
				if counts[*a.HandleID] == nil {
					counts[*a.HandleID] = map[string]int{}
				}
				counts[*a.HandleID][cidr.String()]++
			}
		}
	}
	for handle, blocks := range counts {
		for cidr, n := range blocks {
			if known[handle][cidr] < n {
				t.Errorf("handle %s has %d addresses of %s and knows of %d", handle, n, cidr, known[handle][cidr])
			}
		}
	}
	for _, o := range records[store.KindIPAMAffinity] {
		if owner := owners[o.Key.Name]; owner != "" && owner != o.Key.Namespace {
			t.Errorf("affinity of %s to %s, which %s holds", o.Key.Namespace, o.Key.Name, owner)
		}
	}
	return held
}
