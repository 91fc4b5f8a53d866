package main

import (
	"errors"
	"path/filepath"
	"testing"

	"github.com/routerd/routerd/control/config"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

// TestDrained: a drained host gives no address to new workloads and says why; those that
// it has can end.
func TestDrained(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	r := h.start()
	r.ready()
	if _, err := r.attach("before"); err != nil {
		t.Fatal(err)
	}
	s := h.store(filepath.Join(h.runDir(), config.OperatorSocketName))
	drain := func(to store.Drain) {
		t.Helper()
		_, err := store.Modify(await.Context(t), s, store.Key{Kind: store.KindNode, Name: "node1"}, func(cur store.Object) (any, error) {
			n := store.Clone(cur.Value).(*store.Node)
			if n.Annotations == nil {
				n.Annotations = map[string]string{}
			}
			n.Annotations[store.AnnotationDrain] = string(to)
			if to == "" {
				delete(n.Annotations, store.AnnotationDrain)
			}
			return n, nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	drain(store.DrainShift)
	await.Until(t, "ADD is refused", func() error {
		_, err := r.attach("during")
		if err == nil {
			return errors.Join(errors.New("it is not"), r.detach("during"))
		}
		return mentions(err.Error(), "drained", "routerctl node undrain")
	})
	if err := r.detach("before"); err != nil {
		t.Errorf("DEL on a drained host: %v", err)
	}
	drain("")
	await.Until(t, "ADD is served again", func() error {
		_, err := r.attach("after")
		return err
	})
}
