package ipam

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/memory"
)

// life is a host with its disk: what outlives a crash, and the allocator that
// does not.
type life struct {
	name    string
	disk    *disk
	records map[string]netip.Addr // by handle: what workloads were told, as a journal has it
	told    map[string]bool       // by handle: the datastore may have heard of it
	going   map[string]bool       // by handle: it is on its way out
	h       *host
}

// reserveMachine drives hosts with a reserve beside the simplest reference there
// is: who has which address, and what rests. Between any two steps the host may
// be killed; then only what is on its disk counts.
type reserveMachine struct {
	dir       string // where the hosts keep their copies of the cluster; empty: nowhere
	st        *memory.Store
	clock     *clock
	lives     map[string]*life
	cooldown  time.Duration
	reserved  netip.Prefix
	off, away bool

	owner  map[netip.Addr]string
	rested map[netip.Addr]time.Time // until when
}

func newReserveMachine(t *rapid.T, dir string) *reserveMachine {
	m := &reserveMachine{
		dir: dir, st: memory.New(), clock: newClock(), lives: map[string]*life{},
		owner: map[netip.Addr]string{}, rested: map[netip.Addr]time.Time{},
	}
	config := store.DefaultIPAMConfig()
	if rapid.Bool().Draw(t, "cool-down") {
		cool := 60
		m.cooldown, config.IPCooldownSeconds = time.Minute, &cool
	}
	put(t, m.st, &config, m.pool())
	for _, n := range []string{"a", "b"} {
		put(t, m.st, newNode(n, nil))
		m.lives[n] = &life{name: n, disk: &disk{file: m.fileOf(n)}, records: map[string]netip.Addr{}, told: map[string]bool{}, going: map[string]bool{}}
		m.boot(t, m.lives[n])
		filled(t, m.lives[n].h, "p", 3)
	}
	return m
}

func (m *reserveMachine) pool() *v3.IPPool {
	return newPool("p", "10.0.0.0/26", blockSize(29), func(s *v3.IPPoolSpec) { s.Disabled = m.off })
}

// fileOf returns where a host keeps its copy of the cluster; empty: nowhere.
func (m *reserveMachine) fileOf(host string) string {
	if m.dir == "" {
		return ""
	}
	return filepath.Join(m.dir, host, "cluster.journal")
}

// boot starts a host with what its disk knows.
func (m *reserveMachine) boot(t *rapid.T, l *life) {
	a := New(Config{
		Store: m.st, Node: l.name, Log: slog.New(slog.DiscardHandler), Clock: m.clock.time, Timeout: 20 * time.Second,
		Reserve: ReserveConfig{Min: 3, Max: 6, Journal: l.disk},
	})
	for handle, addr := range l.records {
		a.Claim(handle, addr)
	}
	l.h = run(t, a, m.st)
	if !m.away {
		settle(t, l.h, "the present state", func(s *state) bool { return s.synced })
	}
}

func (m *reserveMachine) crash(t *rapid.T, l *life) {
	l.h.stop()
	m.boot(t, l)
}

func (m *reserveMachine) pick(t *rapid.T) *life {
	return m.lives[rapid.SampledFrom([]string{"a", "b"}).Draw(t, "host")]
}

// steps carries steps out in order; the host may be killed before any of them,
// or after the last.
func (m *reserveMachine) steps(t *rapid.T, l *life, steps ...func()) {
	killed := rapid.IntRange(0, 3*len(steps)).Draw(t, "killed before")
	for i, s := range steps {
		if i == killed {
			m.crash(t, l)
			return
		}
		s()
	}
	if killed == len(steps) {
		m.crash(t, l)
	}
}

