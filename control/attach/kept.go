package attach

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// keptPrefix begins the journal's keys of what the host keeps for networks.
const keptPrefix = "kept "

// kept is what the host keeps for a network that another plugin makes.
type kept struct {
	Addresses []netip.Addr `json:"addresses"` // the gateways
	// Linked says that a device of the host has them, which outlives the
	// containers: a bridge. They stay the host's then.
	Linked bool `json:"linked,omitempty"`
}

// noteKept writes down, before it is used, that the host keeps an address.
func (a *Attacher) noteKept(r record, addr netip.Addr) error {
	a.mu.Lock()
	k := a.kept[r.Network]
	a.mu.Unlock()
	if slices.Contains(k.Addresses, addr) && (k.Linked || r.Device == "") {
		return nil
	}
	next := kept{Addresses: slices.Clone(k.Addresses), Linked: k.Linked || r.Device != ""}
	if !slices.Contains(next.Addresses, addr) {
		next.Addresses = append(next.Addresses, addr)
	}
	if err := a.cfg.Journal.Put(keptPrefix+r.Network, next); err != nil {
		return fmt.Errorf("write down the gateway of network %s: %w", r.Network, err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.kept[r.Network] = next
	return nil
}

// loadKept reads what an earlier life of the daemon kept.
func (a *Attacher) loadKept() {
	for key, value := range a.cfg.Journal.Entries() {
		network, ok := strings.CutPrefix(key, keptPrefix)
		if !ok {
			continue
		}
		var k kept
		if err := json.Unmarshal(value, &k); err != nil {
			a.log.Error("what the host keeps for a network cannot be read; its containers may get another gateway", "network", network, "error", err)
			continue
		}
		a.mu.Lock()
		a.kept[network] = k
		a.mu.Unlock()
	}
}

// releaseGateways releases what the host keeps for a network when the last of
// its containers goes, unless a device of the host still has it.
func (a *Attacher) releaseGateways(ctx context.Context, r record) error {
	a.mu.Lock()
	k, known := a.kept[r.Network]
	a.mu.Unlock()
	if !known || k.Linked || !r.AddressesOnly {
		return nil
	}
	for id, other := range a.snapshot() {
		if id != r.id() && id.Network == r.Network && other.AddressesOnly {
			return nil
		}
	}
	if err := a.cfg.IPAM.ReleaseHandle(ctx, a.gatewayHandle(r.Network)); err != nil {
		return err
	}
	if err := a.cfg.Journal.Delete(keptPrefix + r.Network); err != nil {
		return fmt.Errorf("forget the gateway of network %s: %w", r.Network, err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.kept, r.Network)
	return nil
}
