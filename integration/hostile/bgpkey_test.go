package hostile

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/control/bgp/engine/conn"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/ns"
	"github.com/routerd/routerd/integration/lab/traffic"
	"github.com/routerd/routerd/store"
)

// TestKeyOfTheMesh: the hosts of a new cluster sign their sessions with each other, so that
// who has a host's address and not the key gets no connection, and does not keep that host
// out. The key is replaced under traffic, and a daemon started again, without a session that
// ends or a packet that is lost; no log has it.
func TestKeyOfTheMesh(t *testing.T) {
	t.Parallel()
	top := topology(3, 1, store.Direct)
	top.Underlay, top.Pool6 = lab.UnderlayDual, &lab.Pool{Encapsulation: store.Direct}
	l := bringUp(t, "key", top)
	signed := func(with string) {
		t.Helper()
		for _, host := range l.Hosts() {
			says(t, l, host, []string{"bgp", "peers"}, "Sessions with other nodes: signed with key "+with+".")
		}
	}
	stranger := func(key string) {
		t.Helper()
		var wg sync.WaitGroup
		for _, f := range dataplane.Families() {
			at := addrOf(t, l, "node1", f).String()
			wg.Go(func() {
				if err := connectSigned(t, l, "node2", at, key); err == nil {
					t.Errorf("%s: node2's address without the key gets a connection", f)
				}
			})
		}
		wg.Wait()
	}
	first := clusterKey(t, l)
	signed(first.KeyIDs()[0])
	before := sessions(t, l, l.Hosts()...)
	stranger("")
	stranger("a key that somebody made up")
	// With the key it does: the refusal is for want of it.
	for _, f := range dataplane.Families() {
		poll(t, "a connection with the key", func() string {
			if err := connectSigned(t, l, "node2", addrOf(t, l, "node1", f).String(), hex.EncodeToString(first.Key)); err != nil {
				return err.Error()
			}
			return ""
		})
	}

	poll(t, "pods reach each other", func() string {
		m, err := l.ReachabilityMatrix(within(t, 20*time.Second), traffic.Options{})
		if err != nil || !m.OK() {
			return fmt.Sprint(err, m.Failures())
		}
		return ""
	})
	load, err := l.StartLoad(traffic.LoadOptions{Rate: 200}, [2]string{"node1/pod1", "node2/pod1"}, [2]string{"node2/pod1", "node3/pod1"}, [2]string{"node3/pod1", "node1/pod1"})
	if err != nil {
		t.Fatal(err)
	}
	defer load.Stop()
	out, err := routerctl(t, l, "node3", "bgp", "key", "rotate", "--settle", "2s")
	if err != nil || !strings.Contains(out, "is valid now") {
		t.Fatalf("%v\n%s", err, out)
	}
	second := clusterKey(t, l)
	signed(second.KeyIDs()[0])
	// A route that is new comes across: the sessions are not only there.
	if _, err := l.AttachPod(await.Context(t), "node1/pod9"); err != nil {
		t.Fatal(err)
	}
	poll(t, "a new pod is reached", func() string {
		if r, err := l.Ping(within(t, 5*time.Second), "node2/pod1", "node1/pod9", traffic.Options{}); err != nil || !r.OK {
			return fmt.Sprint(r, err)
		}
		return ""
	})
	if after := sessions(t, l, l.Hosts()...); after != before {
		t.Errorf("sessions ended while the key was replaced: before\n%s\nafter\n%s", before, after)
	}
	stranger(hex.EncodeToString(first.Key))
	// Somebody else has the host's address, and is first.
	knocks := knock(t, l, "node2", address(t, l, "node1"))
	if err := l.Restart(await.Context(t), "node2"); err != nil {
		t.Fatal(err)
	}
	signed(second.KeyIDs()[0])
	for _, host := range l.Hosts() {
		poll(t, host+" has its sessions back", func() string { return down(t, l, host) })
	}
	knocks()
	if bad := load.Stop().Bad(); len(bad) > 0 {
		t.Errorf("packets were lost: %v", bad)
	}
	for _, host := range l.Hosts() {
		log := l.LogTail(host, 100000)
		for _, k := range [][]byte{first.Key, second.Key} {
			if strings.Contains(log, hex.EncodeToString(k)) {
				t.Errorf("the log of %s has the key", host)
			}
		}
	}
}

