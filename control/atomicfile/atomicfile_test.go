package atomicfile

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// only fails the test unless the directory has that file alone.
func only(t *testing.T, path string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil {
		t.Fatal(err)
	}
	if len(entries) != 1 || entries[0].Name() != filepath.Base(path) {
		t.Errorf("left behind: %v", entries)
	}
}

func TestWrite(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "10-routerd.conflist")
	for _, tt := range []struct {
		content string
		mode    fs.FileMode
	}{{"one", 0o600}, {"", 0o644}, {"three, and longer", 0o755}} {
		if err := Write(path, []byte(tt.content), tt.mode); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(path)
		info, statErr := os.Stat(path)
		if err := errors.Join(err, statErr); err != nil {
			t.Fatal(err)
		}
		if string(got) != tt.content || info.Mode() != tt.mode {
			t.Errorf("%q with mode %v, want %q with %v", got, info.Mode(), tt.content, tt.mode)
		}
		only(t, path)
	}
}

// What is there stays when the new file cannot take its place.
func TestWriteRefused(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "state")
	if err := os.MkdirAll(filepath.Join(path, "full"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := Write(path, []byte("new"), 0o600); err == nil || !strings.HasPrefix(err.Error(), "write "+path+": ") {
		t.Errorf("a directory that is not empty was replaced: %v", err)
	}
	only(t, path)
	missing := filepath.Join(path, "none", "state")
	if err := Write(missing, nil, 0o600); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("in a directory that is not there: %v", err)
	}
}

// Writers and readers at once see whole files.
func TestWriteAtOnce(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "state")
	whole := func(i int) []byte { return bytes.Repeat([]byte{byte('a' + i)}, 1<<16) }
	if err := Write(path, whole(0), 0o600); err != nil {
		t.Fatal(err)
	}
	var writers sync.WaitGroup
	for i := range 4 {
		writers.Go(func() {
			for range 20 {
				if err := Write(path, whole(i), 0o600); err != nil {
					t.Error(err)
				}
			}
		})
	}
	done := make(chan struct{})
	go func() { writers.Wait(); close(done) }()
	for reads := 0; ; reads++ {
		got, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if len(got) != 1<<16 || !bytes.Equal(got, whole(int(got[0]-'a'))) {
			t.Fatalf("a part of a file: %d bytes", len(got))
		}
		select {
		case <-done:
			t.Logf("%d reads", reads)
			only(t, path)
			return
		default:
		}
	}
}

// TestLeftovers: what a write that died left is found, and nothing else.
func TestLeftovers(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "reach.json")
	for _, name := range []string{".reach.json.123.tmp", ".reach.json.tmp", ".other.json.5.tmp", "reach.json", "reach.json.9.tmp", ".reach.json.9a.tmp"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	list, err := Leftovers(path)
	if want := filepath.Join(dir, ".reach.json.123.tmp"); err != nil || len(list) != 1 || list[0] != want {
		t.Errorf("%v, %v; want %s", list, err, want)
	}
	if list, err := Leftovers(filepath.Join(dir, "none", "x")); err != nil || list != nil {
		t.Errorf("without the directory: %v, %v", list, err)
	}
}
