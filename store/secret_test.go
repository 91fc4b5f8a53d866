package store_test

import (
	"bytes"
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/memory"
)

// Hosts that ask at once all get one key, and another name has another.
func TestSharedSecret(t *testing.T) {
	t.Parallel()
	s := memory.New()
	defer s.Close()
	var wg sync.WaitGroup
	keys := make([][]byte, 8)
	for i := range keys {
		wg.Go(func() {
			k, err := store.SharedSecret(t.Context(), s, "one")
			if err != nil {
				t.Error(err)
			}
			keys[i] = k
		})
	}
	wg.Wait()
	for _, k := range keys {
		if len(k) != 32 || !bytes.Equal(k, keys[0]) {
			t.Errorf("keys differ: %x, %x", k, keys[0])
		}
	}
	other, err := store.SharedSecret(t.Context(), s, "other")
	if err != nil || bytes.Equal(other, keys[0]) {
		t.Errorf("another name: %x, %v", other, err)
	}
	if _, err := store.Create(t.Context(), s, &store.Secret{Key: []byte("short")}); err == nil {
		t.Error("a secret was made as a resource")
	}
	if _, err := store.Modify(t.Context(), s, store.SecretKey("short"), func(store.Object) (any, error) {
		return &store.Secret{Key: []byte("short")}, nil
	}); err != nil {
		t.Fatal(err)
	}
	if _, err := store.SharedSecret(t.Context(), s, "short"); err == nil || !strings.Contains(err.Error(), "/secrets/short") {
		t.Errorf("a short key: %v; want where it is", err)
	}
	if errors.Is(err, store.ErrNotFound) {
		t.Error(err)
	}
}
