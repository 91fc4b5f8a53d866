package ipam

import (
	"encoding/binary"
	"hash/fnv"
	"math/big"
	"math/bits"
	"math/rand"
	"net/netip"
)

// number is an address as an integer, so that blocks can be counted. IPv4
// addresses use the low 32 bits.
type number struct{ hi, lo uint64 }

func numberOf(a netip.Addr) number {
	if a.Is4() {
		b := a.As4()
		return number{lo: uint64(binary.BigEndian.Uint32(b[:]))}
	}
	b := a.As16()
	return number{binary.BigEndian.Uint64(b[:8]), binary.BigEndian.Uint64(b[8:])}
}

func (n number) addr(is4 bool) netip.Addr {
	if is4 {
		var b [4]byte
		binary.BigEndian.PutUint32(b[:], uint32(n.lo))
		return netip.AddrFrom4(b)
	}
	var b [16]byte
	binary.BigEndian.PutUint64(b[:8], n.hi)
	binary.BigEndian.PutUint64(b[8:], n.lo)
	return netip.AddrFrom16(b)
}

func (n number) plus(m number) number {
	lo, carry := bits.Add64(n.lo, m.lo, 0)
	hi, _ := bits.Add64(n.hi, m.hi, carry)
	return number{hi, lo}
}

// powerOfTwo returns 2^exp for exp below 128, else 0: what is left of it in
// 128 bits.
func powerOfTwo(exp int) number {
	if exp >= 64 {
		return number{hi: 1 << (exp - 64)}
	}
	return number{lo: 1 << exp}
}

// addrAt returns the address with this ordinal in a block.
func addrAt(block netip.Prefix, ordinal int) netip.Addr {
	base := block.Addr()
	return numberOf(base).plus(number{lo: uint64(ordinal)}).addr(base.Is4())
}

// ordinalOf is the inverse of [addrAt], for an address inside the block.
func ordinalOf(block netip.Prefix, a netip.Addr) int {
	return int(numberOf(a).lo - numberOf(block.Addr()).lo)
}

// blockLen returns how many addresses a block has.
func blockLen(block netip.Prefix) int { return 1 << (block.Addr().BitLen() - block.Bits()) }

// after returns the block of length bits that begins behind the end of p,
// going round to the first one of pool.
func after(pool, p netip.Prefix, bits int) netip.Prefix {
	size := powerOfTwo(p.Addr().BitLen() - p.Bits())
	next := numberOf(p.Addr()).plus(size).addr(p.Addr().Is4())
	if !pool.Contains(next) {
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
	var b [16]byte
	index.FillBytes(b[:])
	offset := number{binary.BigEndian.Uint64(b[:8]), binary.BigEndian.Uint64(b[8:])}
	return netip.PrefixFrom(numberOf(pool.Addr()).plus(offset).addr(pool.Addr().Is4()), blockBits)
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
