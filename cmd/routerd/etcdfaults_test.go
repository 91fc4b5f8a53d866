package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/clock"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/embedded/clustertest"
	"github.com/routerd/routerd/store/etcd"
)

// etcdWorld is a host whose daemon has a three-member etcd.
type etcdWorld struct {
	*running
	t     *testing.T
	etcd  *clustertest.Cluster
	admin *clientv3.Client
	store *etcd.Store
	tor   *birdTOR
	pods  int
}

// electionTime is longer than an election takes.
const electionTime = 2500 * time.Millisecond

// newEtcdWorld starts the host, whose daemon uses etcd by its proxy or itself, and peers
// with a switch.
func newEtcdWorld(t *testing.T, byProxy bool) *etcdWorld {
	t.Helper()
	h := newHost(t, "10.1.0.11/24")
	h.quietIPv6()
	tor := newBirdTOR(t, 90)
	tor.plug(h)
	c := clustertest.StartWith(t, clustertest.Options{Members: 3, Quota: 16 << 20, Disk: true})
	endpoints := c.Endpoints()
	if byProxy {
		endpoints = []string{"http://" + h.proxy(strings.Join(endpoints, ","))}
	}
	h.config["datastore"] = map[string]any{"endpoints": endpoints, "dialTimeout": "1s"}
	w := &etcdWorld{running: h.start(), t: t, etcd: c, tor: tor}
	var err error
	w.admin, err = clientv3.New(clientv3.Config{Endpoints: c.Endpoints(), DialTimeout: time.Second, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.admin.Close() })
	if w.store, err = etcd.Open(t.Context(), etcd.Config{Endpoints: c.Endpoints()}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.store.Close() })
	w.ready()
	h.addNode(w.store, "node2", "10.1.0.12/24", "192.168.200.1", "192.168.200.0/26")
	h.addNode(w.store, "node3", "10.2.0.11/24", "192.168.201.1", "192.168.201.0/26")
	peer := v3.NewBGPPeer()
	peer.Name, peer.Spec.PeerIP, peer.Spec.ASNumber = "tor", torAddr, 64999
	if _, err := store.Create(t.Context(), w.store, peer); err != nil {
		t.Fatal(err)
	}
	if _, err := w.attach("stays"); err != nil {
		t.Fatal(err)
	}
	await.Until(t, "routes to the peers, the switch's, and the switch's to the host", func() error {
		return errors.Join(h.lists("route", behindTOR), mentions(tor.routes(), "192.168.", "via 10.1.0.11"), h.lists("route", "192.168.200.0/26 nhid"), h.lists("route", "192.168.201.0/26 nhid"), h.lists("route", "dev cali"))
	})
	w.settled()
	return w
}

// settled waits until the daemon has nothing to write any more.
func (w *etcdWorld) settled() {
	w.t.Helper()
	var last int64
	await.Until(w.t, "nothing more is written", func() error {
		ctx, cancel := context.WithTimeout(w.t.Context(), time.Second)
		defer cancel()
		<-time.After(200 * time.Millisecond) // nobody tells that there is nothing more
		resp, err := w.admin.Get(ctx, "x")
		if err != nil {
			return err
		}
		was := last
		if last = resp.Header.Revision; last != was {
			return fmt.Errorf("etcd was at %d and is at %d", was, last)
		}
		return nil
	})
}

// leader returns which member leads.
func (w *etcdWorld) leader() (lead int) {
	w.t.Helper()
	await.Until(w.t, "there is a leader", func() error {
		for i, e := range w.etcd.Endpoints() {
			ctx, cancel := context.WithTimeout(w.t.Context(), time.Second)
			st, err := w.admin.Status(ctx, e)
			cancel()
			if err == nil && st.Header.MemberId == st.Leader {
				lead = i
				return nil
			}
		}
		return errors.New("no member leads")
	})
	return lead
}

