package kernel

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/kernel/saboteur"
	"github.com/routerd/routerd/integration/await"
)

// busyHost is what a host with many peers wants.
func busyHost() []dataplane.Object {
	objs := host()
	for i := range 60 {
		m := dataplane.MAC{0x66, 7, 2, 0xc2, 0, byte(i)}
		vtep, id := addr(fmt.Sprintf("192.168.100.%d", i+1)), dataplane.NextHopID(100+i)
		objs = append(objs,
			dataplane.Neighbour{Link: nameVXLAN, Addr: vtep, MAC: m},
			dataplane.FDBEntry{Link: nameVXLAN, MAC: m, Dst: addr(fmt.Sprintf("10.0.0.%d", 100+i))},
			dataplane.NextHop{ID: id, Link: nameVXLAN, Gateway: vtep, OnLink: true},
		)
		for j := range 4 {
			objs = append(objs, route(fmt.Sprintf("172.20.%d.%d/26", i, j*64), id))
		}
		objs = append(objs, route(fmt.Sprintf("fd20:%d::/122", i), 9))
		if i > 0 {
			objs = append(objs, group(id+100, id-1, id), route(fmt.Sprintf("172.21.%d.0/24", i), id+100))
		}
	}
	return append(objs, via(9, "fd00::9", "up0"), dataplane.Feature{Link: nameVXLAN, Name: offload},
		dataplane.Sysctl{Name: "net/ipv4/ip_forward", Value: "1"}, dataplane.Sysctl{Name: "net/ipv4/conf/up0/rp_filter", Value: "1"},
		dataplane.Forwarding(nameVXLAN))
}

// repairs counts what Hooks.Repaired told.
type repairs struct {
	mu   sync.Mutex
	took []time.Duration
}

func (r *repairs) hook(cfg *Config, _ *int, _ *func(transport) transport) {
	cfg.Hooks.Repaired = func(_ dataplane.Kind, took time.Duration) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.took = append(r.took, took)
	}
}

func (r *repairs) sorted() []time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Sorted(slices.Values(r.took))
}

// TestSaboteur strikes at a busy host for eight seconds. Afterwards the kernel
// is as wanted, each strike is in the log, each repair in the log and counted.
func TestSaboteur(t *testing.T) {
	t.Parallel()
	var count repairs
	l, k := dualHost(t, count.hook)
	objs := busyHost()
	k.put(objs...)
	k.settled()
	s := &saboteur.Saboteur{
		Exec: l.try, Rand: rand.New(rand.NewPCG(1, uint64(time.Now().UnixNano()))), Devices: []string{nameVXLAN},
		Sysctls: []string{"net/ipv4/ip_forward", "net/ipv4/conf/up0/rp_filter"},
		Offload: "feature " + offload + " dev " + nameVXLAN,
		Switch: func() error {
			if l.feature(nameVXLAN, offload) != "false <nil>" {
				return errors.New("it is not back yet")
			}
			return l.switchFeature(nameVXLAN, offload, true)
		},
	}
	var strikes []saboteur.Strike
	for range 8 { // a slow machine gets more time
		ctx, cancel := context.WithTimeout(t.Context(), 8*time.Second)
		strikes = append(strikes, s.Run(ctx, 60*time.Millisecond)...)
		cancel()
		if len(strikes) >= 20 {
			break
		}
	}
	for _, st := range strikes {
		await.Until(t, "the log names "+st.Object+" after "+st.Command, func() error {
			if !strings.Contains(k.log.String(), "somebody else, putting it back\" object=\""+st.Object+"\"") {
				return errors.New("not yet")
			}
			return nil
		})
	}
	k.caughtUp()
	log := k.log.String()
	took := count.sorted()
	if n := strings.Count(log, `msg="put back"`); n != len(took) || n < len(strikes) {
		t.Errorf("%d strikes, %d repairs in the log, %d counted", len(strikes), n, len(took))
	}
	if strings.Contains(log, "keeps changing it") {
		t.Error("taken for a quarrel")
	}
	if len(strikes) < 20 {
		t.Errorf("only %d strikes", len(strikes))
	}
	t.Logf("%d strikes, %d repairs: half within %v, nine of ten within %v, all within %v",
		len(strikes), len(took), took[len(took)/2], took[len(took)*9/10], took[len(took)-1])
	l.isAsAFreshStartMakesIt(k, objs)
}

// caughtUp waits until everything that happened before is put right.
func (r *running) caughtUp() {
	r.t.Helper()
	// A pass begins with all that the kernel has told.
	mark := dataplane.Route{Prefix: pfx("203.0.113.0/24"), Table: dataplane.MainTable, Type: dataplane.Blackhole}
	r.put(mark)
	r.del(mark)
	r.settled()
}

// tables shows all that a Kernel may make.
func (l *lab) tables() string {
	return l.run("ip -4 -d route show table all proto 77", "ip -6 -d route show table all proto 77", "ip -d nexthop show proto 77", "bridge fdb show dev vxlan.calico",
		"ip neigh show nud permanent", "ip -o addr show dev vxlan.calico", "ip -d link show type vxlan")
}

// isAsAFreshStartMakesIt stops k, starts another with the same wishes, which
// must find nothing to do, and compares with a kernel that has never seen
// anything else.
func (l *lab) isAsAFreshStartMakesIt(k *running, objs []dataplane.Object) {
	l.t.Helper()
	k.stop()
	next := l.start(func(cfg *Config, _ *int, _ *func(transport) transport) {
		cfg.Hooks.Written = func(kind dataplane.Kind, removed bool, n int) {
			l.t.Logf("the fresh start writes %d of kind %v, removed: %v", n, kind, removed)
		}
	})
	next.wait(next.Replace(dataplane.SourceCore, objs))
	next.synced()
	next.ready()
	next.settled()
	if n := next.writer.writes.Load(); n != 0 {
		l.t.Errorf("a fresh start writes %d times:\n%s", n, next.log)
	}
	next.stop()
	other, fresh := dualHost(l.t)
	fresh.wait(fresh.Replace(dataplane.SourceCore, objs))
	fresh.settled()
	if diff := cmp.Diff(plain(other.tables()), plain(l.tables())); diff != "" {
		l.t.Errorf("differs from a fresh kernel (-fresh +this):\n%s", diff)
	}
}

// plain takes out of a listing what chance put in: the indexes of devices, and
// the order of hash tables.
func plain(s string) []string {
	var lines []string
	for line := range strings.Lines(s) {
		f := strings.Fields(line)
		if len(f) > 1 && strings.HasSuffix(f[0], ":") {
			f = f[1:]
		}
		lines = append(lines, strings.Join(f, " "))
	}
	slices.Sort(lines)
	return lines
}
