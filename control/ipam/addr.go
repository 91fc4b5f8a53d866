package ipam

import (
	"hash/fnv"
	"math/big"
	"math/rand"
	"net/netip"

	"github.com/routerd/routerd/store"
)

// addrAt is [store.AddrAt] for an ordinal of the block.
func addrAt(block netip.Prefix, ordinal int) netip.Addr {
	a, _ := store.AddrAt(block, ordinal)
	return a
}

// ordinalOf is [store.OrdinalOf] for an address of the block.
func ordinalOf(block netip.Prefix, a netip.Addr) int {
	n, _ := store.OrdinalOf(block, a)
	return n
}

// blockLen returns how many addresses a block has.
func blockLen(block netip.Prefix) int { return 1 << (block.Addr().BitLen() - block.Bits()) }

// after returns the block of length bits that begins behind the end of p,
// going round to the first one of pool.
func after(pool, p netip.Prefix, bits int) netip.Prefix {
	size := new(big.Int).Lsh(big.NewInt(1), uint(p.Addr().BitLen()-p.Bits()))
	next, ok := plus(p.Addr(), size)
	if !ok || !pool.Contains(next) {
		next = pool.Addr()
	}
	return netip.PrefixFrom(next, bits)
}

// firstBlock returns where the search for a new block begins in a pool. Hosts
// begin at different places, so that they seldom want the same block. It is
// the place where Calico begins: seeded with FNV-1 of the host's name, or with
// the clock for blocks of one address, which need no host of their own.
func firstBlock(pool netip.Prefix, blockBits int, node string, clock int64) netip.Prefix {
	seed := clock
	if blockBits < pool.Addr().BitLen() {
		h := fnv.New32()
		_, _ = h.Write([]byte(node)) // never returns an error
		seed = int64(h.Sum32())
	}
	count := new(big.Int).Lsh(big.NewInt(1), uint(blockBits-pool.Bits()))
	index := new(big.Int).Rand(rand.New(rand.NewSource(seed)), count)
	index.Lsh(index, uint(pool.Addr().BitLen()-blockBits))
	first, _ := plus(pool.Addr(), index) // it lies inside the pool
	return netip.PrefixFrom(first, blockBits)
}

// plus returns the address n after a, false when there is none.
func plus(a netip.Addr, n *big.Int) (netip.Addr, bool) {
	raw := a.AsSlice()
	sum := new(big.Int).SetBytes(raw)
	if sum.Add(sum, n).BitLen() > a.BitLen() {
		return netip.Addr{}, false
	}
	return netip.AddrFromSlice(sum.FillBytes(raw))
}

// covering returns the widest of prefixes that contains all of p.
func covering(prefixes []netip.Prefix, p netip.Prefix) (netip.Prefix, bool) {
	var widest netip.Prefix
	for _, r := range prefixes {
		if r.Bits() <= p.Bits() && r.Contains(p.Addr()) && (!widest.IsValid() || r.Bits() < widest.Bits()) {
			widest = r
		}
	}
	return widest, widest.IsValid()
}

// within returns those of prefixes that overlap p.
func within(prefixes []netip.Prefix, p netip.Prefix) []netip.Prefix {
	var out []netip.Prefix
	for _, r := range prefixes {
		if r.Overlaps(p) {
			out = append(out, r)
		}
	}
	return out
}

func containsAddr(prefixes []netip.Prefix, a netip.Addr) bool {
	for _, p := range prefixes {
		if p.Contains(a) {
			return true
		}
	}
	return false
}
