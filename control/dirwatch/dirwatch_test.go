package dirwatch

import (
	"context"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/await"
)

// TestWatch: what comes later is seen too, whatever of the path was there.
func TestWatch(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	deep := filepath.Join(dir, "r", "s")
	file := filepath.Join(deep, "k")
	ctx, cancel := context.WithCancel(context.Background())
	lists, seen := make(chan []string), make(chan bool, 100)
	var wg sync.WaitGroup
	wg.Go(func() {
		w := Watch{Open: Open, Lists: lists, Refused: func(err error) { t.Error(err) }, Changed: func() {
			_, err := os.Stat(file)
			seen <- err == nil
		}}
		w.Run(ctx)
	})
	t.Cleanup(func() { cancel(); wg.Wait() })
	expect := func(there bool) {
		t.Helper()
		for deadline := time.After(await.Patience); ; {
			select {
			case got := <-seen:
				if got == there {
					return
				}
			case <-deadline:
				t.Fatalf("no change is reported: file there: %v", there)
			}
		}
	}
	lists <- []string{deep}
	expect(false)
	if err := os.MkdirAll(deep, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	expect(true)
	if err := os.RemoveAll(filepath.Join(dir, "r")); err != nil {
		t.Fatal(err)
	}
	expect(false)
}
