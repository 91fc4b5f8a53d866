package journal

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/control/atomicfile"
)

// fataler is what helpers need of *testing.T and *rapid.T.
type fataler interface {
	Helper()
	Fatal(args ...any)
	Errorf(format string, args ...any)
}

func reopen(t fataler, path string) *Journal {
	t.Helper()
	j, err := Open(path, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return j
}

func put(t fataler, j *Journal, key string, value any) {
	t.Helper()
	if err := j.Put(key, value); err != nil {
		t.Fatal(err)
	}
}

// holds compares what the journal at path holds, read anew.
func holds(t fataler, path string, want map[string]string) {
	t.Helper()
	j := reopen(t, path)
	got := map[string]string{}
	for k, v := range j.Entries() {
		got[k] = string(v)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("entries (-want +got):\n%s", diff)
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestPutDeleteReopen(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "j")
	j := reopen(t, path)
	put(t, j, "a", 1)
	put(t, j, "b", "two\nlines")
	put(t, j, "a", 3)
	put(t, j, "c", nil)
	for _, k := range []string{"c", "never there"} {
		if err := j.Delete(k); err != nil {
			t.Fatal(err)
		}
	}
	// Without Close: the process was killed.
	holds(t, path, map[string]string{"a": "3", "b": `"two\nlines"`})
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, error %v", info.Mode(), err)
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	if err := j.Put("a", 1); err != ErrClosed { //nolint:errorlint // returned as it is
		t.Errorf("put after close: %v", err)
	}
}

// Wherever a crash cuts the file, what was complete before is there, and the
// journal can be used on.
func TestTornAtEveryByte(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "j")
	j := reopen(t, path)
	put(t, j, "a", "first")
	put(t, j, "b", "second")
	whole := must(os.ReadFile(path))
	end := bytes.IndexByte(whole, '\n') + 1
	for cut := range whole {
		if err := os.WriteFile(path, whole[:cut], 0o600); err != nil {
			t.Fatal(err)
		}
		want := map[string]string{}
		if cut >= end-1 { // the end of a line may be what is missing
			want["a"] = `"first"`
		}
		if cut >= len(whole)-1 {
			want["b"] = `"second"`
		}
		holds(t, path, want)
		j := reopen(t, path)
		put(t, j, "c", cut)
		want["c"] = fmt.Sprint(cut)
		holds(t, path, want)
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(path + BadSuffix); err == nil {
			t.Fatalf("cut at %d: a torn tail is taken for damage", cut)
		}
	}
}

func must(b []byte, err error) []byte {
	if err != nil {
		panic(err)
	}
	return b
}

// A flipped bit anywhere costs the line that it is in, and nothing else, be it the
// last one. It is told, and every copy is kept.
func TestDamage(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "j")
	j := reopen(t, path)
	for _, k := range []string{"a", "b", "c"} {
		put(t, j, k, k)
	}
	whole := must(os.ReadFile(path))
	third := len(whole) / 3
	for at := range whole {
		if at%third == third-1 {
			continue // the end of a line: two become one
		}
		want := map[string]string{"a": `"a"`, "b": `"b"`, "c": `"c"`}
		delete(want, []string{"a", "b", "c"}[at/third])
		damaged := bytes.Clone(whole)
		damaged[at] ^= 1
		if err := os.WriteFile(path, damaged, 0o600); err != nil {
			t.Fatal(err)
		}
		var log bytes.Buffer
		j, err := Open(path, slog.New(slog.NewTextHandler(&log, nil)))
		if err != nil {
			t.Fatal(err)
		}
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(log.String(), "damaged lines") {
			t.Errorf("byte %d: log says %q", at, log.String())
		}
		d := j.Damage()
		if d.Lines != 1 || !strings.HasPrefix(d.Copy, path+BadSuffix) {
			t.Errorf("byte %d: damage %+v", at, d)
		}
		if got := must(os.ReadFile(d.Copy)); !bytes.Equal(got, damaged) {
			t.Errorf("byte %d: the copy differs", at)
		}
		if copies := must2(filepath.Glob(path + BadSuffix + "*")); len(copies) != at-at/third+1 {
			t.Errorf("byte %d: copies %v", at, copies)
		}
		holds(t, path, want)
		if j = reopen(t, path); j.Damage() != (Damage{}) {
			t.Errorf("byte %d: damage is found again: %+v", at, j.Damage())
		}
	}
}

