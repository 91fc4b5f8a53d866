package embedded_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/embedded"
	"github.com/routerd/routerd/store/etcd"
)

// save takes a snapshot of the store of c, which no server uses yet, after handles
// 0 to n-1 were written.
func save(t *testing.T, c embedded.Config, n int) string {
	t.Helper()
	server := start(t, c)
	defer server.Close()
	s := dial(t, etcd.Config{Endpoints: []string{server.Endpoint()}})
	for i := range n {
		if _, err := s.Txn(await.Context(t), handle(i)); err != nil {
			t.Fatal(err)
		}
	}
	file := filepath.Join(t.TempDir(), "backup.db")
	f, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	size, err := s.Snapshot(await.Context(t), f)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := f.Stat(); err != nil || info.Size() != size {
		t.Errorf("%d bytes were reported, the file has %v, %v", size, info, err)
	}
	return file
}

// event returns the next event of a key.
func event(t *testing.T, batches <-chan store.Batch, key store.Key) store.Event {
	t.Helper()
	for b := range batches { // ends with the watch's context
		for _, e := range b.Events {
			if e.Key == key {
				return e
			}
		}
	}
	t.Fatalf("no event of %s", key)
	return store.Event{}
}

// TestRestore: what was saved is there again, on a host that has gone on and on one
// that has nothing; who followed the store meanwhile finds out.
func TestRestore(t *testing.T) {
	t.Parallel()
	c := config(t)
	file := save(t, c, 3)

	// The store goes on, and somebody follows it.
	server := start(t, c)
	s := dial(t, etcd.Config{Endpoints: []string{server.Endpoint()}})
	batches := s.Watch(await.Context(t), store.KindIPAMHandle)
	if _, err := s.Txn(await.Context(t), handle(3)); err != nil {
		t.Fatal(err)
	}
	event(t, batches, store.HandleKey("h3"))
	if _, err := embedded.Restore(t.Context(), c, file, time.Now()); err == nil || !strings.Contains(err.Error(), "is in use by process") {
		t.Errorf("under a running server: %v", err)
	}
	server.Close()

	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	r, err := embedded.Restore(t.Context(), c, file, at)
	if err != nil {
		t.Fatal(err)
	}
	if r.Keys != 3 || r.Previous != c.Dir+".before-20260102T030405Z" {
		t.Errorf("restored %+v", r)
	}
	if _, err := os.Stat(filepath.Join(r.Previous, "member", "snap", "db")); err != nil {
		t.Errorf("what was there before is gone: %v", err)
	}
	start(t, c)
	if e := event(t, batches, store.HandleKey("h3")); !e.Deleted() {
		t.Errorf("the handle of after the snapshot is %+v for who follows", e)
	}
	objects, rev, err := s.List(await.Context(t), store.KindIPAMHandle, "")
	if err != nil || len(objects) != 3 {
		t.Errorf("%d handles, %v; want 3", len(objects), err)
	}
	if rev < 1_000_000_000 {
		t.Errorf("revision %d is one that the store had before", rev)
	}

	empty := config(t)
	if r, err = embedded.Restore(t.Context(), empty, file, at); err != nil || r.Previous != "" {
		t.Fatalf("into an empty directory: %+v, %v", r, err)
	}
	other := dial(t, etcd.Config{Endpoints: []string{start(t, empty).Endpoint()}})
	if _, err := other.Get(await.Context(t), store.HandleKey("h2")); err != nil {
		t.Error(err)
	}
}

// TestRestoreRefuses: what is no whole snapshot changes nothing.
func TestRestoreRefuses(t *testing.T) {
	t.Parallel()
	c := config(t)
	whole, err := os.ReadFile(save(t, c, 2))
	if err != nil {
		t.Fatal(err)
	}
	changed := append([]byte(nil), whole...)
	changed[len(changed)/2] ^= 1
	for name, content := range map[string][]byte{
		"empty":        {},
		"another file": []byte("apiVersion: v1\n"),
		"cut off":      whole[:len(whole)-4096],
		"no checksum":  whole[:len(whole)-32],
		"changed":      changed,
	} {
		file := filepath.Join(t.TempDir(), "file")
		if err := os.WriteFile(file, content, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := embedded.Restore(t.Context(), c, file, time.Now()); err == nil || !strings.Contains(err.Error(), "its checksum is wrong") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := embedded.Restore(t.Context(), c, "/nowhere", time.Now()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
	left, err := os.ReadDir(filepath.Dir(c.Dir))
	if err != nil || fmt.Sprint(left) != fmt.Sprint([]string{"d data/", "d run/"}) {
		t.Errorf("left %v, %v", left, err)
	}
	s := dial(t, etcd.Config{Endpoints: []string{start(t, c).Endpoint()}})
	if objects, _, err := s.List(await.Context(t), store.KindIPAMHandle, ""); err != nil || len(objects) != 2 {
		t.Errorf("%d handles, %v; want 2", len(objects), err)
	}
}
