package node

import (
	"log/slog"
	"testing"
	"testing/synctest"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/memory"
)

// TestPublishKeys: which keys of BGP this host has is on its Node as soon as it is known, follows
// every change, also when somebody takes it away or deletes the Node, and goes when there is none.
func TestPublishKeys(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memory.New()
		defer s.Close()
		a := New(Config{Name: "node1", Store: s, Tunnels: &fakeTunnels{}, Log: slog.New(slog.DiscardHandler)})
		defer follow(t, a, s)()
		has := func(want string) {
			t.Helper()
			synctest.Wait()
			if got := get(t, s, "node1").Annotations[store.AnnotationBGPKeys]; got != want {
				t.Errorf("published %q, want %q", got, want)
			}
		}
		a.HandleUnderlay(manyLinks())
		has("")
		a.SetBGPKeys([]string{"a"})
		has("a")
		a.SetBGPKeys([]string{"b", "a"})
		has("b,a")
		if _, err := store.Modify(t.Context(), s, store.ResourceKey(store.KindNode, "node1"), func(cur store.Object) (any, error) {
			n := store.Clone(cur.Value).(*store.Node)
			store.SetBGPKeys(n, nil)
			return n, nil
		}); err != nil {
			t.Fatal(err)
		}
		has("b,a")
		if err := store.Delete(t.Context(), s, store.ResourceKey(store.KindNode, "node1"), 0); err != nil {
			t.Fatal(err)
		}
		has("b,a")
		a.SetBGPKeys(nil)
		has("")
	})
}