// add gives a workload an address, out of the reserve or the long way.
func (m *reserveMachine) add(t *rapid.T) {
	l := m.pick(t)
	handle := fmt.Sprintf("%s.%d", l.name, rapid.IntRange(0, 5).Draw(t, "handle"))
	if _, known := l.records[handle]; known {
		return
	}
	var got Assignment
	m.steps(t, l, func() {
		if as, ok := l.h.Take(part4(handle)); ok {
			got = as[0]
		} else if m.away {
			return
		} else if as, err := l.h.Assign(context.Background(), Request{Family: v4("").Family, Handle: handle, Idempotent: true}); err == nil {
			got = as[0]
			l.told[handle] = true
		} else if !errors.Is(err, ErrExhausted) && !errors.Is(err, ErrNoPool) {
			t.Fatalf("assign: %v", err)
		}
		if !got.Addr.IsValid() {
			return
		}
		switch a := got.Addr; {
		case m.owner[a] != "":
			t.Fatalf("%s is given to %s, and %s has it", a, handle, m.owner[a])
		case m.clock.time().Before(m.rested[a]):
			t.Fatalf("%s is given to %s, and rests until %s", a, handle, m.rested[a])
		case m.reserved.IsValid() && m.reserved.Contains(a) && !l.told[handle]:
			t.Fatalf("%s is given to %s out of the reserve, and is set aside", a, handle)
		case m.off && !l.told[handle]:
			t.Fatalf("%s is given to %s out of a pool that is off", a, handle)
		}
	}, func() {
		if got.Addr.IsValid() {
			l.records[handle], m.owner[got.Addr] = got.Addr, handle
		}
	})
}

// confirm tells the datastore of what a host gave.
func (m *reserveMachine) confirm(t *rapid.T) {
	l := m.pick(t)
	if m.away {
		return
	}
	var cs []Confirmation
	for _, handle := range slices.Sorted(maps.Keys(l.records)) {
		if l.going[handle] {
			continue
		}
		cs = append(cs, Confirmation{Addr: l.records[handle], Handle: handle})
	}
	m.steps(t, l, func() {
		for i, err := range l.h.Confirm(context.Background(), cs...) {
			if err != nil {
				t.Fatalf("confirm %+v: %v", cs[i], err)
			}
			l.told[cs[i].Handle] = true
		}
	})
}

// del ends a workload: the datastore hears of it if it may have heard of the
// beginning, then the record goes, then others may have the address.
func (m *reserveMachine) del(t *rapid.T) {
	l := m.pick(t)
	known := slices.Sorted(maps.Keys(l.records))
	if len(known) == 0 {
		return
	}
	handle := rapid.SampledFrom(known).Draw(t, "workload")
	if m.away && l.told[handle] {
		return
	}
	addr := l.records[handle]
	m.steps(t, l, func() {
		if !l.going[handle] && m.cooldown > 0 {
			m.rested[addr] = m.clock.time().Add(m.cooldown - time.Second) // blocks keep whole seconds
		}
		l.going[handle] = true
	}, func() {
		if !l.told[handle] {
			return
		}
		if _, err := l.h.ReleaseHandleHere(context.Background(), handle); err != nil {
			t.Fatalf("release %s: %v", handle, err)
		}
	}, func() {
		if err := l.h.CoolDown(handle); err != nil {
			t.Fatalf("rest: %v", err)
		}
	}, func() {
		delete(l.records, handle)
		delete(l.told, handle)
		delete(l.going, handle)
		delete(m.owner, addr)
	}, func() { l.h.Unclaim(handle) })
}

// edit changes what may be given, and waits until the hosts have heard of it.
func (m *reserveMachine) edit(t *rapid.T) {
	if m.away {
		return
	}
	var cidrs []string
	if m.reserved = (netip.Prefix{}); rapid.Bool().Draw(t, "reservation") {
		first := netip.AddrFrom4([4]byte{10, 0, 0, byte(8 * rapid.IntRange(0, 7).Draw(t, "reserved"))})
		m.reserved = netip.PrefixFrom(first, rapid.IntRange(28, 31).Draw(t, "length")).Masked()
		cidrs = []string{m.reserved.String()}
	}
	m.off = rapid.IntRange(0, 3).Draw(t, "off") == 0
	put(t, m.st, newReservation("r", cidrs...), m.pool())
	for _, l := range m.lives {
		settle(t, l.h, "the edit", func(s *state) bool {
			return len(s.reserved) == len(cidrs) && (len(cidrs) == 0 || s.reserved[0] == m.reserved) && s.pools["p"] != nil && (s.pools["p"].off != "") == m.off
		})
	}
}