// works checks that the host is live and ready, that a workload comes and goes, also in
// the datastore, and that what others write arrives.
func (w *etcdWorld) works() {
	w.t.Helper()
	w.pods++
	id := fmt.Sprint("pod", w.pods)
	got, err := w.attach(id)
	if err != nil {
		w.t.Fatal(err)
	}
	addr := netip.MustParsePrefix(got.GetAddresses()[0].GetCidr()).Addr().String()
	known := func(want bool) func() error {
		return func() error {
			held, endpoints, err := holders(w.t, w.store)
			if err == nil && ((held[addr] != "") != want || endpoints[addr] != want) {
				err = fmt.Errorf("held %v, endpoints %v", held, endpoints)
			}
			return err
		}
	}
	await.Until(w.t, "the datastore knows of the workload", known(true))
	if err := w.detach(id); err != nil {
		w.t.Fatal(err)
	}
	await.Until(w.t, "the datastore knows of its end", known(false))
	block := fmt.Sprintf("192.168.210.%d/32", w.pods)
	w.host.addBlock(w.store, "node2", block)
	route := strings.TrimSuffix(block, "/32") + " nhid"
	await.Until(w.t, "what another host wrote arrives", func() error { return w.lists("route", route) })
	cidr := netip.MustParsePrefix(block)
	for _, key := range []store.Key{store.BlockKey(cidr), store.AffinityKey("node2", cidr)} {
		if err := store.Delete(w.t.Context(), w.store, key, 0); err != nil {
			w.t.Fatal(err)
		}
	}
	await.Until(w.t, "and goes", func() error {
		if strings.Contains(w.ip("route"), route) {
			return errors.New("it is there")
		}
		return nil
	})
	w.when("live and ready", func(n *apiv1.NodeResponse) error {
		if c := conditionOf(n, "Datastore"); !c.GetOk() {
			return errors.New(c.GetReason())
		}
		if c := n.GetHealth().GetReady(); !c.GetOk() {
			return errors.New(c.GetReason())
		}
		return nil
	})
}

// quiet makes a fault, and checks that it touches nothing in the kernel nor in the switch,
// and that the host is live all the time.
func (w *etcdWorld) quiet(t *testing.T, fault func()) {
	t.Helper()
	m, routes := w.monitor(), w.tor.routes()
	since, session := w.tor.session()
	alive, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for alive.Err() == nil {
			n, err := w.op.Node(alive, &apiv1.NodeRequest{})
			if c := n.GetHealth().GetLive(); alive.Err() == nil && (err != nil || !c.GetOk()) {
				t.Errorf("not live under the fault: %v %s", err, c.GetReason())
				return
			}
			select {
			case <-alive.Done():
			case <-time.After(50 * time.Millisecond):
			}
		}
	}()
	fault()
	stop()
	<-done
	if got := m.changes(); len(got) > 0 {
		t.Errorf("the fault changed in the kernel:\n%s", strings.Join(got, "\n"))
	}
	sinceNow, sessionNow := w.tor.session()
	if diff := cmp.Diff(session+"\n"+routes, sessionNow+"\n"+w.tor.routes()); diff != "" {
		t.Errorf("the fault changed in the switch (-before +after):\n%s", diff)
	}
	if off := sinceNow.Sub(since).Abs(); off > 100*time.Millisecond {
		t.Errorf("the session is up since %s, and was since %s", sinceNow.Format(time.TimeOnly), since.Format(time.TimeOnly))
	}
}

func (w *etcdWorld) pass(d time.Duration) {
	select {
	case <-time.After(d):
	case <-w.t.Context().Done():
	}
}

// jump lets the wall clock of a process be so much off.
func (w *etcdWorld) jump(pid int, by time.Duration) {
	w.t.Helper()
	if err := clock.Set(await.Context(w.t), pid, by); err != nil {
		w.t.Fatal(err)
	}
}

// moveLead has the member that leads hand the lead to the next one.
func (w *etcdWorld) moveLead() {
	w.t.Helper()
	lead := w.leader()
	st, err := w.admin.Status(w.t.Context(), w.etcd.Endpoint((lead+1)%3))
	if err != nil {
		w.t.Fatal(err)
	}
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{w.etcd.Endpoint(lead)}, Logger: zap.NewNop()})
	if err != nil {
		w.t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.MoveLeader(w.t.Context(), st.Header.MemberId); err != nil {
		w.t.Logf("move the lead from member %d: %v", lead, err) // it has moved by itself
	}
}

// etcdFault is what may happen to etcd, or to a clock.
type etcdFault struct {
	name  string
	fault func()
}

