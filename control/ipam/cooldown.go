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
// cool-down, as released addresses of a block are not. The datastore does not
// know of their use: the journal of this host does.

// cooldownPrefix begins the journal's keys of addresses in their cool-down; the
// value is the time at which they ceased to be in use.
const cooldownPrefix = "ipam/rest/"

// coolingDown reports whether an address of the reserve was in use so short a time ago
// that it is not to be assigned yet.
func (s *state) coolingDown(a netip.Addr, now time.Time) bool {
	at, ok := s.reserve.released[a]
	return ok && now.Sub(at) < s.cooldown()
}

// loadCooldowns reads from the journal's entries which addresses are in their
// cool-down. What cannot be read is left out: it would keep an address for ever.
func (s *state) loadCooldowns(entries map[string]json.RawMessage) {
	for key, value := range entries {
		text, ok := strings.CutPrefix(key, cooldownPrefix)
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

// CoolDown writes down, where there is a cool-down, that a handle's addresses are
// used no more from now on. It is called before the caller forgets that the
// handle had them; [Allocator.Unclaim] follows.
func (a *Allocator) CoolDown(handle string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.coolDown(handle, nil)
}

// coolDown begins the cool-down of addresses of a handle, of all where none is
// named. It begins once it is written down. The caller holds the lock.
func (a *Allocator) coolDown(handle string, addrs []netip.Addr) error {
	a.endCooldowns()
	r, now := a.state.reserve, a.cfg.Clock()
	for _, addr := range a.notCooling(handle, addrs) {
		if r.cfg.Journal != nil {
			if err := r.cfg.Journal.Put(cooldownPrefix+addr.String(), now); err != nil {
				return fmt.Errorf("write down the cool-down of %s: %w", addr, err)
			}
		}
		r.released[addr] = now
	}
	return nil
}

// coolDownUnwritten begins a cool-down that ends with this process at the latest.
// The caller holds the lock.
func (a *Allocator) coolDownUnwritten(handle string, addrs []netip.Addr) {
	for _, addr := range a.notCooling(handle, addrs) {
		a.state.reserve.released[addr] = a.cfg.Clock()
	}
}

// notCooling lists the addresses of a handle whose cool-down is to begin: also where
// it is not known yet whether there is one.
func (a *Allocator) notCooling(handle string, addrs []netip.Addr) (out []netip.Addr) {
	r := a.state.reserve
	if known := a.state.synced || a.state.registered; known && a.state.cooldown() == 0 {
		return nil
	}
	if addrs == nil {
		addrs = r.byHandle[handle]
	}
	for _, addr := range addrs {
		if r.claims[addr] == handle && !a.state.coolingDown(addr, a.cfg.Clock()) {
			out = append(out, addr)
		}
	}
	return out
}

// endCooldowns forgets the cool-downs that are over, once it is known how long they
// last.
func (a *Allocator) endCooldowns() {
	s := a.state
	if !s.synced && !s.registered {
		return
	}
	now := a.cfg.Clock()
	maps.DeleteFunc(s.reserve.released, func(addr netip.Addr, _ time.Time) bool {
		if s.coolingDown(addr, now) {
			return false
		}
		// What stays in the journal is left out by its age.
		return s.reserve.cfg.Journal == nil || s.reserve.cfg.Journal.Delete(cooldownPrefix+addr.String()) == nil
	})
}