// A full disk has no room for a copy of a damaged journal: it opens all the same,
// keeps what is damaged in it, and leaves no part of a copy.
func TestDamageOnAFullDisk(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprint("size=", 5*os.Getpagesize())); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	path := filepath.Join(dir, "j")
	j := reopen(t, path)
	put(t, j, "a", 1)
	put(t, j, "b", strings.Repeat("x", 5*os.Getpagesize()/2))
	put(t, j, "c", 3)
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	b := must(os.ReadFile(path))
	b[0] ^= 1
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		j := reopen(t, path)
		if got := j.Damage(); got != (Damage{Lines: 1}) {
			t.Errorf("damage %+v", got)
		}
		put(t, j, "d", i)
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
		if names := must2(filepath.Glob(filepath.Join(dir, "*"))); len(names) != 1 {
			t.Errorf("files: %v", names)
		}
	}
	// With room again, the copy is made.
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_REMOUNT, fmt.Sprint("size=", 50*os.Getpagesize())); err != nil {
		t.Fatal(err)
	}
	j = reopen(t, path)
	if got := j.Damage(); got != (Damage{Lines: 1, Copy: path + BadSuffix}) {
		t.Errorf("damage %+v", got)
	}
	if _, ok := j.Entries()["a"]; ok || len(j.Entries()) != 3 || string(j.Entries()["d"]) != "2" {
		t.Errorf("entries: %v", j.Entries())
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
}

// A new file whose name may not outlast the loss of power is the journal all the
// same: what is appended goes there, and the next flush makes sure.
func TestNameNotFlushed(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "j")
	j := reopen(t, path)
	put(t, j, "a", 1)
	fail := errors.New("input/output error")
	j.syncDir = func(string) error { return fail }
	j.suspect = true // the next flush writes it anew
	if err := j.Sync(); !errors.Is(err, fail) {
		t.Fatalf("sync: %v", err)
	}
	put(t, j, "b", 2)
	if err := j.Sync(); !errors.Is(err, fail) {
		t.Fatalf("sync while the name is not sure: %v", err)
	}
	put(t, j, "c", 3)
	j.syncDir = atomicfile.SyncDir
	if err := j.Sync(); err != nil {
		t.Fatal(err)
	}
	put(t, j, "d", 4)
	holds(t, path, map[string]string{"a": "1", "b": "2", "c": "3", "d": "4"})
}

// Damage that joins two lines costs both, and one in the end of the last line
// costs nothing.
func TestDamagedEnd(t *testing.T) {
	t.Parallel()
	for i, want := range []map[string]string{{"c": `"c"`}, {"a": `"a"`}, {"a": `"a"`, "b": `"b"`, "c": `"c"`}} {
		path := filepath.Join(t.TempDir(), "j")
		j := reopen(t, path)
		for _, k := range []string{"a", "b", "c"} {
			put(t, j, k, k)
		}
		b := must(os.ReadFile(path))
		b[(i+1)*len(b)/3-1] ^= 1
		if i == 2 {
			b = b[:len(b)-1]
		}
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		holds(t, path, want)
	}
}

// The file does not grow with history.
func TestCompaction(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "j")
	j := reopen(t, path)
	value := strings.Repeat("x", 1000)
	for i := range 5000 {
		put(t, j, fmt.Sprint(i%10), value)
		if info, err := os.Stat(path); err != nil || info.Size() > 2*slack {
			t.Fatalf("after %d changes: %d bytes, error %v", i, info.Size(), err)
		}
	}
	want := map[string]string{}
	for i := range 10 {
		want[fmt.Sprint(i)] = `"` + value + `"`
	}
	holds(t, path, want)
}

// Many who wait for the disk share its flushes, and each finds its change on
// the disk.
func TestSyncIsShared(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "j")
	j := reopen(t, path)
	before := j.Flushes()
	const n = 500
	start := make(chan struct{})
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			<-start
			if err := j.Put(fmt.Sprint(i), i); err != nil {
				t.Error(err)
			}
			if err := j.Sync(); err != nil {
				t.Error(err)
			}
		})
	}
	close(start)
	wg.Wait()
	if got := j.Flushes() - before; got > n/2 {
		t.Errorf("%d flushes for %d callers", got, n)
	}
	if j.synced != j.appended {
		t.Errorf("%d of %d changes are on the disk", j.synced, j.appended)
	}
	if got := len(j.Entries()); got != n {
		t.Errorf("%d entries, want %d", got, n)
	}
}

