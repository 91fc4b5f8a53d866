package soak

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/routerd/routerd/store"
)

// stays is the pod of each host that is there all the time.
const stays = "stays"

// world is what the run believes of the cluster: what was asked for, and which
// faults there are. It decides, and does nothing itself.
type world struct {
	hosts   []string
	members int                     // of the datastore, of which the hosts from the first on are
	elder   string                  // the host whose daemon is neither killed nor restarted: what leaks slowly shows there
	pods    map[string][]netip.Addr // by HOST/POD
	leaving map[string]bool         // pods of which a DEL has failed
	names   int                     // that were given to pods
	modes   []store.Encapsulation   // that the pool is changed between
	mode    store.Encapsulation
	second  poolState
	denied  string   // a pod that may reach no other; empty: none
	rested  []string // pods that reached each other when the cluster was last at rest
	down    map[string]bool
	stopped map[string]bool
	isCut   map[string]bool
	full    map[string]bool
}

func newWorld(hosts []string, members int, elder string, modes []store.Encapsulation) *world {
	return &world{
		hosts: hosts, members: members, elder: elder, modes: modes, pods: map[string][]netip.Addr{}, leaving: map[string]bool{}, mode: modes[0],
		down: map[string]bool{}, stopped: map[string]bool{}, isCut: map[string]bool{}, full: map[string]bool{},
	}
}

// poolState is what there is of the pool that comes and goes.
type poolState string

const (
	poolAbsent   poolState = ""
	poolEnabled  poolState = "enabled"
	poolDisabled poolState = "disabled" // workloads keep what they have of it
)

// secondPool are the addresses of the pool that comes and goes.
func secondPool() netip.Prefix { return netip.MustParsePrefix("10.77.0.0/20") }

// nextOfPool returns what becomes of the pool that comes and goes: it is deleted only
// when no pod has an address of it.
func (w *world) nextOfPool(again bool) poolState {
	switch {
	case w.second == poolAbsent, w.second == poolDisabled && (again || w.usesSecond()):
		return poolEnabled
	case w.second == poolEnabled:
		return poolDisabled
	}
	return poolAbsent
}

func (w *world) usesSecond() bool {
	for _, addrs := range w.pods {
		if slices.ContainsFunc(addrs, secondPool().Contains) {
			return true
		}
	}
	return false
}

// faulty reports whether a change may fail for a fault that is there.
func (w *world) faulty() bool {
	return len(w.down)+len(w.stopped)+len(w.isCut)+len(w.full) > 0
}

// move is a change or a fault.
type move struct {
	name, what string
	do         func(context.Context, *run) error
}

// pick chooses the next change.
func pick(rng *rand.Rand, w *world) move {
	for {
		h := w.hosts[rng.IntN(len(w.hosts))]
		m, ok := w.consider(rng.IntN(100), h, rng)
		if ok {
			return m
		}
	}
}

// consider returns the change that a number from 0 to 99 stands for, if it makes
// sense now.
func (w *world) consider(n int, h string, rng *rand.Rand) (move, bool) {
	mine := w.podsOf(h)
	switch {
	case n < 25: // a pod comes
		if len(mine) >= podsPerHost || w.stopped[h] { // a runtime waits as long as it is
			return move{}, false
		}
		w.names++
		where := fmt.Sprintf("%s/p%d", h, w.names)
		return move{"add", where, func(ctx context.Context, r *run) error { return r.attach(ctx, where) }}, true
	case n < 45: // a pod goes
		mine = slices.DeleteFunc(mine, func(p string) bool { return p == w.denied || w.leaving[p] })
		if len(mine) == 0 || w.stopped[h] {
			return move{}, false
		}
		where := mine[rng.IntN(len(mine))]
		return move{"del", where, func(ctx context.Context, r *run) error { return r.detach(ctx, where) }}, true
	case n < 49: // a pool comes or goes
		next := w.nextOfPool(rng.IntN(2) == 0)
		return move{"pool", cmp.Or(string(next), "deleted"), func(ctx context.Context, r *run) error { return r.setSecond(ctx, next) }}, w.answers()
	case n < 57:
		mode := w.modes[rng.IntN(len(w.modes))]
		return move{"mode", string(mode), func(ctx context.Context, r *run) error { return r.setMode(ctx, mode) }}, mode != w.mode && w.answers()
	case n < 66: // a policy comes or goes
		if !w.answers() {
			return move{}, false
		}
		if w.denied != "" {
			if rng.IntN(4) > 0 { // it stays for a while
				return move{}, false
			}
			return move{"allow", w.denied, func(ctx context.Context, r *run) error { return r.allow(ctx) }}, true
		}
		mine = slices.DeleteFunc(mine, func(p string) bool { return w.leaving[p] })
		if len(mine) == 0 {
			return move{}, false
		}
		return move{"deny", mine[0], func(ctx context.Context, r *run) error { return r.deny(ctx, mine[0]) }}, true
	case n < 69: // a peer of which nothing is heard comes and goes
		return move{"peer", "192.0.2.1", func(ctx context.Context, r *run) error { return r.strangePeer(ctx) }}, w.answers()
	case n < 72: // BGP's connections to the router between the racks end
		return move{"flap", h, func(ctx context.Context, r *run) error { return r.flap(ctx, h) }}, w.runs(h) && !w.isCut[h]
	case n < 78:
		return move{"kill", h, func(ctx context.Context, r *run) error { return r.kill(ctx, h) }}, h != w.elder && !w.down[h] && !w.stopped[h]
	case n < 83:
		return move{"restart", h, func(ctx context.Context, r *run) error { return r.restart(ctx, h) }}, h != w.elder && !w.stopped[h] && !w.full[h] && w.answersTo(h) // else it is not ready before they end
	case n < 89:
		return move{"stop", h, func(ctx context.Context, r *run) error { return r.stop(ctx, h) }}, !w.down[h] && !w.stopped[h]
	case n < 92:
		return move{"cut", h, func(ctx context.Context, r *run) error { return r.cutLink(ctx, h) }}, !w.isCut[h]
	case n < 96: // but not where a member of the datastore would go with it
		return move{"fill", h, func(ctx context.Context, r *run) error { return r.fill(ctx, h) }}, !w.isMember(h) && !w.full[h]
	default: // nothing is excused by it
		by := []time.Duration{time.Hour, -time.Hour}[rng.IntN(2)]
		return move{"clock", fmt.Sprint(h, " ", by), func(ctx context.Context, r *run) error { return r.jump(ctx, h, by) }}, !w.down[h] && !w.stopped[h]
	}
}

