package cluster

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/store"
)

// TestSavesUnreadable: what cannot be read keeps what was saved of it; where nothing
// was, it is saved as unreadable, and not left out.
func TestSavesUnreadable(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	bad := func(name string) store.Event {
		key := pool(name, 1).Key
		return store.Event{Key: key, Object: store.Object{Key: key, Raw: []byte("{")}, Err: store.ErrDecode}
	}
	c := onDisk(dir)
	c.hears(true, 5, pool("known", 1), pool("later", 1))
	c.hears(false, 6, bad("known"), bad("never"))
	saves(t, c)
	c.hears(false, 7, bad("later"))
	saves(t, c)
	want := map[string]string{"known": "10.1.0.0/16", "later": "10.1.0.0/16", "never": "unreadable"}
	same(t, "on disk", onFile(t, dir), want)
	c.hears(false, 8, gone(pool("later", 1)))
	c.hears(false, 9, bad("later"))
	saves(t, c)
	want["later"] = "unreadable"
	same(t, "on disk", onFile(t, dir), want)
}

// What is to be saved of several events of one object is what its readers go by.
func TestUnsavedThen(t *testing.T) {
	t.Parallel()
	good, better := store.Event{Object: store.Object{Value: 1}}, store.Event{Object: store.Object{Value: 2}}
	ended, bad := store.Event{}, store.Event{Err: store.ErrDecode}
	for name, c := range map[string]struct {
		events []store.Event
		want   unsaved
	}{
		"the last wins":                   {[]store.Event{good, better}, unsaved{event: better}},
		"unreadable leaves what was":      {[]store.Event{good, bad}, unsaved{event: good}},
		"unreadable at first":             {[]store.Event{bad, bad}, unsaved{event: bad}},
		"readable again":                  {[]store.Event{bad, good}, unsaved{event: good}},
		"unreadable and another":          {[]store.Event{good, ended, bad}, unsaved{bad, true}},
		"unreadable, another, still":      {[]store.Event{ended, bad, bad}, unsaved{bad, true}},
		"ended":                           {[]store.Event{good, ended}, unsaved{event: ended}},
		"another that can be read":        {[]store.Event{ended, bad, good}, unsaved{good, true}},
		"another that cannot any more be": {[]store.Event{ended, bad, good, bad}, unsaved{good, true}},
	} {
		got := unsaved{event: c.events[0]}
		for _, ev := range c.events[1:] {
			got = got.then(unsaved{event: ev})
		}
		if got.fresh != c.want.fresh || got.event.Object.Value != c.want.event.Object.Value || !errors.Is(got.event.Err, c.want.event.Err) {
			t.Errorf("%s: got %+v, want %+v", name, got, c.want)
		}
	}
}

// disk is a small one that can be full.
type disk struct {
	t   *testing.T
	dir string
}