// After a flush that failed, the next one does not trust the old file.
func TestFailedFlush(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "j")
	j := reopen(t, path)
	put(t, j, "a", 1)
	j.file = must2(os.Open("/proc/self/status")) // cannot be flushed
	if err := j.Sync(); err == nil {
		t.Fatal("a flush of a file that has none succeeded")
	}
	if err := j.Sync(); err != nil {
		t.Fatal(err)
	}
	put(t, j, "b", 2)
	if err := j.Sync(); err != nil {
		t.Fatal(err)
	}
	holds(t, path, map[string]string{"a": "1", "b": "2"})
}

func must2[T any](f T, err error) T {
	if err != nil {
		panic(err)
	}
	return f
}

// A full disk: the change is refused, what was there stays, and when there is
// room again all goes on.
func TestWriteRefused(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "j")
	j := reopen(t, path)
	put(t, j, "a", 1)
	good := j.file
	j.file = must2(os.OpenFile("/dev/full", os.O_RDWR, 0))
	if err := j.Put("b", 2); err == nil {
		t.Fatal("a write to a full disk succeeded")
	}
	_ = j.file.Close()
	j.file = good
	// What a short write may have left.
	if _, err := good.WriteAt([]byte("half a li"), j.size); err != nil {
		t.Fatal(err)
	}
	put(t, j, "c", 3)
	holds(t, path, map[string]string{"a": "1", "c": "3"})
	if _, err := os.Stat(path + BadSuffix); err == nil {
		t.Error("the file was damaged")
	}
}

// Changes that are made together are there all or not at all, wherever the file
// ends, and a disk that refuses some has none of them.
func TestApply(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "j")
	j := reopen(t, path)
	put(t, j, "a", 1)
	put(t, j, "b", 1)
	before := len(must(os.ReadFile(path)))
	if err := j.Apply(Change{Key: "a", Value: 2}, Change{Key: "b"}, Change{Key: "never"}, Change{Key: "c", Value: strings.Repeat("x", 2*buffer)}); err != nil {
		t.Fatal(err)
	}
	old, now := map[string]string{"a": "1", "b": "1"}, map[string]string{"a": "2", "c": `"` + strings.Repeat("x", 2*buffer) + `"`}
	holds(t, path, now)
	whole := must(os.ReadFile(path))
	for _, cut := range []int{before, before + 5, before + 30, len(whole) - 2*buffer, len(whole) - 2} {
		if err := os.WriteFile(path, whole[:cut], 0o600); err != nil {
			t.Fatal(err)
		}
		holds(t, path, old)
		if _, err := os.Stat(path + BadSuffix); err == nil {
			t.Fatalf("cut at %d: a torn tail is taken for damage", cut)
		}
	}
	j = reopen(t, path)
	good := j.file
	j.file = must2(os.OpenFile("/dev/full", os.O_RDWR, 0))
	if err := j.Apply(Change{Key: "a", Value: 3}, Change{Key: "b", Value: 3}); err == nil {
		t.Fatal("a write to a full disk succeeded")
	}
	_ = j.file.Close()
	j.file = good
	put(t, j, "d", 4)
	old["d"] = "4"
	holds(t, path, old)
}

// TestLean: what only the file has is read from it, and noticed where it was damaged
// since; a new file is not made of it then.
func TestLean(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "j")
	j := must2(OpenLean(path, slog.New(slog.DiscardHandler)))
	put(t, j, "a", "first")
	put(t, j, "b", "second")
	if j.Entries() != nil {
		t.Error("the values are in memory")
	}
	if err := j.Forget(); err != nil { // what has no name can still be read
		t.Fatal(err)
	}
	put(t, j, "c", "third")
	gets := func(want ...string) {
		t.Helper()
		var got []string
		for _, k := range j.Keys() {
			got = append(got, k+string(must(j.Get(k))))
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("holds (-want +got):\n%s", diff)
		}
	}
	gets(`a"first"`, `b"second"`, `c"third"`)
	if err := j.Sync(); err != nil {
		t.Fatal(err)
	}
	gets(`a"first"`, `b"second"`, `c"third"`)
	if v, err := j.Get("d"); v != nil || err != nil {
		t.Errorf("of a key that is not there: %s, %v", v, err)
	}
	whole := must(os.ReadFile(path))
	at := bytes.Index(whole, []byte("second"))
	if _, err := j.file.WriteAt([]byte("x"), int64(at)); err != nil {
		t.Fatal(err)
	}
	if v, err := j.Get("b"); err == nil {
		t.Errorf("reads %s of a damaged line", v)
	}
	if err := j.rewrite(); err == nil {
		t.Error("a new file without the damaged line")
	}
	put(t, j, "b", "again")
	if err := j.rewrite(); err != nil {
		t.Fatal(err)
	}
	gets(`a"first"`, `b"again"`, `c"third"`)
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := j.Get("a"); !errors.Is(err, ErrClosed) {
		t.Errorf("of a closed journal: %v", err)
	}
}

