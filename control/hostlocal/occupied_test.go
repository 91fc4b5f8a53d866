package hostlocal

import (
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// asking is IPAM, which asks under its own lock whether addresses may be given.
type asking struct {
	o    *Occupied
	told [][]netip.Prefix
}

func (a *asking) SetOccupied(_ string, addrs []netip.Prefix) {
	_ = a.o.Err()
	a.told = append(a.told, addrs)
}

// TestOccupied: IPAM is told what host-local gave, and may ask meanwhile whether that is known:
// neither waits for the other.
func TestOccupied(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	o := NewOccupied(Store(dir), nil, slog.New(slog.DiscardHandler))
	i := &asking{o: o}
	o.ipam = i
	file := filepath.Join(dir, "cbr0", "10.244.1.2")
	if err := os.Mkdir(filepath.Dir(file), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte("container\neth0\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		o.Read()
	}()
	select {
	case <-done:
	case <-time.After(10 * time.Second):
		t.Fatal("it waits for itself")
	}
	if diff := cmp.Diff([][]netip.Prefix{{netip.MustParsePrefix("10.244.1.2/32")}}, i.told, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
		t.Errorf("told (-want +got):\n%s", diff)
	}
	if err := o.Err(); err != nil {
		t.Error(err)
	}

	o.store = Store(file) // no directory
	o.Read()
	if err := o.Err(); err == nil || len(i.told) != 1 {
		t.Errorf("what cannot be read: %v, told %v", err, i.told)
	}
}