// outage makes the datastore unreachable, or reachable again.
func (m *reserveMachine) outage(t *rapid.T) {
	if m.away = !m.away; m.away {
		m.st.Fail(errors.New("away"))
		return
	}
	m.st.Fail(nil)
	for _, l := range m.lives {
		settle(t, l.h, "the present state", func(s *state) bool { return s.synced })
	}
}

// stored returns what blocks say, at one revision: the hosts go on writing.
func (m *reserveMachine) stored(t *rapid.T) map[netip.Addr]string {
	objs, _, err := m.st.List(context.Background(), store.KindIPAMBlock, "")
	if err != nil {
		t.Fatalf("list: %v", err)
	}
	out := map[netip.Addr]string{}
	for _, o := range objs {
		list, err := Allocations(o.Key.CIDR(), o.Value.(*store.Block))
		if err != nil {
			t.Fatalf("%v", err)
		}
		for _, a := range list {
			out[a.Addr] = a.Handle
		}
	}
	return out
}

// check compares the datastore with the reference.
func (m *reserveMachine) check(t *rapid.T) {
	if m.away {
		return
	}
	stored := m.stored(t)
	for _, l := range m.lives {
		for handle, addr := range l.records {
			switch by := stored[addr]; {
			case by == handle, by == store.ReserveHandle(l.name) && m.owner[addr] == handle:
			case l.told[handle]: // its release was cut short
			default:
				t.Fatalf("%s is %s's, and stored as %q's", addr, handle, by)
			}
		}
	}
}

// drained ends everything: then nothing is held by anybody.
func (m *reserveMachine) drained(t *rapid.T) {
	if m.away {
		m.outage(t)
	}
	m.off, m.reserved = true, netip.Prefix{}
	put(t, m.st, newReservation("r"), m.pool())
	for _, l := range m.lives {
		// What a kill cut short is found by the collector; here by its name.
		for i := range 6 {
			handle := fmt.Sprintf("%s.%d", l.name, i)
			if _, err := l.h.ReleaseHandleHere(context.Background(), handle); err != nil {
				t.Fatalf("%v", err)
			}
			l.h.Unclaim(handle)
		}
	}
	m.clock.turn(2 * time.Minute)
	for _, l := range m.lives {
		settle(t, l.h, "the reserve given back", func(s *state) bool {
			l.h.reserveChanged.Set()
			return s.pools["p"].off != "" && len(s.reserve.claims) == 0 && !slices.ContainsFunc(s.own, func(b *blockInfo) bool { return len(b.ready) > 0 })
		})
	}
	for _, l := range m.lives {
		l.h.stop()
	}
	for addr, handle := range audit(t, m.st) {
		t.Errorf("%s is left to %s", addr, handle)
	}
}

// TestReserveModel holds random lives of two hosts, their crashes, reboots
// without the datastore and edits of what may be given to the reference.
func TestReserveModel(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		dir := "" // without it, nothing is given after a reboot without the datastore
		if rapid.Bool().Draw(t, "the cluster is kept on disk") {
			var err error
			if dir, err = os.MkdirTemp("", "reserve"); err != nil { //nolint:usetesting // rapid runs many cases in one test
				t.Fatal(err)
			}
			defer os.RemoveAll(dir)
		}
		m := newReserveMachine(t, dir)
		defer func() {
			for _, l := range m.lives {
				l.h.stop()
			}
			_ = m.st.Close()
		}()
		t.Repeat(map[string]func(*rapid.T){
			"add": m.add, "add more": m.add, "add yet more": m.add, "confirm": m.confirm, "del": m.del, "del more": m.del,
			"edit": m.edit, "outage": m.outage,
			"reboot": func(t *rapid.T) { m.crash(t, m.pick(t)) },
			"wait": func(t *rapid.T) {
				m.clock.turn(time.Duration(rapid.SampledFrom([]int{1, 30, 61}).Draw(t, "seconds")) * time.Second)
			},
			"": m.check,
		})
		m.drained(t)
	})
}
