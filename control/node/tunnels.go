package node

import (
	"context"
	"errors"
	"net/netip"
	"time"

	"github.com/routerd/routerd/store"
)

// tunnelGrace is how long the address that a tunnel had is kept from others
// after the new one, or that there is none, was published. Peers hear of it
// within milliseconds; an address that goes to a workload while a peer still
// sends to it as a tunnel's would be two things at once.
const tunnelGrace = 5 * time.Second

// tunnels gives each tunnel that a pool uses an address, publishes what
// differs from the Node resource, and gives back what was published before,
// some time after. It says when it is to be called again; 0: when something
// changes.
func (a *Agent) tunnels(ctx context.Context, self *store.Node, want map[Tunnel]bool) (again time.Duration, err error) {
	have := map[Tunnel]netip.Addr{}
	spare := map[Tunnel]bool{}
	differ := false
	encaps := store.NodeEncapsOf(self)
	var errs []error
	for _, t := range AllTunnels() {
		published := nodeTunnel(self, t)
		var addr netip.Addr
		if want[t] {
			var more bool
			_, leaving := a.spare[t]
			addr, more, err = a.cfg.Tunnels.Ensure(ctx, t, leaving && !published.IsValid())
			if err != nil || addr.IsValid() {
				a.mayHold[t] = true
			}
			if err != nil {
				errs = append(errs, err)
				// Keep what was published: peers may be using it.
				addr, more = published, false
			}
			spare[t] = more
		}
		if !addr.IsValid() && t.travels(encaps) {
			// Also where a pool wants the tunnel and has no address for it, as one that is
			// disabled: with its last address a device loses its neighbours.
			addr = published
		}
		if addr.IsValid() {
			have[t] = addr
		} else {
			spare[t] = published.IsValid() || a.mayHold[t]
		}
		differ = differ || addr != published
	}
	a.mu.Lock()
	a.status.Tunnels = have
	a.mu.Unlock()
	if differ {
		errs = append(errs, SetTunnels(ctx, a.cfg.Store, a.cfg.Name, have))
	}
	if err := errors.Join(errs...); err != nil {
		// What is not published yet must not be taken away either.
		return 0, err
	}
	again, err = a.giveBack(ctx, have, spare)
	if err == nil {
		a.mu.Lock()
		a.status.Complete = true
		a.mu.Unlock()
	}
	return again, err
}

// giveBack releases the addresses of tunnels that are no longer published once
// their time has come.
func (a *Agent) giveBack(ctx context.Context, have map[Tunnel]netip.Addr, spare map[Tunnel]bool) (again time.Duration, err error) {
	var errs []error
	for _, t := range AllTunnels() {
		since, waiting := a.spare[t]
		switch {
		case spare[t] && !waiting:
			a.spare[t] = time.Now()
			again = sooner(again, tunnelGrace)
		case !waiting:
		case have[t].IsValid() && !spare[t]:
			delete(a.spare, t) // it is in use again
		case time.Since(since) < tunnelGrace:
			again = sooner(again, tunnelGrace-time.Since(since))
		default:
			if err := a.cfg.Tunnels.Release(ctx, t, have[t]); err != nil {
				errs = append(errs, err)
				continue
			}
			delete(a.spare, t)
			if !have[t].IsValid() {
				delete(a.mayHold, t)
			}
		}
	}
	return again, errors.Join(errs...)
}
