package attach

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"github.com/routerd/routerd/dataplane/workload"
)

// Uses reports whether a handle's addresses are in use by what this host knows:
// an attachment, be it under way or not given back yet, or what the host keeps
// for a network. An ADD is known before it asks for an address. Before
// [Attacher.Restore] everything is in use. It does not block.
func (a *Attacher) Uses(h string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.restored {
		return true
	}
	if len(a.byHandle[h]) > 0 {
		return true
	}
	for network := range a.kept {
		if a.gatewayHandle(network) == h {
			return true
		}
	}
	return false
}

// KeptForHost reports whether an address is one that the host keeps for itself
// as the gateway of a network that another plugin makes: that plugin gives it to
// a device of the host.
func (a *Attacher) KeptForHost(addr netip.Addr) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, k := range a.kept {
		if slices.Contains(k.Addresses, addr) {
			return true
		}
	}
	return false
}

// Wired returns the handles of the containers whose devices are on this host,
// also of those that it has no record of.
func (a *Attacher) Wired(ctx context.Context) (map[string]bool, error) {
	devices, err := a.cfg.Wire.Devices(ctx)
	if err != nil {
		return nil, fmt.Errorf("list the containers' devices: %w", err)
	}
	out := make(map[string]bool, len(devices))
	for _, alias := range devices {
		if id, ok := workload.ParseAlias(alias); ok {
			out[handle(id)] = true
		}
	}
	return out, nil
}
