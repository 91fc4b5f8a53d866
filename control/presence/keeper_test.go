package presence

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/embedded"
	"github.com/routerd/routerd/store/etcd"
)

// cluster is a real etcd.
type cluster struct {
	t      *testing.T
	dir    string
	server *embedded.Server
}

func newCluster(t *testing.T) *cluster {
	t.Helper()
	// Not TempDir: the path of a unix socket is short.
	dir, err := os.MkdirTemp("", "presence") //nolint:usetesting // its names are too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	c := &cluster{t: t, dir: dir}
	c.up()
	return c
}

func (c *cluster) up() {
	c.t.Helper()
	s, err := embedded.Start(c.t.Context(), embedded.Config{Dir: filepath.Join(c.dir, "data"), Socket: filepath.Join(c.dir, "s")})
	if err != nil {
		c.t.Fatal(err)
	}
	c.server = s
	c.t.Cleanup(s.Close)
}

func (c *cluster) open() *etcd.Store {
	c.t.Helper()
	st, err := etcd.Open(c.t.Context(), etcd.Config{Endpoints: []string{"unix://" + filepath.Join(c.dir, "s")}})
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { _ = st.Close() })
	return st
}

// daemon is a keeper that runs.
type daemon struct {
	*Keeper
	t       *testing.T
	cluster *cluster
	file    string
	cancel  context.CancelFunc
	done    chan struct{}
	err     error // once done
	doubts  atomic.Int64
	outages chan error
}

// start runs a keeper of a machine with a state directory of its own, under the
// name node-a.
func (c *cluster) start(file, boot string, change ...func(*Config)) *daemon {
	c.t.Helper()
	id, err := Load(file)
	if err != nil {
		c.t.Fatal(err)
	}
	self, err := Self(id)
	if err != nil {
		c.t.Fatal(err)
	}
	self.BootID = boot
	d := &daemon{t: c.t, cluster: c, file: file, done: make(chan struct{}), outages: make(chan error, 16)}
	conf := Config{
		Node: "node-a", Store: c.open(), File: file, Self: self, Log: slog.New(slog.DiscardHandler),
		Doubt:  func() { d.doubts.Add(1) },
		Outage: func(err error) { d.outages <- err },
	}
	for _, f := range change {
		f(&conf)
	}
	d.Keeper = New(conf)
	ctx, cancel := context.WithCancel(context.Background())
	d.cancel = cancel
	go func() {
		defer close(d.done)
		d.err = d.Run(ctx)
	}()
	c.t.Cleanup(d.stop)
	return d
}

// hangs makes a verification never end.
func hangs(c *Config) {
	c.Verified = func(ctx context.Context) error {
		<-ctx.Done()
		return ctx.Err()
	}
}

// stop ends it in an orderly way.
func (d *daemon) stop() {
	d.cancel()
	<-d.done
}

// gone stops it and ends its lease, as time would.
func (d *daemon) gone() {
	d.t.Helper()
	d.stop()
	st := d.cluster.open()
	now, err := st.Name(d.t.Context(), "node-a")
	if err == nil {
		err = st.EndPresence(d.t.Context(), now)
	}
	if err != nil {
		d.t.Fatal(err)
	}
}

func (d *daemon) holds(epoch int64) {
	d.t.Helper()
	await.Until(d.t, "the name is held", func() error {
		if got := d.Epoch(); got != epoch {
			return fmt.Errorf("epoch %d, want %d; refused: %w", got, epoch, d.Refused())
		}
		return nil
	})
	await.Until(d.t, "the epoch is written down", func() error {
		id, err := Load(d.file)
		if err == nil && id.Epoch != epoch {
			err = fmt.Errorf("it says %d, want %d", id.Epoch, epoch)
		}
		return err
	})
}

func (c *cluster) node(st store.Store) {
	c.t.Helper()
	n := &store.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-a"}}
	store.SetDefaults(n)
	if _, err := store.Create(c.t.Context(), st, n); err != nil {
		c.t.Fatal(err)
	}
}

func (c *cluster) deleteNode(st store.Store) {
	c.t.Helper()
	if err := store.Delete(c.t.Context(), st, store.ResourceKey(store.KindNode, "node-a"), 0); err != nil {
		c.t.Fatal(err)
	}
}

