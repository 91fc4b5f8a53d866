package ipam

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"strings"
	"time"
)

// Addresses of the reserve that a workload had are not given again before the
// cool-down, as released addresses of a block are not. The datastore never
// heard of their use, so this host remembers it, in the journal.

// restPrefix begins the journal's keys of addresses that rest; the value is the
// time at which they ceased to be in use.
const restPrefix = "ipam/rest/"

// rests reports whether an address of the reserve was in use so short a time ago
// that it is to be given to nobody yet.
func (s *state) rests(a netip.Addr, now time.Time) bool {
	at, ok := s.reserve.released[a]
	return ok && now.Sub(at) < s.cooldown()
}

// recallRest takes in what the journal knows of addresses that rest. What
// cannot be read is left out: it would keep an address for ever.
func (s *state) recallRest(entries map[string]json.RawMessage) {
	for key, value := range entries {
		text, ok := strings.CutPrefix(key, restPrefix)
		if !ok {
			continue
		}
		a, err := netip.ParseAddr(text)
		var at time.Time
		if err == nil && json.Unmarshal(value, &at) == nil {
			s.reserve.released[a] = at
		}
	}
}

// Rest writes down, where released addresses rest, that a handle's addresses
// are used no more from now on. It is called before the caller forgets that the
// handle had them; [Allocator.Unclaim] follows.
func (a *Allocator) Rest(handle string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.rest(handle, nil)
}

// rest has addresses of a handle rest, all where none is named. One whose rest
// cannot be written down does not rest yet. The caller holds the lock.
func (a *Allocator) rest(handle string, addrs []netip.Addr) error {
	a.rested()
	r, now := a.state.reserve, a.cfg.Clock()
	for _, addr := range a.tired(handle, addrs) {
		if r.cfg.Journal != nil {
			if err := r.cfg.Journal.Put(restPrefix+addr.String(), now); err != nil {
				return fmt.Errorf("write down that %s rests: %w", addr, err)
			}
		}
		r.released[addr] = now
	}
	return nil
}

// restUnwritten has addresses rest as long as this process runs. The caller
// holds the lock.
func (a *Allocator) restUnwritten(handle string, addrs []netip.Addr) {
	for _, addr := range a.tired(handle, addrs) {
		a.state.reserve.released[addr] = a.cfg.Clock()
	}
}

// tired lists which addresses of a handle are to rest and do not.
func (a *Allocator) tired(handle string, addrs []netip.Addr) (out []netip.Addr) {
	r := a.state.reserve
	if a.state.cooldown() == 0 {
		return nil
	}
	if addrs == nil {
		addrs = r.byHandle[handle]
	}
	for _, addr := range addrs {
		if r.claims[addr] == handle && !a.state.rests(addr, a.cfg.Clock()) {
			out = append(out, addr)
		}
	}
	return out
}

// rested forgets what has rested enough, once it is known how long that is.
func (a *Allocator) rested() {
	s := a.state
	if !s.synced && s.reserve.remembered == nil {
		return
	}
	now := a.cfg.Clock()
	maps.DeleteFunc(s.reserve.released, func(addr netip.Addr, _ time.Time) bool {
		if s.rests(addr, now) {
			return false
		}
		// What stays in the journal is left out by its age.
		return s.reserve.cfg.Journal == nil || s.reserve.cfg.Journal.Delete(restPrefix+addr.String()) == nil
	})
}
