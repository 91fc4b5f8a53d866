package store_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/memory"
)

// TestDamagedBGPKey: a key that is no key is said with the way out, and not shown.
func TestDamagedBGPKey(t *testing.T) {
	t.Parallel()
	s := memory.New()
	defer s.Close()
	s.PutRaw(store.SecretKey(store.BGPSecret).Path(), []byte(`{"key":"top secret"}`))
	_, reads := store.BGPKey(t.Context(), s)
	_, rotates := store.RotateBGPKey(t.Context(), s)
	for _, err := range []error{reads, rotates} {
		if !errors.Is(err, store.ErrDecode) || !strings.Contains(err.Error(), "routerctl bgp key off") || strings.Contains(err.Error(), "top") {
			t.Error(err)
		}
	}
	if err := store.DropBGPKey(t.Context(), s); err != nil {
		t.Error(err)
	}
	if k, err := store.RotateBGPKey(t.Context(), s); err != nil || len(k.KeyIDs()) != 1 {
		t.Error(k, err)
	}
}

// TestSetBGPKeys: what a node publishes of its keys is read as it was written.
func TestSetBGPKeys(t *testing.T) {
	t.Parallel()
	n := &store.Node{}
	for _, ids := range [][]string{{"x"}, nil, {"x", "y"}} {
		changed, again := store.SetBGPKeys(n, ids), store.SetBGPKeys(n, ids)
		if diff := cmp.Diff(ids, store.BGPKeysOf(n.Annotations[store.AnnotationBGPKeys])); !changed || again || diff != "" {
			t.Errorf("published %q: changed %t, again %t\n%s", ids, changed, again, diff)
		}
	}
}
