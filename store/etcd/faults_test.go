package etcd_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/clock"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/embedded/clustertest"
	"github.com/routerd/routerd/store/etcd"
)

const (
	members = 3

	// long is more than an election takes, brief less than a connection's lease of life.
	long, brief = 2500 * time.Millisecond, 400 * time.Millisecond

	// callTime is how long a writer waits.
	callTime = 2 * time.Second
)

// trial is a cluster of etcd under a fault, with its own history, and those who read
// and write it by this package meanwhile.
type trial struct {
	t     *testing.T
	etcd  *clustertest.Cluster
	admin *clientv3.Client // of all members
	proxy *proxy           // nil: none
	truth truth

	stop    context.CancelFunc
	writers sync.WaitGroup
	acked   atomic.Int64

	mu     sync.Mutex
	writes []written
	logs   [][]store.Batch // of watches
}

// newTrial starts a cluster, writers and watches.
func newTrial(t *testing.T, o clustertest.Options, byProxy bool) *trial {
	t.Helper()
	o.Members = members
	x := &trial{t: t, etcd: clustertest.StartWith(t, o)}
	var err error
	x.admin, err = clientv3.New(clientv3.Config{Endpoints: x.etcd.Endpoints(), DialTimeout: time.Second, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { x.admin.Close() })
	await.Until(t, "etcd answers", func() error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := x.admin.Get(ctx, "x")
		return err
	})
	endpoints := x.etcd.Endpoints()
	if byProxy {
		x.proxy = startProxy(t, endpoints)
		endpoints = []string{"http://" + x.proxy.addr}
	}
	ctx, cancel := context.WithCancel(t.Context())
	x.stop = cancel
	recording, endRecord := context.WithCancel(t.Context())
	var record sync.WaitGroup
	record.Go(func() {
		if err := x.truth.record(recording, x.admin); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() { cancel(); x.writers.Wait(); endRecord(); record.Wait() })
	for i := range 3 {
		s := open(t, etcd.Config{Endpoints: endpoints, DialTimeout: time.Second})
		x.logs = append(x.logs, nil)
		ch := watch(t, s, store.KindIPAMHandle, store.KindIPAMConfig, store.KindServiceCIDR)
		var reader sync.WaitGroup
		reader.Go(func() {
			for b := range ch {
				x.mu.Lock()
				x.logs[i] = append(x.logs[i], b)
				x.mu.Unlock()
				if i == 2 { // this one is slow
					select {
					case <-time.After(20 * time.Millisecond):
					case <-t.Context().Done():
					}
				}
			}
		})
		t.Cleanup(func() { s.Close(); reader.Wait() })
		x.writers.Go(func() { x.write(ctx, s, i) })
	}
	x.progress()
	return x
}

// write makes random transactions until ctx ends. Each content is written once.
func (x *trial) write(ctx context.Context, s store.Store, me int) {
	const keys, own = 10, 3 // of which some are of a kind of routerd's own
	known := map[store.Key]store.Revision{}
	for n := 0; ctx.Err() == nil; n++ {
		var ops []store.Op
		for _, k := range rand.Perm(keys)[:1+rand.N(3)] {
			name, content := fmt.Sprint("h", k), fmt.Sprintf("writer %d, %d, %d", me, n, k)
			op := store.Op{Action: store.Put, Object: handle(name, content)}
			if k < own {
				op.Object = store.Object{Key: store.ServiceCIDRKey(name), Value: &store.ServiceCIDR{CIDRs: []string{content}}}
			}
			switch rev := known[op.Object.Key]; {
			case rev != 0:
				op.If = store.IfRevision(rev)
			case rand.N(2) == 0:
				op.If = store.IfAbsent()
			}
			if len(ops) > 0 && rand.N(4) == 0 {
				op.Action, op.Object.Value = store.Remove, nil
			}
			ops = append(ops, op)
		}
		call, cancel := context.WithTimeout(ctx, callTime)
		objs, err := s.Txn(call, ops...)
		cancel()
		x.mu.Lock()
		x.writes = append(x.writes, written{ops, objs, err})
		x.mu.Unlock()
		var conflict *store.ConflictError
		switch {
		case err == nil:
			x.acked.Add(1)
			for i, op := range ops {
				known[op.Object.Key] = objs[i].Revision // 0 of what was removed
			}
		case errors.As(err, &conflict):
			for _, o := range conflict.Current {
				known[o.Key] = o.Revision
			}
		case ctx.Err() == nil && !errors.Is(err, store.ErrUnavailable):
			x.t.Errorf("writer %d: %v", me, err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(rand.N(10 * time.Millisecond)):
		}
	}
}

// progress waits until some writes have been done from now on.
func (x *trial) progress() {
	x.t.Helper()
	want := x.acked.Load() + 20
	await.Until(x.t, "writes are done", func() error {
		if n := x.acked.Load(); n < want {
			return fmt.Errorf("%d are to come", want-n)
		}
		return nil
	})
}

// pass lets some time pass, as long as a fault lasts.
func (x *trial) pass(d time.Duration) {
	select {
	case <-time.After(d):
	case <-x.t.Context().Done():
	}
}

// leader returns which member leads.
func (x *trial) leader() (lead int) {
	x.t.Helper()
	await.Until(x.t, "there is a leader", func() error {
		for i, e := range x.etcd.Endpoints() {
			ctx, cancel := context.WithTimeout(x.t.Context(), time.Second)
			st, err := x.admin.Status(ctx, e)
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

// finish ends the writers, waits until all watches have seen the end, and checks
// all that was recorded.
func (x *trial) finish() {
	x.t.Helper()
	x.progress()
	x.stop()
	x.writers.Wait()
	var end int64
	endOwn := store.ServiceCIDRKey("end")
	await.Until(x.t, "a last write", func() error {
		ctx, cancel := context.WithTimeout(x.t.Context(), callTime)
		defer cancel()
		resp, err := x.admin.Txn(ctx).Then(clientv3.OpPut(store.IPAMConfigKey().Path(), `{"auto_allocate_blocks":true}`), clientv3.OpPut(endOwn.Path(), `{"cidrs":["end"]}`)).Commit()
		if err == nil {
			end = resp.Header.Revision
		}
		return err
	})
	// A transaction whose writer went away may come after the last write, and to a watch
	// before it comes to the recorder: what is compared is of one moment at which the
	// recorder has all that any watch has.
	var changes []change
	var logs [][]store.Batch
	await.Until(x.t, "everybody has seen the last write", func() error {
		x.mu.Lock()
		defer x.mu.Unlock()
		x.truth.mu.Lock()
		defer x.truth.mu.Unlock()
		seen := store.Revision(end)
		for i, log := range x.logs {
			if len(log) == 0 || log[len(log)-1].Revision < store.Revision(end) {
				return fmt.Errorf("watch %d has not come to %d", i, end)
			}
			own := false
			for _, b := range log {
				for _, e := range b.Events {
					seen = max(seen, e.Object.Revision)
					own = own || e.Key == endOwn && e.Object.Revision >= store.Revision(end)
				}
			}
			if !own {
				return fmt.Errorf("watch %d has not come to %d of routerd's own", i, end)
			}
		}
		if at := store.Revision(x.truth.rev); at < seen {
			return fmt.Errorf("etcd's own history is at %d of %d", at, seen)
		}
		changes, logs = slices.Clone(x.truth.changes), slices.Clone(x.logs)
		return nil
	})
	batches := 0
	for i, log := range logs {
		batches += len(log)
		for _, wrong := range checkWatch(changes, log) {
			x.t.Errorf("watch %d: %s", i, wrong)
		}
	}
	for _, wrong := range checkWrites(changes, x.writes) {
		x.t.Error(wrong)
	}
	x.t.Logf("%d transactions, %d done; %d changes in etcd's history, %d batches of %d watches", len(x.writes), x.acked.Load(), len(changes), batches, len(logs))
}

// membersKilled kills each member in turn, and then two at once.
func membersKilled(x *trial) {
	for i := range members {
		x.etcd.Kill(i)
		x.progress()
		x.etcd.Up(i)
		x.leader()
	}
	x.etcd.Kill(0)
	x.etcd.Kill(1)
	x.pass(brief)
	x.etcd.Up(0)
	x.etcd.Up(1)
}

// memberPaused stops the leader for so long that another is elected, and then one
// that follows.
func memberPaused(x *trial) {
	for _, behind := range []int{0, 1} {
		i := (x.leader() + behind) % members
		x.etcd.Pause(i)
		x.pass(long)
		x.etcd.Resume(i)
		x.progress()
	}
}

// memberParted parts each member from the others, with its clients.
func memberParted(x *trial) {
	for i := range members {
		x.etcd.Part(i)
		x.pass(long)
		x.etcd.Join(i)
		x.progress()
	}
}

// leaderMoves moves the lead around.
func leaderMoves(x *trial) {
	for range 6 {
		lead := x.leader()
		ids := map[int]uint64{}
		for i, e := range x.etcd.Endpoints() {
			st, err := x.admin.Status(x.t.Context(), e)
			if err != nil {
				x.t.Fatal(err)
			}
			ids[i] = st.Header.MemberId
		}
		c, err := clientv3.New(clientv3.Config{Endpoints: []string{x.etcd.Endpoint(lead)}, Logger: zap.NewNop()})
		if err != nil {
			x.t.Fatal(err)
		}
		_, err = c.MoveLeader(x.t.Context(), ids[(lead+1)%members])
		c.Close()
		if err != nil && !errors.Is(err, context.DeadlineExceeded) {
			x.t.Logf("move the lead from member %d: %v", lead, err) // it has moved by itself
		}
		x.progress()
	}
}

// compacted forgets etcd's history while a member that watches are served by is away, so
// that they come back to find it gone.
func compacted(x *trial) {
	for i := range members {
		x.etcd.Pause(i)
		x.pass(brief)
		x.compact()
		x.pass(long)
		x.etcd.Resume(i)
		x.progress()
	}
}

// compact forgets etcd's history, but not what its recorder has still to read.
func (x *trial) compact() {
	x.t.Helper()
	await.Until(x.t, "the history is compacted", func() error {
		ctx, cancel := context.WithTimeout(x.t.Context(), time.Second)
		defer cancel()
		_, err := x.admin.Compact(ctx, x.truth.at(), clientv3.WithCompactPhysical())
		if err != nil && strings.Contains(err.Error(), "required revision has been compacted") {
			return nil
		}
		return err
	})
}

// full fills the database beyond its quota, looks at what is said then, and makes room.
func full(x *trial) {
	ctx := await.Context(x.t)
	// Members with much to do answer late, or that they did not in time.
	done := func(what string, do func() error) {
		x.t.Helper()
		await.Until(x.t, what, do)
	}
	config := store.IPAMConfigKey().Path()
	done("there is a configuration", func() error { _, err := x.admin.Put(ctx, config, `{}`); return err })
	junk := strings.Repeat("x", 512<<10)
	i := 0
	done("the database fills", func() error {
		_, err := x.admin.Put(ctx, fmt.Sprint("/junk/", i), junk)
		if i++; err == nil {
			return errors.New("there is room")
		}
		if strings.Contains(err.Error(), "space exceeded") {
			return nil
		}
		return err
	})
	s := open(x.t, etcd.Config{Endpoints: x.endpoints()})
	await.Until(x.t, "writes are refused, with the cure", func() error {
		err := write(ctx, s)
		if err == nil {
			return errors.New("it was done")
		}
		for _, word := range []string{"the database is full", "compact and defragment", "NOSPACE"} {
			if !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), word) {
				return err
			}
		}
		return nil
	})
	done("a full database is read", func() error { _, _, err := s.List(ctx, store.KindIPAMHandle, ""); return err })
	// What is deleted can be, and comes to the recorder of the history before it is
	// forgotten.
	done("the junk is deleted", func() error { _, err := x.admin.Delete(ctx, "/junk/", clientv3.WithPrefix()); return err })
	done("the configuration is deleted", func() error { _, err := x.admin.Delete(ctx, config); return err })
	await.True(x.t, "the recorder has come so far", func() bool { return x.truth.deleted(config) })
	x.compact()
	for _, e := range x.etcd.Endpoints() {
		done("it is defragmented", func() error { _, err := x.admin.Defragment(ctx, e); return err })
	}
	await.Until(x.t, "the alarm is off", func() error {
		ctx, cancel := context.WithTimeout(x.t.Context(), callTime)
		defer cancel()
		if _, err := x.admin.AlarmDisarm(ctx, &clientv3.AlarmMember{}); err != nil { // of whatever member
			return err
		}
		return write(ctx, s)
	})
}

// diskSlow makes all disks slow, and then the leader's stand still.
func diskSlow(x *trial) {
	for i := range members {
		x.etcd.SlowDisk(i, 100*time.Millisecond)
	}
	x.pass(long)
	x.progress()
	for i := range members {
		x.etcd.SlowDisk(i, 0)
	}
	lead := x.leader()
	x.etcd.SlowDisk(lead, long)
	x.pass(long)
	x.etcd.SlowDisk(lead, 0)
}

// clockJumps lets the clocks of the leader, of a member that follows, and of all jump by
// an hour.
func clockJumps(x *trial) {
	jump := func(i int, by time.Duration) {
		if err := clock.Set(await.Context(x.t), x.etcd.PID(i), by); err != nil {
			x.t.Fatal(err)
		}
	}
	for _, by := range []time.Duration{time.Hour, -time.Hour, 0} {
		lead := x.leader()
		for i := range members {
			jump((lead+i)%members, by)
			x.progress()
		}
	}
}

// proxyKilled kills etcd's grpc-proxy, through which all go.
func proxyKilled(x *trial) {
	for range 3 {
		x.proxy.kill()
		x.pass(brief)
		x.proxy.start()
		x.progress()
	}
}

// faults are those of etcd, by name.
func faults() map[string]trialOf {
	return map[string]trialOf{
		"members killed":    {fault: membersKilled},
		"member paused":     {fault: memberPaused},
		"member parted":     {fault: memberParted},
		"leader moves":      {fault: leaderMoves},
		"history compacted": {fault: compacted},
		"quota exceeded":    {clustertest.Options{Quota: 16 << 20}, full},
		"disk slow":         {clustertest.Options{Disk: true}, diskSlow},
		"clock jumps":       {fault: clockJumps},
	}
}

type trialOf struct {
	o     clustertest.Options
	fault func(*trial)
}

func (of trialOf) run(t *testing.T, byProxy bool) {
	t.Parallel()
	x := newTrial(t, of.o, byProxy)
	of.fault(x)
	x.finish()
}

// TestFaults: whatever becomes of etcd's members, no watch loses, invents or reorders
// a change, and what a writer was told is so.
func TestFaults(t *testing.T) {
	t.Parallel()
	for name, of := range faults() {
		t.Run(name, func(t *testing.T) { of.run(t, false) })
	}
}

// TestFaultsBehindProxy: the same through etcd's grpc-proxy, and when that dies.
func TestFaultsBehindProxy(t *testing.T) {
	t.Parallel()
	all := faults()
	all["proxy killed"] = trialOf{fault: proxyKilled}
	for name, of := range all {
		t.Run(name, func(t *testing.T) { of.run(t, true) })
	}
}

// endpoints are those by which this package is used here.
func (x *trial) endpoints() []string {
	if x.proxy != nil {
		return []string{"http://" + x.proxy.addr}
	}
	return x.etcd.Endpoints()
}

// proxy is Debian's `etcd grpc-proxy`.
type proxy struct {
	t    *testing.T
	addr string
	args []string
	cmd  *exec.Cmd
	log  strings.Builder
}

func startProxy(t *testing.T, endpoints []string) *proxy {
	t.Helper()
	p := &proxy{t: t, addr: freePort(t)}
	p.args = []string{"grpc-proxy", "start", "--endpoints=" + strings.Join(endpoints, ","), "--listen-addr=" + p.addr, "--data-dir=" + t.TempDir()}
	p.start()
	t.Cleanup(p.kill)
	return p
}

func (p *proxy) start() {
	p.t.Helper()
	p.cmd = exec.Command("etcd", p.args...)
	p.cmd.Env = append(os.Environ(), "ETCD_UNSUPPORTED_ARCH=")
	p.cmd.Stdout, p.cmd.Stderr = &p.log, &p.log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
}

func (p *proxy) kill() {
	if p.cmd == nil {
		return
	}
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait() // it was killed
	p.cmd = nil
	if p.t.Failed() {
		p.t.Logf("log of the proxy:\n%s", p.log.String())
	}
}
