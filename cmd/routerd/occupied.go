package main

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"

	"github.com/routerd/routerd/control/hostlocal"
)

// occupied tells IPAM what the plugin host-local gave pods of another network on this
// host, flannel's say.
type occupied struct {
	store hostlocal.Store
	ipam  interface {
		SetOccupied(by string, addrs []netip.Prefix)
	}
	log *slog.Logger

	mu     sync.Mutex
	failed error // of the last look
	known  int
}

// read tells what there is now. Where that cannot be read, what was known stays. One call
// has to end before the next.
func (o *occupied) read() {
	addrs, err := o.store.Addresses()
	if err == nil {
		list := make([]netip.Prefix, len(addrs))
		for i, a := range addrs {
			list[i] = netip.PrefixFrom(a, a.BitLen())
		}
		o.ipam.SetOccupied("host-local", list) // without the lock, which err takes while IPAM holds its own
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if err != nil {
		if o.failed == nil {
			o.log.Error("no addresses are given: what host-local gave other pods of this host cannot be read", "error", err)
		}
		o.failed = err
		return
	}
	o.failed = nil
	switch {
	case o.known == 0 && len(addrs) > 0:
		o.log.Info("host-local has given addresses to pods of another network; none of them is given to others", "addresses", len(addrs))
	case o.known > 0 && len(addrs) == 0:
		o.log.Info("host-local has no address any more that it gave to pods of another network")
	}
	o.known = len(addrs)
}

// run follows what changes, until ctx ends.
func (o *occupied) run(ctx context.Context) error {
	o.store.Follow(ctx, o.read)
	return nil
}

// err says why no addresses may be given.
func (o *occupied) err() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.failed == nil {
		return nil
	}
	return fmt.Errorf("what other networks' pods of this host have is not known (%w); mend ipam.hostLocalDir, or what is there", o.failed)
}
