package attach

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/routerd/routerd/control/journal"
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

// gateways has the addresses that the host keeps for networks whose containers
// another plugin connects: of each block one, which is the containers' gateway.
type gateways struct {
	journal   *journal.Journal
	addresses *addresses
	ledger    *ledger
	log       *slog.Logger

	mu    sync.Mutex
	kept  map[string]kept          // by network
	freed map[netip.Addr]time.Time // when addresses ceased to be kept
}

// freedFor is how long an address that the host kept may still be on its device: a plugin
// has IPAM free it first, and then deletes the device, which the kernel reports in its time.
const freedFor = 30 * time.Second

// load reads what the previous run kept.
func (g *gateways) load() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for key, value := range g.journal.Entries() {
		network, ok := strings.CutPrefix(key, keptPrefix)
		if !ok {
			continue
		}
		var k kept
		if err := json.Unmarshal(value, &k); err != nil {
			g.log.Error("the host's state of a network cannot be read; its containers may get another gateway", "network", network, "error", err)
			continue
		}
		g.kept[network] = k
	}
}

func (g *gateways) of(network string) (kept, bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	k, known := g.kept[network]
	return k, known
}

// endsWith reports whether a network has a gateway that goes with the last of
// its containers.
func (g *gateways) endsWith(network string) bool {
	k, known := g.of(network)
	return known && !k.Linked
}

// handle names what the host keeps for a network.
func (g *gateways) handle(network string) string {
	return "routerd-gateway-" + g.addresses.node + "." + network
}

// uses reports whether a handle is that of what the host keeps.
func (g *gateways) uses(h string) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	for network := range g.kept {
		if g.handle(network) == h {
			return true
		}
	}
	return false
}

// has reports whether an address is kept at a time, or was so shortly before.
func (g *gateways) has(addr netip.Addr, now time.Time) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if at, ok := g.freed[addr]; ok && now.Sub(at) < freedFor {
		return true
	}
	for _, k := range g.kept {
		if slices.Contains(k.Addresses, addr) {
			return true
		}
	}
	return false
}

// note writes down, before it is used, that the host keeps an address.
func (g *gateways) note(r record, addr netip.Addr) error {
	k, _ := g.of(r.Network)
	if slices.Contains(k.Addresses, addr) && (k.Linked || r.Device == "") {
		return nil
	}
	next := kept{Addresses: slices.Clone(k.Addresses), Linked: k.Linked || r.Device != ""}
	if !slices.Contains(next.Addresses, addr) {
		next.Addresses = append(next.Addresses, addr)
	}
	if err := g.journal.Put(keptPrefix+r.Network, next); err != nil {
		return fmt.Errorf("write down the gateway of network %s: %w", r.Network, err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.kept[r.Network] = next
	return nil
}

// gatewayTries bounds the search for a block's gateway: a block that other networks fill
// is a bad subnet anyway.
const gatewayTries = 16

// assign returns the address of a block that the host keeps for itself.
func (g *gateways) assign(ctx context.Context, r record, block netip.Prefix) (netip.Addr, error) {
	k, _ := g.of(r.Network)
	if i := slices.IndexFunc(k.Addresses, block.Contains); i >= 0 {
		return k.Addresses[i], g.note(r, k.Addresses[i])
	}
	outside := edges(block)
	addr := outside[0]
	for range gatewayTries {
		if addr = addr.Next(); !block.Contains(addr) || slices.Contains(outside, addr) {
			break
		}
		err := g.reserve(ctx, r, addr)
		if err == nil {
			return addr, g.note(r, addr)
		}
		if !refused(err) {
			return addr, err
		}
	}
	return netip.Addr{}, fmt.Errorf("block %s has no address left to be the gateway of network %s: use pools with larger blocks, or set ipam.gateway: %w", block, r.Network, ErrNoAddress)
}

// reserve assigns an address to the host itself, for a network.
func (g *gateways) reserve(ctx context.Context, r record, addr netip.Addr) error {
	return g.addresses.reserve(ctx, g.handle(r.Network), addr)
}

// reserveEdges keeps the edges of a block from containers.
func (g *gateways) reserveEdges(ctx context.Context, r record, block netip.Prefix) error {
	for _, e := range edges(block) {
		if err := g.reserve(ctx, r, e); err != nil && !refused(err) {
			return err
		}
	}
	return nil
}

// release releases what the host keeps for a network when the last of its
// containers goes, unless a device of the host still has it.
func (g *gateways) release(ctx context.Context, r record) error {
	if !r.AddressesOnly || !g.endsWith(r.Network) {
		return nil
	}
	for id, other := range g.ledger.snapshot() {
		if id != r.id() && id.Network == r.Network && other.AddressesOnly {
			return nil
		}
	}
	if err := g.addresses.releaseHandle(ctx, g.handle(r.Network)); err != nil {
		return err
	}
	if err := g.journal.Delete(keptPrefix + r.Network); err != nil {
		return fmt.Errorf("forget the gateway of network %s: %w", r.Network, err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	now := time.Now()
	maps.DeleteFunc(g.freed, func(_ netip.Addr, at time.Time) bool { return now.Sub(at) >= freedFor })
	for _, addr := range g.kept[r.Network].Addresses {
		g.freed[addr] = now
	}
	delete(g.kept, r.Network)
	return nil
}

// edges are the addresses of a block that are no container's on a link where
// the block is a subnet: the network's own and IPv4's broadcast address (RFC
// 1122, section 3.2.1.3), IPv6's subnet-router anycast address (RFC 4291,
// section 2.6.1).
func edges(block netip.Prefix) []netip.Addr {
	first := block.Masked().Addr()
	if !first.Is4() {
		return []netip.Addr{first}
	}
	last := first.As4()
	for i := block.Bits(); i < 32; i++ {
		last[i/8] |= 0x80 >> (i % 8)
	}
	return []netip.Addr{first, netip.AddrFrom4(last)}
}

// edgeTries bounds how often a container gets another address because its
// first was at the edge of a block.
const edgeTries = 4

// assignInside gives an attachment addresses that are not at the edge of their
// block, and keeps a gateway for each block.
func (g *gateways) assignInside(ctx context.Context, req AddRequest, r record) ([]Address, error) {
	for range edgeTries {
		got, claims, err := g.addresses.assign(ctx, req, r)
		if len(claims) > 0 {
			// What is at the edge goes back through the datastore.
			err = errors.Join(g.addresses.confirmNow(ctx, r, claims), err)
		}
		if err != nil {
			return nil, err
		}
		edge := slices.IndexFunc(got, func(a Address) bool { return slices.Contains(edges(a.Block), a.Addr) })
		if edge < 0 {
			for i := range got {
				if got[i].Gateway, err = g.assign(ctx, r, got[i].Block); err != nil {
					return got, err
				}
			}
			return got, nil
		}
		if len(req.Addresses) > 0 {
			return got, fmt.Errorf("address %s is the first or the last of its block %s, which a shared link cannot have; ask for another: %w",
				got[edge].Addr, got[edge].Block, ErrInvalid)
		}
		if err := g.addresses.releaseAll(ctx, r); err != nil {
			return nil, err
		}
		if err := g.reserveEdges(ctx, r, got[edge].Block); err != nil {
			return nil, err
		}
	}
	return nil, fmt.Errorf("every address that was given is at the edge of its block: use pools with larger blocks (blockSize 29 or less), or set ipam.gateway: %w", ErrNoAddress)
}
