package scenarios

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/ns"
	"github.com/routerd/routerd/store"
)

// The ports of what is denied and of what is allowed throughout a test.
const (
	deniedPort  = 30001
	allowedPort = 30002
	talkPort    = 30003
)

// talk is a conversation: one side sends a number every few milliseconds, the
// other sends it back.
type talk struct {
	conn net.Conn
	heard,
	sent atomic.Int64
	last atomic.Int64 // when something was heard, in nanoseconds
	done sync.WaitGroup
}

// startTalk begins a conversation over udp or tcp with a server of serveTalk.
func startTalk(t *testing.T, l *lab.Lab, network, from string, to netip.Addr) *talk {
	t.Helper()
	c := &talk{}
	err := ns.Do(l.Space(from), func() (err error) {
		c.conn, err = net.DialTimeout(network, netip.AddrPortFrom(to, talkPort).String(), 10*time.Second) //nolint:noctx // bounded
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	c.done.Go(func() {
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for range tick.C {
			if _, err := c.conn.Write([]byte("x")); errors.Is(err, net.ErrClosed) {
				return
			}
			c.sent.Add(1)
		}
	})
	c.done.Go(func() {
		b := make([]byte, 1024)
		for {
			n, err := c.conn.Read(b)
			if err != nil {
				if errors.Is(err, net.ErrClosed) || n == 0 && network == "tcp" {
					return
				}
				continue
			}
			c.heard.Add(int64(n))
			c.last.Store(time.Now().UnixNano())
		}
	})
	t.Cleanup(func() { _ = c.conn.Close(); c.done.Wait() })
	c.goesOn(t)
	return c
}

// goesOn waits until the conversation has gone on for some time.
func (c *talk) goesOn(t *testing.T) {
	t.Helper()
	from := c.heard.Load()
	poll(t, "a conversation goes on", func() string {
		if n := c.heard.Load() - from; n < 20 {
			return fmt.Sprintf("%d answers", n)
		}
		return ""
	})
}

// ended waits until nothing was heard for half a second, and returns when
// something was heard last.
func (c *talk) ended(t *testing.T) time.Time {
	t.Helper()
	poll(t, "a conversation is cut", func() string {
		if since := time.Since(time.Unix(0, c.last.Load())); since < 500*time.Millisecond {
			return fmt.Sprintf("something was heard %s ago", since)
		}
		return ""
	})
	return time.Unix(0, c.last.Load())
}

// serveTalk answers conversations over TCP; serve does over UDP.
func serveTalk(t *testing.T, l *lab.Lab, where string) {
	t.Helper()
	serve(t, l, where, unix.IPPROTO_UDP, talkPort)
	var lis net.Listener
	err := ns.Do(l.Space(where), func() (err error) {
		lis, err = net.Listen("tcp", fmt.Sprintf(":%d", talkPort)) //nolint:noctx // closed below
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = lis.Close() })
	go func() {
		for {
			c, err := lis.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				b := make([]byte, 1024)
				for {
					n, err := c.Read(b)
					if err == nil {
						_, err = c.Write(b[:n])
					}
					if err != nil {
						return
					}
				}
			}()
		}
	}()
}

// testTighten cuts the connections that a policy denies from now on, in both
// directions and within a second, and no others; loosened, new ones pass.
func testTighten(t *testing.T, l *lab.Lab, s store.Store) {
	for _, where := range []string{"node2/pod1", "node3/pod1"} {
		serveTalk(t, l, where)
	}
	to := func(where string, f dataplane.Family) netip.Addr { return addrOf(t, l, where, f) }
	cut := []*talk{
		startTalk(t, l, "tcp", "node1/pod1", to("node2/pod1", dataplane.IPv4)),
		startTalk(t, l, "udp", "node1/pod1", to("node2/pod1", dataplane.IPv6)),
	}
	stay := []*talk{
		startTalk(t, l, "tcp", "node1/pod2", to("node2/pod1", dataplane.IPv4)),
		startTalk(t, l, "udp", "node1/pod1", to("node3/pod1", dataplane.IPv4)),
		startTalk(t, l, "tcp", "node1/pod1", to("node3/pod1", dataplane.IPv6)),
	}
	label(t, l, s, "node1/pod1", "talker", "bad")
	manifest := policyManifest("tighten", "role == 'server' && kubernetes == 'no'", `ingress: [{action: Deny, source: {selector: "talker == 'bad'"}}]`)
	label(t, l, s, "node2/pod1", "role", "server")
	label(t, l, s, "node2/pod1", "kubernetes", "no")
	routerctl(t, l, "node1", manifest, "apply", "-f", "-")
	settled(t, l) // hence the rules are in force for less time than it is after this call
	inForce := time.Now()
	for i, c := range cut {
		if late := c.ended(t).Sub(inForce); late > time.Second {
			t.Errorf("conversation %d was heard %s after the rules were in force", i, late)
		}
	}
	for _, c := range stay {
		c.goesOn(t)
	}
	before := []int64{cut[0].heard.Load(), cut[1].heard.Load()}
	stay[0].goesOn(t)
	for i, c := range cut {
		if n := c.heard.Load() - before[i]; n > 0 {
			t.Errorf("conversation %d: %d answers after it was cut", i, n)
		}
	}
	routerctl(t, l, "node1", "", "delete", "gnp", "tighten")
	until(t, l, true, "node1/pod1", to("node2/pod1", dataplane.IPv4), unix.IPPROTO_TCP, talkPort)
	cut[1].goesOn(t) // the same ends, allowed again
}

// denied counts what passes that must not: packets to a port that nothing but
// this test sends to.
type denied struct {
	through func() int64
	sent    atomic.Int64
	stop    func()
}

// startDenied sends from one place to another, from a new port each time, until
// stopped.
func startDenied(t *testing.T, l *lab.Lab, from, to string) *denied {
	t.Helper()
	d := &denied{}
	d.through = countDatagrams(t, l, to, deniedPort)
	var wg sync.WaitGroup
	dst := netip.AddrPortFrom(addr(t, l, to), deniedPort)
	quit := make(chan struct{})
	wg.Go(func() {
		err := ns.Do(l.Space(from), func() error {
			tick := time.NewTicker(2 * time.Millisecond)
			defer tick.Stop()
			for {
				select {
				case <-quit:
					return nil
				case <-tick.C:
				}
				fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
				if err != nil {
					return err
				}
				// EPERM and the like are as good as a drop.
				if unix.Sendto(fd, []byte("x"), 0, sockaddr(dst)) == nil {
					d.sent.Add(1)
				}
				unix.Close(fd)
			}
		})
		if err != nil {
			t.Error(err)
		}
	})
	d.stop = sync.OnceFunc(func() {
		close(quit)
		wg.Wait()
		t.Logf("%d packets were sent that are denied, %d of them passed", d.sent.Load(), d.through())
		if d.sent.Load() == 0 || d.through() > 0 {
			t.Errorf("of %d denied packets %d passed, want none of many", d.sent.Load(), d.through())
		}
	})
	t.Cleanup(d.stop)
	return d
}

func denyManifest() string {
	return policyManifest("denied", "all()", fmt.Sprintf("order: 1\n  ingress: [{action: Deny, protocol: UDP, destination: {ports: [%d]}}]", deniedPort))
}

// churn is how long rules are changed under traffic. The minute that is
// promised is run by ROUTERD_CHURN=60s: in a run of everything it would be a
// tenth of all.
func churn(t *testing.T) time.Duration {
	t.Helper()
	text := os.Getenv("ROUTERD_CHURN")
	if text == "" {
		return 10 * time.Second
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		t.Fatalf("ROUTERD_CHURN: %v", err)
	}
	return d
}

// testChurn changes policies, sets and labels every 10 ms, under traffic that
// is allowed throughout and traffic that is denied throughout.
func testChurn(t *testing.T, l *lab.Lab, s store.Store) {
	routerctl(t, l, "node1", denyManifest(), "apply", "-f", "-")
	settled(t, l)
	bad := startDenied(t, l, "node1/pod1", "node3/pod1")
	traffic := startLoad(t, l, [2]string{"node1/pod1", "node3/pod1"}, [2]string{"node1/pod2", "node2/pod1"})
	steps := func(host string) float64 { return float64(policyOf(t, l, host).GetSteps()) }
	before := steps("node3")
	start := time.Now()
	var n atomic.Int64
	var wg sync.WaitGroup
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	room := make(chan struct{}, 16) // a change takes longer than the time between two
	for i := 0; time.Since(start) < churn(t); i++ {
		<-tick.C
		room <- struct{}{}
		wg.Go(func() {
			defer func() { <-room }()
			if err := changeSomething(t, s, i); err != nil {
				t.Error(err)
				return
			}
			n.Add(1)
		})
	}
	wg.Wait()
	took := time.Since(start)
	settled(t, l)
	t.Logf("%d changes in %.1f s; node3 took %.0f steps", n.Load(), took.Seconds(), steps("node3")-before)
	if n.Load() < 100 || steps("node3")-before < 50 {
		t.Errorf("only %d changes and %.0f steps in %s", n.Load(), steps("node3")-before, took)
	}
	expectNoLoss(t, "rules change", traffic)
	bad.stop()
}

// changeSomething makes the nth change: by turns a policy's rules, a set's
// members, a policy that comes and goes, in the tiers that the traffic passes.
func changeSomething(t *testing.T, s store.Store, n int) error {
	t.Helper()
	put := func(v any) error {
		store.SetDefaults(v)
		key, err := store.KeyOf(v)
		if err != nil {
			return err
		}
		if _, err := store.Create(t.Context(), s, v); err == nil || !errors.Is(err, store.ErrExists) {
			return err
		}
		_, err = store.Modify(t.Context(), s, key, func(cur store.Object) (any, error) {
			if cur.Value == nil {
				return nil, nil // another change took it away meanwhile
			}
			meta := store.Meta(cur.Value)
			store.Meta(v).UID, store.Meta(v).CreationTimestamp = meta.UID, meta.CreationTimestamp
			return v, nil
		})
		if errors.Is(err, store.ErrNotFound) {
			return nil // somebody else's change took it away meanwhile
		}
		return err
	}
	switch n % 3 {
	case 0:
		p := &v3.GlobalNetworkPolicy{Spec: v3.GlobalNetworkPolicySpec{Tier: "cases", Selector: "all()", Ingress: []v3.Rule{
			{Action: v3.Pass, Source: v3.EntityRule{Nets: []string{fmt.Sprintf("203.0.%d.0/24", n%256)}}},
			{Action: v3.Deny, Source: v3.EntityRule{Selector: fmt.Sprintf("churn == 'n%d'", n%5)}},
		}}}
		p.Name = fmt.Sprintf("churn-%d", n%7)
		return put(p)
	case 1:
		g := &v3.GlobalNetworkSet{Spec: v3.GlobalNetworkSetSpec{Nets: []string{fmt.Sprintf("198.51.%d.0/24", n%256), "203.0.113.7/32"}}}
		g.Name, g.Labels = fmt.Sprintf("churn-%d", n%4), map[string]string{"churn": fmt.Sprintf("n%d", n%5)}
		return put(g)
	}
	err := store.Delete(t.Context(), s, store.ResourceKey(store.KindGlobalNetworkPolicy, fmt.Sprintf("churn-%d", n%7)), 0)
	if errors.Is(err, store.ErrNotFound) || errors.Is(err, store.ErrConflict) {
		return nil
	}
	return err
}

// testKilled kills the daemon of the host with the denied target, with -9, and
// starts it again: closed throughout, and open for what is allowed.
func testKilled(t *testing.T, l *lab.Lab, _ store.Store) {
	routerctl(t, l, "node1", denyManifest(), "apply", "-f", "-")
	settled(t, l)
	bad := startDenied(t, l, "node1/pod1", "node3/pod1")
	traffic := startLoad(t, l, [2]string{"node1/pod1", "node3/pod1"})
	for range 2 {
		if err := l.Kill(await.Context(t), "node3", unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		expectNoLoss(t, "as the daemon is killed", traffic)
		expectNoLoss(t, "daemon killed", traffic) // what was sent after its end alone
		if err := l.Restart(await.Context(t), "node3"); err != nil {
			t.Fatal(err)
		}
		settled(t, l)
		expectNoLoss(t, "daemon started again", traffic)
	}
	bad.stop()
}

// testFlush has another program flush all rules, as the start of a firewall
// does. Where the kernel lets the table belong to the daemon it is not even
// touched; elsewhere it is put back.
func testFlush(t *testing.T, l *lab.Lab, _ store.Store) {
	routerctl(t, l, "node1", denyManifest(), "apply", "-f", "-")
	settled(t, l)
	list := func() string { return output(t, l, "node3", "nft", "-s", "list", "ruleset") }
	before := list()
	owned := strings.Contains(before, "flags owner")
	for range 5 {
		output(t, l, "node3", "nft", "flush", "ruleset")
		if owned && !strings.Contains(list(), "table inet routerd") {
			t.Fatal("a flush reached a table that belongs to the daemon")
		}
		poll(t, "the table after a flush", func() string {
			if out := list(); !strings.Contains(out, "table inet routerd") {
				return out
			}
			return ""
		})
	}
	if one(t, l, "node1/pod1", addr(t, l, "node3/pod1"), unix.IPPROTO_UDP, deniedPort) {
		t.Error("what is denied passes after foreign flushes")
	}
	t.Logf("the table belongs to the daemon: %t", owned)
}
