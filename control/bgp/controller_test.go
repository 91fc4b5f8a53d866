package bgp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/routerd/routerd/control/cluster/clustertest"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

// daemon is a Controller under test.
type daemon struct {
	*Controller
	t       testing.TB
	batches chan store.Batch
	mu      sync.Mutex
	paths   map[netip.Prefix]Path
	stop    func()
}

func newDaemon(t testing.TB, node string) *daemon {
	t.Helper()
	return newDaemonOf(t, Options{Node: node, SecretDir: t.TempDir()})
}

// newDaemonOf is newDaemon with options, of which the log and the handler are
// filled in. change is called before the controller runs.
func newDaemonOf(t testing.TB, o Options, change ...func(*Controller)) *daemon {
	t.Helper()
	return newDaemonOn(t, "", o, change...)
}

// newDaemonOn is newDaemonOf with a file in which the cluster's copy is kept.
func newDaemonOn(t testing.TB, file string, o Options, change ...func(*Controller)) *daemon {
	t.Helper()
	d := &daemon{t: t, batches: make(chan store.Batch), paths: map[netip.Prefix]Path{}}
	o.Log = testLog(t)
	o.Handle = func(_ context.Context, c Changes) {
		d.mu.Lock()
		defer d.mu.Unlock()
		for _, p := range c.Put {
			d.paths[p.Prefix] = p
		}
		for _, p := range c.Del {
			delete(d.paths, p)
		}
	}
	d.Controller = New(o)
	for _, f := range change {
		f(d.Controller)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	steps, followed := clustertest.FollowOn(ctx, file, o.Node, clustertest.Says(d.batches), Kinds()...)
	go func() { done <- d.Run(ctx, steps) }()
	d.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("run: %v", err)
		}
		<-followed
	})
	t.Cleanup(d.stop)
	return d
}

func (d *daemon) send(b store.Batch) {
	d.t.Helper()
	select {
	case d.batches <- b:
	case <-time.After(await.Patience):
		d.t.Fatal("batch not taken")
	}
}

// peer returns the session of a name.
func (d *daemon) peer(name string) PeerStatus {
	d.t.Helper()
	for _, p := range d.Status(context.Background()).Peers {
		if p.Name == name {
			return p
		}
	}
	return PeerStatus{}
}

func (d *daemon) has(prefix string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	_, ok := d.paths[netip.MustParsePrefix(prefix)]
	return ok
}

func (d *daemon) waitErr(says string) {
	d.t.Helper()
	var err error
	poll(d.t, func() string { return fmt.Sprintf("error saying %q; it is %v", says, err) }, func() bool {
		err = d.Status(context.Background()).Err
		return err == nil && says == "" || err != nil && says != "" && strings.Contains(err.Error(), says)
	})
}

// cluster is the store's first batch for a mesh of two.
func testCluster(t testing.TB, h []netip.Addr) store.Batch {
	return store.Batch{Synced: true, Events: []store.Event{
		conf(t, "default", `{"bindMode":"NodeIP"}`),
		ippool(t, "pool", `{"cidr":"192.168.0.0/16"}`),
		bgpNode(t, "node1", h[0].String()+"/32"), bgpNode(t, "node2", h[1].String()+"/32"),
		affinity(t, "node1", "192.168.1.0/26", "confirmed"), affinity(t, "node2", "192.168.2.0/26", "confirmed"),
	}}
}

func TestControllers(t *testing.T) {
	t.Parallel()
	h := hosts(t, 2)
	a, b := newDaemon(t, "node1"), newDaemon(t, "node2")
	a.waitErr(ErrNotSynced.Error())
	a.send(store.Batch{Synced: true})
	a.waitErr(ErrNoNode.Error())
	a.send(store.Batch{Events: []store.Event{node(t, "node1", `{}`)}})
	a.waitErr(ErrNoAddress.Error())
	a.send(testCluster(t, h))
	b.send(testCluster(t, h))
	poll(t, func() string { return fmt.Sprint(a.Status(context.Background()), b.Status(context.Background())) },
		func() bool { return a.has("192.168.2.0/26") && b.has("192.168.1.0/26") })
	st := a.Status(context.Background())
	if st.Err != nil || st.ASN != DefaultASN || st.RouterID != h[0] || len(st.Peers) != 1 || st.Peers[0].State != StateUp || st.Peers[0].Name != "node2" {
		t.Errorf("status %+v", st)
	}
	if routes, err := a.Routes(t.Context()); err != nil || len(routes) != 1 {
		t.Errorf("routes %v, %v", routes, err)
	}

	// The store is away, then lies, then goes for good: what was known holds.
	a.send(store.Batch{Err: store.ErrUnavailable})
	poll(t, func() string { return "the outage in the status" },
		func() bool { return errors.Is(a.Status(context.Background()).Store, store.ErrUnavailable) })
	key := store.ResourceKey(store.KindNode, "node2")
	a.send(store.Batch{Synced: true, Events: []store.Event{{Key: key, Err: store.ErrDecode}, affinity(t, "node1", "192.168.1.64/26", "confirmed")}})
	poll(t, func() string { return "the new block at the peer" }, func() bool { return b.has("192.168.1.64/26") })
	a.send(store.Batch{Events: []store.Event{gone(store.ResourceKey(store.KindNode, "node1"))}})
	a.waitErr(ErrNoNode.Error())
	close(a.batches)
	if !a.has("192.168.2.0/26") || !b.has("192.168.1.0/26") || a.Status(context.Background()).Peers[0].State != StateUp {
		t.Error("the last known good configuration was given up")
	}
	// The end of the daemon takes no route along.
	a.stop()
	poll(t, func() string { return fmt.Sprint(b.Status(context.Background())) }, func() bool {
		return strings.Contains(b.Status(context.Background()).Peers[0].Info, "kept while it restarts")
	})
	if !b.has("192.168.1.0/26") {
		t.Error("the peer lost the route when the daemon stopped")
	}
}

// TestControllerRetriesThePort: the daemon stays up and takes the port when it
// is free, without being told.
func TestControllerRetriesThePort(t *testing.T) {
	t.Parallel()
	h := hosts(t, 2)
	l, err := net.Listen("tcp4", netip.AddrPortFrom(h[0], DefaultPort).String())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	d := newDaemon(t, "node1")
	d.send(testCluster(t, h))
	d.waitErr("port 179 on " + h[0].String() + " is taken by")
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	d.waitErr("")
}

// TestNothingIsLeftRunning starts and ends a controller and looks for
// goroutines. It is not parallel, so that others' are not taken for its own.
func TestNothingIsLeftRunning(t *testing.T) {
	ignore := goleak.IgnoreCurrent()
	h := hosts(t, 2)
	d := newDaemon(t, "node1")
	d.send(testCluster(t, h))
	d.waitErr("")
	d.send(store.Batch{Events: []store.Event{conf(t, "default", `{"bindMode":"NodeIP","asNumber":64600}`)}}) // the engine is started anew
	poll(t, func() string { return "the new AS" }, func() bool { return d.Status(context.Background()).ASN == 64600 })
	d.stop()
	if err := goleak.Find(ignore); err != nil {
		t.Error(err)
	}
}
