package hostlocal

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
)

// IPAM is told which addresses are not to be given, as *[ipam.Allocator] is.
type IPAM interface {
	SetOccupied(by string, addrs []netip.Prefix)
}

// Occupied tells IPAM what the plugin host-local gave pods of another network on this
// host, flannel's say.
type Occupied struct {
	store Store
	ipam  IPAM
	log   *slog.Logger

	mu     sync.Mutex
	failed error // of the last look
	known  int
}

// NewOccupied returns what tells IPAM by what is in a store.
func NewOccupied(s Store, to IPAM, log *slog.Logger) *Occupied {
	return &Occupied{store: s, ipam: to, log: log}
}

// Read tells what there is now. Where that cannot be read, what was known stays. One call
// has to end before the next.
func (o *Occupied) Read() {
	addrs, err := o.store.Addresses()
	if err == nil {
		list := make([]netip.Prefix, len(addrs))
		for i, a := range addrs {
			list[i] = netip.PrefixFrom(a, a.BitLen())
		}
		o.ipam.SetOccupied("host-local", list) // without the lock, which Err takes while IPAM holds its own
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

// Run follows what changes, until ctx ends.
func (o *Occupied) Run(ctx context.Context) error {
	o.store.Follow(ctx, o.Read)
	return nil
}

// Err says why no addresses may be given.
func (o *Occupied) Err() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.failed == nil {
		return nil
	}
	return fmt.Errorf("what other networks' pods of this host have is not known (%w); mend ipam.hostLocalDir, or what is there", o.failed)
}