// TestEpochs: what raises the epoch of a host, and what does not, on real etcd.
func TestEpochs(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	st, file := c.open(), filepath.Join(t.TempDir(), "incarnation.json")
	d := c.start(file, "boot1")
	d.holds(1)
	c.node(st)
	await.Until(t, "the Node is noted", func() error {
		obj, err := st.Get(t.Context(), store.IncarnationKey("node-a"))
		if err == nil && obj.Value.(*store.Incarnation).NodeCreated == 0 {
			err = errors.New("it is not")
		}
		return err
	})
	d.holds(1) // its own Node is no news
	d.stop()

	d = c.start(file, "boot1")
	d.holds(1)
	if n := d.doubts.Load(); n != 0 {
		t.Errorf("a restart in place raised %d doubts", n)
	}
	c.deleteNode(st)
	c.node(st)
	d.holds(2) // deleted and made anew under it
	if n := d.doubts.Load(); n != 1 {
		t.Errorf("%d doubts, want 1", n)
	}
	d.stop()

	c.deleteNode(st)
	c.node(st)
	d = c.start(file, "boot1")
	d.holds(3) // while it was away
	d.gone()
	d = c.start(file, "boot2")
	d.holds(4)
	d.stop()
	if err := store.Delete(t.Context(), st, store.IncarnationKey("node-a"), 0); err != nil {
		t.Fatal(err)
	}
	d = c.start(file, "boot2")
	d.holds(5)
}

// TestDoubtOutlivesTheDaemon: one that dies before the workloads are verified
// begins anew.
func TestDoubtOutlivesTheDaemon(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	file := filepath.Join(t.TempDir(), "incarnation.json")
	first := c.start(file, "boot1")
	first.holds(1)
	first.gone()
	d := c.start(file, "boot2", hangs)
	await.True(t, "the name is held", func() bool { return d.Epoch() == 2 })
	d.stop()
	d = c.start(file, "boot2")
	d.holds(2)
	if n := d.doubts.Load(); n != 1 {
		t.Errorf("%d doubts, want 1", n)
	}
}

// TestClone: of two lives of one name the second is refused, and says who both
// are, for as long as the first is there; a restart of the first in place waits
// for nothing.
func TestClone(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	file := filepath.Join(t.TempDir(), "incarnation.json")
	first := c.start(file, "boot1")
	first.holds(1)
	// A copy of the disk boots elsewhere.
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	copied := filepath.Join(t.TempDir(), "incarnation.json")
	if err := os.WriteFile(copied, b, 0o600); err != nil {
		t.Fatal(err)
	}
	second := c.start(copied, "boot2")
	await.Until(t, "the copy is refused", func() error {
		err := second.Refused()
		var refused *RefusedError
		if !errors.As(err, &refused) {
			return fmt.Errorf("got %v", err)
		}
		for _, word := range []string{"node-a", "boot1", "boot2", "nodeName"} {
			if !strings.Contains(err.Error(), word) {
				t.Fatalf("want %q in %q", word, err)
			}
		}
		return nil
	})
	again := c.start(file, "boot1") // a process in the place of the first, whose lease lives
	again.holds(1)
	<-first.done
	var given *GivenUpError
	if !errors.As(first.err, &given) {
		t.Errorf("the process before it ended with %v", first.err)
	}
	again.stop() // in an orderly way, as for an upgrade
	again = c.start(file, "boot1")
	again.holds(1)
	if second.Refused() == nil || second.Epoch() != 0 {
		t.Error("the copy is not refused any more")
	}
	again.gone()
	second.holds(2)
	if second.Refused() != nil {
		t.Errorf("it is refused still: %v", second.Refused())
	}
}

// TestLeaseEnds: a host that could not be seen for a while takes its place
// again, in the same epoch; one whose place was taken meanwhile ends.
func TestLeaseEnds(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	st, file := c.open(), filepath.Join(t.TempDir(), "incarnation.json")
	d := c.start(file, "boot1")
	d.holds(1)
	now, err := st.Name(t.Context(), "node-a")
	if err != nil {
		t.Fatal(err)
	}
	if err := st.EndPresence(t.Context(), now); err != nil {
		t.Fatal(err)
	}
	await.Until(t, "it is there again", func() error {
		next, err := st.Name(t.Context(), "node-a")
		if err == nil && (next.Holder == nil || next.Revision == now.Revision) {
			err = errors.New("not yet")
		}
		return err
	})
	if d.Epoch() != 1 || d.doubts.Load() != 1 {
		t.Errorf("epoch %d and %d doubts, want 1 and 1", d.Epoch(), d.doubts.Load())
	}
	// Another takes the name, as if the first had not been there to be seen.
	now, err = st.Name(t.Context(), "node-a")
	if err != nil {
		t.Fatal(err)
	}
	h, err := st.Claim(t.Context(), "node-a", now, *life("other", "boot9", 2, 0), TTL)
	if err != nil {
		t.Fatal(err)
	}
	defer h.(*etcd.Hold).Release(t.Context())
	<-d.done
	var given *GivenUpError
	if !errors.As(d.err, &given) || !strings.Contains(d.err.Error(), "boot9") {
		t.Errorf("it ended with %v", d.err)
	}
}

