package attach

import (
	"os"
	"path/filepath"
	"testing"
)

// TestMovedDatastore: what is attached is written again when the datastore is of another kind
// than it was, and only then; a start before that was done does it again.
func TestMovedDatastore(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.start()
	req := w.request(1)
	w.add(a, req)
	file := filepath.Join(a.mtus.dir, datastoreFile)
	says := func(want string) {
		t.Helper()
		b, err := os.ReadFile(file)
		if err != nil || string(b) != want+"\n" {
			t.Errorf("the file says %q, %v; want %q", b, err, want)
		}
	}
	says("etcd")
	if a = w.start(); a.reclaimer.forgotten {
		t.Error("a start with the same datastore writes everything again")
	}

	if err := os.WriteFile(file, []byte("kubernetes\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if a = w.start(); !a.reclaimer.forgotten {
			t.Error("a start with another datastore writes nothing")
		}
		says("kubernetes")
	}
	w.forget()
	if !a.reclaimer.all(t.Context()) {
		t.Fatal("not all was written")
	}
	w.check(a, req)
	says("etcd")
}