// TestKeyBesideOthers: a cluster without a key has none until somebody asks for one. Then nodes
// of an earlier version and of Calico's, which know of none, have their sessions as before,
// while the others sign; neither making the key nor taking it away ends a session.
func TestKeyBesideOthers(t *testing.T) {
	t.Parallel()
	l := bringUp(t, "mix", topology(3, 0, store.Direct))
	key := func(args ...string) {
		t.Helper()
		if out, err := routerctl(t, l, "node1", append([]string{"bgp", "key"}, args...)...); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	say := func(text string, hosts ...string) {
		t.Helper()
		for _, host := range hosts {
			says(t, l, host, []string{"bgp", "peers"}, "Sessions with other nodes: "+text)
		}
	}
	same := func(before, what string, hosts ...string) {
		t.Helper()
		if after := sessions(t, l, hosts...); after != before {
			t.Errorf("%s ended sessions: before\n%s\nafter\n%s", what, before, after)
		}
	}
	say("signed with key ", l.Hosts()...)
	before := sessions(t, l, l.Hosts()...)
	key("off")
	say("not signed: the cluster has no key", l.Hosts()...)
	same(before, "taking the key away", l.Hosts()...)
	if err := l.Restart(await.Context(t), "node2"); err != nil {
		t.Fatal(err)
	}
	say("not signed: the cluster has no key", "node2")

	// An earlier version publishes no keys.
	if err := l.Kill(await.Context(t), "node3", unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	stop := runBIRD(t, l, "node3", "node1", nil, "")
	poll(t, "node1 has its sessions with both", func() string { return down(t, l, "node1") })
	before = sessions(t, l, "node1")
	key("rotate", "--wait-timeout", "1s", "--settle", "1s")
	say("signed with key "+clusterKey(t, l).KeyIDs()[0], "node1", "node2")
	same(before, "making a key", "node1")
	again := func(what string) {
		t.Helper()
		stop()
		poll(t, "node1 has lost its session with node3", func() string {
			if down(t, l, "node1") == "" {
				return "it is up"
			}
			return ""
		})
		stop = runBIRD(t, l, "node3", "node1", nil, "")
		poll(t, what+" has its session without a key", func() string { return down(t, l, "node1") })
	}
	again("a node of an earlier version")

	s, err := l.Store(await.Context(t), "node1")
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if _, err := store.Modify(await.Context(t), s, store.ResourceKey(store.KindNode, "node3"), func(cur store.Object) (any, error) {
		n := store.Clone(cur.Value).(*store.Node)
		n.Annotations = nil // as Calico writes it to etcd
		return n, nil
	}); err != nil {
		t.Fatal(err)
	}
	again("a node of Calico's")
	if err := connectSigned(t, l, "node2", address(t, l, "node1"), ""); err == nil {
		t.Error("node1 does not sign with node2")
	}
}

// knock connects again and again without a key from a host to BGP's port at an address,
// until it is called: then nothing may have come of it.
func knock(t *testing.T, l *lab.Lab, from, to string) (done func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		for ctx.Err() == nil {
			if err := connectSigned(t, l, from, to, ""); err == nil {
				t.Errorf("%s's address without the key gets a connection", from)
			}
		}
	})
	done = sync.OnceFunc(func() { cancel(); wg.Wait() })
	t.Cleanup(done)
	return done
}

// clusterKey reads the key with which the hosts sign.
func clusterKey(t *testing.T, l *lab.Lab) *store.Secret {
	t.Helper()
	s, err := l.Store(await.Context(t), "node1")
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	k, err := store.BGPKey(await.Context(t), s)
	if err != nil || k == nil {
		t.Fatalf("the key of a new cluster: %v, %v", k, err)
	}
	return k
}

// connectSigned connects from a host to BGP's port at an address, signing with a key, or
// without one.
func connectSigned(t *testing.T, l *lab.Lab, from, to, key string) error {
	t.Helper()
	d := net.Dialer{Timeout: 2500 * time.Millisecond, Control: func(_, _ string, raw syscall.RawConn) error {
		if key == "" {
			return nil
		}
		var err error
		return errors.Join(raw.Control(func(fd uintptr) { err = conn.SetPassword(int(fd), netip.MustParseAddr(to), key) }), err)
	}}
	var c net.Conn
	err := ns.Do(l.Space(from), func() (err error) {
		c, err = d.DialContext(t.Context(), "tcp", net.JoinHostPort(to, "179"))
		return err
	})
	if err != nil {
		return err
	}
	return c.Close()
}

// down says which session of a host is not up; empty: all are.
func down(t *testing.T, l *lab.Lab, host string) string {
	t.Helper()
	n, err := l.Node(within(t, 5*time.Second), host)
	if err != nil {
		return err.Error()
	}
	for _, p := range n.GetPeers() {
		if p.GetState() != "up" {
			return fmt.Sprintf("%s: %s, %s", p.GetName(), p.GetState(), p.GetInfo())
		}
	}
	return ""
}

// sessions says since when each session of hosts is up, when all are.
func sessions(t *testing.T, l *lab.Lab, hosts ...string) string {
	t.Helper()
	var out strings.Builder
	for _, host := range hosts {
		poll(t, host+" has its sessions", func() string { return down(t, l, host) })
		n, err := l.Node(await.Context(t), host)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range n.GetPeers() {
			fmt.Fprintf(&out, "%s-%s since %s\n", host, p.GetName(), p.GetSince().AsTime())
		}
	}
	return out.String()
}