// readOnly is a datastore that refuses writes, as one that is full does.
type readOnly struct {
	*etcd.Store
	full  atomic.Bool
	tries atomic.Int64
}

func (s *readOnly) Claim(ctx context.Context, node string, seen store.NameState, as store.Incarnation, ttl time.Duration) (store.Hold, error) {
	if s.full.Load() {
		s.tries.Add(1)
		return nil, fmt.Errorf("take the name: %w: mvcc: database space exceeded", store.ErrUnavailable)
	}
	return s.Store.Claim(ctx, node, seen, as, ttl)
}

// TestReadOnly: a host whose name is its own by what is written holds it though
// the datastore cannot be written, and one whose is not does not.
func TestReadOnly(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	file := filepath.Join(t.TempDir(), "incarnation.json")
	on := func(s *readOnly) func(*Config) { return func(conf *Config) { conf.Store = s } }
	full := func() *readOnly {
		s := &readOnly{Store: c.open()}
		s.full.Store(true)
		return s
	}
	waits := func(d *daemon, s *readOnly) {
		t.Helper()
		await.True(t, "it tries", func() bool { return s.tries.Load() >= 2 })
		if d.Epoch() != 0 {
			t.Error("it holds the name")
		}
		d.stop()
	}
	s := full()
	waits(c.start(file, "boot1", on(s)), s) // new
	first := c.start(file, "boot1")
	first.holds(1)
	first.stop()

	s = full()
	d := c.start(file, "boot1", on(s)) // the lease of the process before it lives
	d.holds(1)
	s.full.Store(false)
	await.Until(t, "the datastore is told", func() error {
		now, err := c.open().Name(t.Context(), "node-a")
		if err == nil && (now.Holder == nil || now.Holder.Process != d.cfg.Self.Process) {
			err = fmt.Errorf("it has %v", now.Holder)
		}
		return err
	})
	d.holds(1)
	d.gone()

	s = full()
	d = c.start(file, "boot1", on(s)) // nobody is there
	d.holds(1)
	// Another takes the name of one that could not say that it is there.
	st := c.open()
	now, err := st.Name(t.Context(), "node-a")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := st.Claim(t.Context(), "node-a", now, *life("other", "boot9", 2, 0), TTL); err != nil {
		t.Fatal(err)
	}
	<-d.done
	var given *GivenUpError
	if !errors.As(d.err, &given) {
		t.Errorf("it ended with %v", d.err)
	}
	s = full()
	d = c.start(file, "boot1", on(s))
	await.Until(t, "it is refused", d.refused)
	d.gone()
	s = full()
	waits(c.start(file, "boot2", on(s)), s) // booted: what was another's is to be verified
}

// refused returns an error unless it is.
func (d *daemon) refused() error {
	if d.Refused() == nil {
		return errors.New("not yet")
	}
	if d.Epoch() != 0 {
		d.t.Fatal("it holds the name as well")
	}
	return nil
}

// TestOutage: a datastore that is away is told once, and the name is held when
// it comes.
func TestOutage(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.server.Close()
	d := c.start(filepath.Join(t.TempDir(), "incarnation.json"), "boot1")
	select {
	case err := <-d.outages:
		if !errors.Is(err, store.ErrUnavailable) {
			t.Errorf("told: %v", err)
		}
	case <-time.After(await.Patience):
		t.Fatal("the outage is not told")
	}
	c.up()
	d.holds(1)
}

// TestRace: of two that claim a name at once one gets it.
func TestRace(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	st := c.open()
	seen, err := st.Name(t.Context(), "node-a")
	if err != nil {
		t.Fatal(err)
	}
	var won, lost atomic.Int64
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			h, err := st.Claim(t.Context(), "node-a", seen, *life(fmt.Sprint(i), "1", 1, 0), TTL)
			switch {
			case err == nil:
				won.Add(1)
				h.(*etcd.Hold).Release(t.Context())
			case errors.Is(err, store.ErrConflict):
				lost.Add(1)
			default:
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if won.Load() != 1 || lost.Load() != 7 {
		t.Errorf("%d won and %d lost", won.Load(), lost.Load())
	}
}

// TestIdentity: a state directory keeps its identity, and a damaged one is not
// taken for another.
func TestIdentity(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "incarnation.json")
	one, err := Load(file)
	if err != nil {
		t.Fatal(err)
	}
	if two, err := Load(file); err != nil || two != one {
		t.Errorf("it was %v and is %v, %v", one, two, err)
	}
	for _, content := range []string{"", "{", "{}", "[]"} {
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Load(file); err == nil || !strings.Contains(err.Error(), file) {
			t.Errorf("%q: %v", content, err)
		}
	}
}