func (w *etcdWorld) faults() []etcdFault {
	return []etcdFault{
		{"member killed", func() {
			for i := range 3 {
				w.etcd.Kill(i)
				w.pass(electionTime / 5)
				w.etcd.Up(i)
				w.leader()
			}
		}},
		{"all members killed", func() {
			for i := range 3 {
				w.etcd.Kill(i)
			}
			w.pass(electionTime)
			for i := range 3 {
				w.etcd.Up(i)
			}
		}},
		{"leadership moves", func() {
			for range 6 {
				w.moveLead()
				w.pass(electionTime / 5)
			}
		}},
		{"leader paused", func() {
			i := w.leader()
			w.etcd.Pause(i)
			w.pass(electionTime)
			w.etcd.Resume(i)
		}},
		{"member parted", func() {
			i := w.leader()
			w.etcd.Part(i)
			w.pass(electionTime)
			w.etcd.Join(i)
		}},
		{"disk slow", func() {
			for i := range 3 {
				w.etcd.SlowDisk(i, 200*time.Millisecond)
			}
			w.pass(electionTime)
			for i := range 3 {
				w.etcd.SlowDisk(i, 0)
			}
		}},
		{"history compacted", func() {
			i := w.leader()
			w.etcd.Pause(i)
			await.Until(w.t, "the history is compacted", func() error {
				ctx, cancel := context.WithTimeout(w.t.Context(), time.Second)
				defer cancel()
				resp, err := w.admin.Get(ctx, "x")
				if err == nil {
					_, err = w.admin.Compact(ctx, resp.Header.Revision, clientv3.WithCompactPhysical())
				}
				return err
			})
			w.etcd.Resume(i)
		}},
		{"clock of an etcd member jumps", func() {
			for _, by := range []time.Duration{time.Hour, -time.Hour, 0} {
				w.jump(w.etcd.PID(w.leader()), by)
				w.pass(electionTime / 5)
			}
		}},
		{"clock of the host jumps", func() {
			for _, by := range []time.Duration{time.Hour, -time.Hour, 0} {
				w.jump(w.cmd.Process.Pid, by)
				w.pass(electionTime / 2)
			}
		}},
	}
}

// run makes a fault, and looks whether the host works afterwards.
func (w *etcdWorld) run(t *testing.T, f etcdFault) {
	t.Run(f.name, func(t *testing.T) {
		w.quiet(t, f.fault)
		w.works()
		w.settled()
	})
}

// TestEtcdFaultsBehindProxy: the same through `etcd grpc-proxy`, of those that end the
// connections behind it and of those that do not.
func TestEtcdFaultsBehindProxy(t *testing.T) {
	t.Parallel()
	w := newEtcdWorld(t, true)
	for _, f := range w.faults() {
		if f.name == "member killed" || f.name == "leadership moves" {
			w.run(t, f)
		}
	}
}

// TestEtcdFaults: whatever becomes of a three-member etcd, or of clocks, nothing in the
// kernel is touched for it, no route of a switch, and the host works afterwards.
func TestEtcdFaults(t *testing.T) {
	t.Parallel()
	w := newEtcdWorld(t, false)
	for _, f := range w.faults() {
		w.run(t, f)
	}
	// Under a clock that is wrong all the time workloads come and go as well.
	for _, by := range []time.Duration{time.Hour, -time.Hour, 0} {
		t.Run("works with the clock "+by.String()+" off", func(t *testing.T) {
			w.jump(w.cmd.Process.Pid, by)
			w.works()
			w.settled()
		})
	}
	t.Run("quota exceeded", func(t *testing.T) { w.testQuota(t) })
}

// testQuota fills etcd beyond its quota: what runs keeps running, ADD and DEL go on out
// of the reserve, and the datastore hears of them when there is room.
func (w *etcdWorld) testQuota(t *testing.T) {
	ctx := await.Context(t)
	w.quiet(t, func() {
		junk := strings.Repeat("x", 512<<10)
		var err error
		for i := 0; err == nil && ctx.Err() == nil; i++ {
			_, err = w.admin.Put(ctx, fmt.Sprint("/junk/", i), junk)
		}
		if err == nil || !strings.Contains(err.Error(), "space exceeded") {
			t.Fatalf("etcd did not fill: %v", err)
		}
	})
	got, err := w.attach("full")
	if err != nil {
		t.Fatalf("ADD with a full etcd: %v", err)
	}
	addr := netip.MustParsePrefix(got.GetAddresses()[0].GetCidr()).Addr().String()
	resp, err := w.admin.Delete(ctx, "/junk/", clientv3.WithPrefix())
	if err == nil {
		_, err = w.admin.Compact(ctx, resp.Header.Revision, clientv3.WithCompactPhysical())
	}
	for _, e := range w.etcd.Endpoints() {
		if err == nil {
			_, err = w.admin.Defragment(ctx, e)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	await.Until(t, "the datastore knows of the workload when there is room", func() error {
		if _, err := w.admin.AlarmDisarm(ctx, &clientv3.AlarmMember{}); err != nil {
			return err
		}
		held, endpoints, err := holders(t, w.store)
		if err == nil && (held[addr] == "" || !endpoints[addr]) {
			err = fmt.Errorf("held %v, endpoints %v", held, endpoints)
		}
		return err
	})
	w.works()
}