// answers reports whether the datastore can be written from some host.
func (w *world) answers() bool { return w.speaker() != "" }

// speaker returns a host at which the datastore can be written: its daemon runs, no
// link of its own is cut, and enough members can be reached. Empty: there is none.
func (w *world) speaker() string {
	for _, h := range w.hosts[:w.members] {
		if w.runs(h) && !w.isCut[h] && w.answersTo(h) {
			return h
		}
	}
	return ""
}

// answersTo reports whether the datastore would answer a host if its daemon ran. A
// single member answers its own host even when that is cut off.
func (w *world) answersTo(h string) bool {
	if w.members == 1 && h == w.hosts[0] {
		return true
	}
	if w.isCut[h] {
		return false
	}
	n := 0
	for _, m := range w.hosts[:w.members] {
		if m == h || w.runs(m) && !w.isCut[m] {
			n++
		}
	}
	return n > w.members/2
}

func (w *world) runs(h string) bool { return !w.down[h] && !w.stopped[h] }

func (w *world) isMember(h string) bool { return slices.Contains(w.hosts[:w.members], h) }

// podsOf lists a host's pods but the one that stays, in order.
func (w *world) podsOf(h string) []string {
	var out []string
	for _, p := range slices.Sorted(maps.Keys(w.pods)) {
		if strings.HasPrefix(p, h+"/") && p != h+"/"+stays {
			out = append(out, p)
		}
	}
	return out
}

// mend returns what ends the faults.
func (w *world) mend() []move {
	var out []move
	add := func(of map[string]bool, name string, do func(*run, context.Context, string) error) {
		for _, h := range slices.Sorted(maps.Keys(of)) {
			out = append(out, move{name, h, func(ctx context.Context, r *run) error { return do(r, ctx, h) }})
		}
	}
	add(w.full, "free", (*run).free)
	add(w.isCut, "join", (*run).joinLink)
	add(w.stopped, "continue", (*run).cont)
	add(w.down, "start", (*run).start)
	return out
}

// undo returns what takes away all that was added.
func (w *world) undo() []move {
	var out []move
	if w.denied != "" {
		out = append(out, move{"allow", w.denied, func(ctx context.Context, r *run) error { return r.allow(ctx) }})
	}
	if w.mode != w.modes[0] {
		out = append(out, move{"mode", string(w.modes[0]), func(ctx context.Context, r *run) error { return r.setMode(ctx, w.modes[0]) }})
	}
	if w.second == poolEnabled {
		out = append(out, move{"pool", string(poolDisabled), func(ctx context.Context, r *run) error { return r.setSecond(ctx, poolDisabled) }})
	}
	for _, h := range w.hosts {
		for _, p := range w.podsOf(h) {
			out = append(out, move{"del", p, func(ctx context.Context, r *run) error { return r.detach(ctx, p) }})
		}
	}
	if w.second != poolAbsent {
		out = append(out, move{"pool", "deleted", func(ctx context.Context, r *run) error { return r.setSecond(ctx, poolAbsent) }})
	}
	return out
}

// renew returns what makes each daemon as young as at the first measurement.
func (w *world) renew() []move {
	var out []move
	for _, h := range w.hosts {
		out = append(out, move{"restart", h, func(ctx context.Context, r *run) error { return r.restart(ctx, h) }})
	}
	return out
}

// pair returns two pods, another two with each n, that reached each other when the
// cluster was last at rest, and of whose hosts no fault is known. ok is false where there
// are none.
func (w *world) pair(n int) (from, to string, ok bool) {
	var all []string
	for _, p := range w.rested {
		h, _, _ := strings.Cut(p, "/")
		if _, is := w.pods[p]; is && p != w.denied && !w.leaving[p] && w.runs(h) && !w.isCut[h] {
			all = append(all, p)
		}
	}
	if len(all) < 2 {
		return "", "", false
	}
	i := n % len(all)
	return all[i], all[(i+1+n/len(all)%(len(all)-1))%len(all)], true
}