func newDisk(t *testing.T) disk {
	t.Helper()
	d := disk{t, t.TempDir()}
	if err := unix.Mount("tmpfs", d.dir, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(d.dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	d.room(1 << 20)
	return d
}

// room sets how large it is.
func (d disk) room(size int) {
	d.t.Helper()
	if err := unix.Mount("tmpfs", d.dir, "tmpfs", unix.MS_REMOUNT, fmt.Sprint("size=", size)); err != nil {
		d.t.Fatal(err)
	}
}

// large is a pool that takes two pages.
func large(name string, n int) store.Event {
	ev := pool(name, n)
	ev.Object.Value.(*v3.IPPool).Annotations = map[string]string{"x": strings.Repeat("x", 2*os.Getpagesize())}
	return ev
}

// runs runs a copy until the function that is returned is called.
func (c *Cluster) runs(t fataler) (end func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = c.Run(ctx)
	}()
	return func() {
		cancel()
		<-done
		if err := c.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	}
}

// run keeps a copy on a disk until the function that is returned is called.
func (d disk) run() (c *Cluster, watch chan<- store.Batch, end func()) {
	batches := make(chan store.Batch)
	c = onDisk(d.dir)
	c.cfg.Store = watched{batches: batches}
	return c, batches, c.runs(d.t)
}

// watched is a datastore that says what a test has it say.
type watched struct {
	store.Store
	batches <-chan store.Batch
}

func (w watched) Watch(ctx context.Context, _ ...store.Kind) <-chan store.Batch {
	return relay(ctx, w.batches)
}

// relay is a watch that ends with ctx.
func relay(ctx context.Context, batches <-chan store.Batch) <-chan store.Batch {
	out := make(chan store.Batch)
	go func() {
		defer close(out)
		for {
			select {
			case b := <-batches:
				out <- b
			case <-ctx.Done():
				return
			}
		}
	}()
	return out
}

func wait(d time.Duration) {
	time.Sleep(d) //nolint:forbidigo // virtual time
	synctest.Wait()
}

// TestSavesLater: what a full disk refuses is not saved by halves: nothing counts of
// what is there, and the error says so, until it can be written whole. No change
// tries before its time, and a daemon that ends meanwhile leaves nothing to go by.
func TestSavesLater(t *testing.T) {
	t.Parallel()
	d := newDisk(t)
	synctest.Test(t, func(t *testing.T) {
		c, watch, end := d.run()
		watch <- store.Batch{Synced: true, Revision: 1, Events: []store.Event{large("a", 1)}}
		wait(time.Minute)
		same(t, "at first", onFile(t, d.dir), map[string]string{"a": "10.1.0.0/16"})
		d.room(4 * os.Getpagesize())
		watch <- store.Batch{Revision: 2, Events: []store.Event{large("b", 2)}}
		wait(2 * time.Second)
		if _, err := os.Stat(filepath.Join(d.dir, "cluster.journal")); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the file without the newest object: %v", err)
		}
		if err := c.SaveErr(); !errors.Is(err, unix.ENOSPC) {
			t.Errorf("the error is %v", err)
		}
		before := c.cache.file.Flushes()
		d.room(1 << 20)
		for i := range 100 {
			watch <- store.Batch{Revision: store.Revision(3 + i), Events: []store.Event{large("c", 3)}}
		}
		synctest.Wait()
		if n := c.cache.file.Flushes(); n != before {
			t.Errorf("%d writes at once", n-before)
		}
		c.cache.mu.Lock()
		n := len(c.cache.pending)
		c.cache.mu.Unlock()
		if n != 2 {
			t.Errorf("%d objects wait for the disk, want 2", n)
		}
		wait(saveRetry)
		want := map[string]string{"a": "10.1.0.0/16", "b": "10.2.0.0/16", "c": "10.3.0.0/16"}
		if same(t, "with room again", onFile(t, d.dir), want); c.SaveErr() != nil {
			t.Errorf("the error is %v", c.SaveErr())
		}
		d.room(8 * os.Getpagesize())
		watch <- store.Batch{Revision: 200, Events: []store.Event{large("d", 4)}}
		wait(2 * time.Second)
		if err := c.Save(); err == nil {
			t.Error("it says that all is saved")
		}
		d.room(1 << 20)
		c.cache.mu.Lock()
		c.cache.synced = false // the end has no room yet
		c.cache.mu.Unlock()
		end()
		same(t, "after the end", onFile(t, d.dir), nil)
	})
}

// TestSavesLittle: changes that follow each other closely wait for the disk once a
// second, a start that finds all as it was writes nothing, and nothing is written
// of what is not to be kept.
func TestSavesLittle(t *testing.T) {
	t.Parallel()
	d := disk{t, t.TempDir()}
	synctest.Test(t, func(t *testing.T) {
		c, watch, end := d.run()
		watch <- store.Batch{Synced: true, Revision: 1, Events: []store.Event{pool("a", 1)}}
		wait(time.Minute)
		before := c.cache.file.Flushes()
		r := v3.NewCalicoNodeStatus()
		r.Name = "default"
		for range 20 {
			watch <- store.Batch{Revision: 2, Events: []store.Event{eventOf(t, r, false)}}
			wait(100 * time.Millisecond)
		}
		if n := c.cache.file.Flushes() - before; n != 0 {
			t.Errorf("%d flushes for an object that is not kept", n)
		}
		for i := range 20 {
			watch <- store.Batch{Revision: 3, Events: []store.Event{pool("a", i)}}
			wait(100 * time.Millisecond)
		}
		if n := c.cache.file.Flushes() - before; n < 1 || n > 3 {
			t.Errorf("%d flushes in two seconds", n)
		}
		end() // writes what is left
		want := map[string]string{"a": "10.19.0.0/16"}
		same(t, "after the end", onFile(t, d.dir), want)

		c, watch, end = d.run()
		if err := c.Save(); !errors.Is(err, errUnread) {
			t.Errorf("before the datastore has said anything: %v", err)
		}
		watch <- store.Batch{Synced: true, Revision: 4, Events: []store.Event{pool("a", 19)}}
		synctest.Wait()
		if err := c.Save(); err != nil || c.cache.file.Flushes() != 0 {
			t.Errorf("%d flushes of what is there, error %v", c.cache.file.Flushes(), err)
		}
		end()
	})
}