// A journal that was forgotten is not on the disk until it is there whole.
func TestForget(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "j")
	j := reopen(t, path)
	put(t, j, "a", 1)
	for range 2 { // the second time there is no file
		if err := j.Forget(); err != nil {
			t.Fatal(err)
		}
	}
	put(t, j, "b", 2)
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the file is there: %v", err)
	}
	if err := j.Sync(); err != nil {
		t.Fatal(err)
	}
	holds(t, path, map[string]string{"a": "1", "b": "2"})
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	if err := j.Forget(); !errors.Is(err, ErrClosed) {
		t.Errorf("of a closed journal: %v", err)
	}
}

// Raw JSON is kept as it is where it is one line, and what is none is refused. What is
// written is what encoding/json reads.
func TestRaw(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "j")
	j := reopen(t, path)
	want := map[string]string{"k<\"\n": "1"}
	put(t, j, "k<\"\n", 1)
	for raw, kept := range map[string]string{
		`{"a":"<b>","c": 1}`: `{"a":"<b>","c": 1}`, "{\n\"a\":\n1}": `{"a":1}`, " 7\n": "7", "\t8": "8", `"\n"`: `"\n"`, "null": "null", "\"\xff\u2028\"": "\"\xff\u2028\"",
	} {
		put(t, j, "raw "+kept, json.RawMessage(raw))
		want["raw "+kept] = kept
	}
	delete(want, "raw \"\xff\u2028\"")
	want["raw \"\ufffd\u2028\""] = "\"\xff\u2028\"" // a key is text
	for _, bad := range []string{"", "{", "1 2", `{"a":1}}`, "\"\n\""} {
		if err := j.Put("bad", json.RawMessage(bad)); err == nil {
			t.Errorf("%q is kept", bad)
		}
	}
	holds(t, path, want)
	if err := j.rewrite(); err != nil {
		t.Fatal(err)
	}
	holds(t, path, want)
	for text := range bytes.SplitSeq(bytes.TrimSpace(must(os.ReadFile(path))), []byte("\n")) {
		if _, ok := parse(text); !ok {
			t.Errorf("line %s", text)
		}
	}
}

// What a start remembers of the policy of a large cluster.
func BenchmarkRaw(b *testing.B) {
	raw := json.RawMessage(`{"kind":"Node","metadata":{"name":"n"},"spec":{"x":"` + strings.Repeat("x", 1200) + `"}}`)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		j := must2(OpenLean(filepath.Join(b.TempDir(), fmt.Sprint(i)), slog.New(slog.DiscardHandler)))
		var changes []Change
		for n := range 5000 {
			changes = append(changes, Change{Key: fmt.Sprint("/calico/resources/v3/projectcalico.org/nodes/", n), Value: raw})
		}
		if err := j.Apply(changes...); err != nil {
			b.Fatal(err)
		}
		if err := j.Close(); err != nil {
			b.Fatal(err)
		}
	}
}

// The journal is a map, whatever is done to it and however often it is opened
// anew.
func TestModel(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		dir, err := os.MkdirTemp("", "journal") //nolint:usetesting // rapid runs many cases in one test
		if err != nil {
			rt.Fatal(err)
		}
		defer os.RemoveAll(dir)
		path := filepath.Join(dir, "j")
		reopen := map[bool]func() *Journal{
			false: func() *Journal { return reopen(rt, path) },
			true:  func() *Journal { return must2(OpenLean(path, slog.New(slog.DiscardHandler))) },
		}[rapid.Bool().Draw(rt, "lean")]
		j := reopen()
		want := map[string]string{}
		key := rapid.SampledFrom([]string{"a", "b", "c"})
		rt.Repeat(map[string]func(*rapid.T){
			"put": func(rt *rapid.T) {
				k, v := key.Draw(rt, "key"), rapid.String().Draw(rt, "value")
				put(rt, j, k, v)
				b, err := json.Marshal(v)
				if err != nil {
					rt.Fatal(err)
				}
				want[k] = string(b)
			},
			"delete": func(rt *rapid.T) {
				k := key.Draw(rt, "key")
				if err := j.Delete(k); err != nil {
					rt.Fatal(err)
				}
				delete(want, k)
			},
			"apply": func(rt *rapid.T) {
				k, gone, v := key.Draw(rt, "key"), key.Draw(rt, "deleted"), rapid.Int().Draw(rt, "value")
				if err := j.Apply(Change{Key: k, Value: v}, Change{Key: gone}); err != nil {
					rt.Fatal(err)
				}
				want[k] = fmt.Sprint(v)
				delete(want, gone)
			},
			"rewrite": func(rt *rapid.T) {
				j.mu.Lock()
				defer j.mu.Unlock()
				if err := j.rewrite(); err != nil {
					rt.Fatal(err)
				}
			},
			"reopen": func(rt *rapid.T) { j = reopen() },
			"": func(rt *rapid.T) {
				holds(rt, path, maps.Clone(want))
				for _, k := range j.Keys() {
					if v := must(j.Get(k)); string(v) != want[k] {
						rt.Errorf("%s is %s, want %s", k, v, want[k])
					}
				}
			},
		})
	})
}

