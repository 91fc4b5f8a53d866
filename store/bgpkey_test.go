package store_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/memory"
)

// A cluster that begins has a key of BGP, and one that is there gets none by itself.
func TestBootstrapMakesBGPKey(t *testing.T) {
	t.Parallel()
	for _, calico := range []bool{false, true} {
		s := memory.New()
		defer s.Close()
		if err := store.Bootstrap(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		if calico { // which knows of no keys
			if err := store.DropBGPKey(t.Context(), s); err != nil {
				t.Fatal(err)
			}
			if err := store.Bootstrap(t.Context(), s); err != nil {
				t.Fatal(err)
			}
		}
		k, err := store.BGPKey(t.Context(), s)
		if err != nil || (k == nil) != calico || k != nil && (len(k.Key) != 32 || k.Open) {
			t.Errorf("a cluster of Calico's: %t; key %v, %v", calico, k, err)
		}
	}
}

// A key is replaced in two steps; each that is done again changes nothing.
func TestRotateBGPKey(t *testing.T) {
	t.Parallel()
	s := memory.New()
	defer s.Close()
	rotate := func() *store.Secret {
		t.Helper()
		k, err := store.RotateBGPKey(t.Context(), s)
		if err != nil {
			t.Fatal(err)
		}
		again, err := store.RotateBGPKey(t.Context(), s)
		if diff := cmp.Diff(k, again); err != nil || diff != "" {
			t.Errorf("again: %v\n%s", err, diff)
		}
		return k
	}
	finish := func(k *store.Secret) *store.Secret {
		t.Helper()
		for range 2 {
			if _, err := store.FinishBGPKey(t.Context(), s, k.KeyIDs()[0]); err != nil {
				t.Fatal(err)
			}
		}
		k, err := store.BGPKey(t.Context(), s)
		if err != nil || k.Open || len(k.Former) > 0 {
			t.Errorf("finished: %d bytes before it, open %t, %v", len(k.Former), k.Open, err)
		}
		return k
	}
	first := rotate()
	if len(first.KeyIDs()) != 1 || !first.Open {
		t.Errorf("the first: %q, open %t", first.KeyIDs(), first.Open)
	}
	finish(first)
	second := rotate()
	if ids := second.KeyIDs(); len(ids) != 2 || ids[1] != first.KeyIDs()[0] || ids[0] == ids[1] || second.Open {
		t.Errorf("the second: %q after %q, open %t", ids, first.KeyIDs(), second.Open)
	}
	if diff := cmp.Diff(second.KeyIDs()[:1], finish(second).KeyIDs()); diff != "" {
		t.Error(diff)
	}
	if _, err := store.FinishBGPKey(t.Context(), s, "another"); err == nil || !strings.Contains(err.Error(), "somebody else changed it") {
		t.Errorf("a key that is not there any more: %v", err)
	}

	var nodes []store.Object
	for i, ids := range [][]string{nil, {"x"}, second.KeyIDs()} {
		n := &store.Node{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("node", i)}}
		store.SetBGPKeys(n, ids)
		nodes = append(nodes, store.Object{Value: n})
	}
	former, none := store.WithoutBGPKey(nodes, second.KeyIDs()[0])
	if diff := cmp.Diff([][]string{{"node1"}, {"node0"}}, [][]string{former, none}); diff != "" {
		t.Error(diff)
	}
}