// tinyDisk mounts a file system of some pages, and fills it when asked to.
func tinyDisk(t *testing.T, pages int) (dir string, fill, empty func()) {
	t.Helper()
	dir = t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprint("size=", pages*os.Getpagesize())); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	others := filepath.Join(dir, "others")
	fill = func() {
		t.Helper()
		f := must2(os.Create(others))
		page := make([]byte, os.Getpagesize())
		for {
			if _, err := f.Write(page); errors.Is(err, unix.ENOSPC) {
				break
			} else if err != nil {
				t.Fatal(err)
			}
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	empty = func() {
		t.Helper()
		if err := os.Remove(others); err != nil {
			t.Fatal(err)
		}
	}
	return dir, fill, empty
}

// On a full disk nothing begins, what there is can end, and both are said.
func TestRoom(t *testing.T) {
	t.Parallel()
	dir, fill, empty := tinyDisk(t, 200)
	path := filepath.Join(dir, "j")
	j := reopen(t, path)
	want := map[string]string{}
	for i := range 20 {
		key := fmt.Sprint("workload", i)
		put(t, j, key, "runs")
		want[key] = `"ends"`
	}
	if err := errors.Join(j.Room(), j.Err()); err != nil {
		t.Fatal(err)
	}
	fill()
	large := strings.Repeat("x", spare/20)
	for key := range want {
		put(t, j, key, "ends")
	}
	if err := errors.Join(j.Room(), j.Err()); err != nil {
		t.Fatalf("what was kept is more than enough: %v", err)
	}
	for n := 0; j.Room() == nil; n++ {
		if n == 100 {
			t.Fatal("there is always room")
		}
		put(t, j, "large", large)
		want["large"] = fmt.Sprintf("%q", large)
	}
	if err := j.Err(); err == nil || !strings.Contains(err.Error(), "the disk is full") {
		t.Errorf("Err: %v", err)
	}
	for n := range 15 { // three quarters of what is kept
		put(t, j, "large", large[n:])
		want["large"] = fmt.Sprintf("%q", large[n:])
	}
	if err := j.Sync(); err != nil {
		t.Fatal(err)
	}
	empty()
	if err := errors.Join(j.Room(), j.Err()); err != nil {
		t.Errorf("there is room again: %v", err)
	}
	holds(t, path, want)
}

// A line cut short on a full disk, by the loss of power that followed, is no reason
// not to start; nor is one that lacks its end alone, which is kept.
func TestTornOnAFullDisk(t *testing.T) {
	t.Parallel()
	for name, tail := range map[string]string{"half a line": "0123", "no end": ""} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir, fill, empty := tinyDisk(t, 100)
			path := filepath.Join(dir, "j")
			j := reopen(t, path)
			put(t, j, "a", 1)
			put(t, j, "b", 2)
			if err := j.Close(); err != nil {
				t.Fatal(err)
			}
			b := must(os.ReadFile(path))
			if tail == "" {
				b = b[:len(b)-1]
			}
			if err := os.WriteFile(path, append(b, tail...), 0o600); err != nil {
				t.Fatal(err)
			}
			fill()
			for n := range 3 {
				j := reopen(t, path)
				if got := j.Damage(); got != (Damage{}) {
					t.Errorf("damage %+v", got)
				}
				if err := j.Room(); err == nil {
					t.Error("there is room on a full disk")
				}
				put(t, j, "b", 3+n)
				if err := j.Close(); err != nil {
					t.Fatal(err)
				}
				holds(t, path, map[string]string{"a": "1", "b": fmt.Sprint(3 + n)})
			}
			empty()
			j = reopen(t, path)
			if err := j.Err(); err != nil {
				t.Error(err)
			}
			if err := j.Close(); err != nil {
				t.Fatal(err)
			}
		})
	}
}
