package ui

import (
	"cmp"
	"maps"
	"math"
	"net/netip"
	"slices"

	"github.com/routerd/routerd/control/cluster"
)

// maxCellBits bounds the cells of a pool's map: 1024 of them.
const maxCellBits = 10

// Pools is the map of how full the pools are.
type Pools struct {
	Pools []Pool `json:"pools"`
	// Stray are blocks that no pool contains.
	Stray []Block `json:"stray"`
}

// Pool is one pool as a grid of cells, row by row. Each cell is a part of the pool of the same size: a block, or
// several where there would be more than a screen has room for.
type Pool struct {
	Name          string  `json:"name"`
	CIDR          string  `json:"cidr"`
	Encapsulation string  `json:"encapsulation"`
	Problem       string  `json:"problem"` // why nothing is allocated from it; empty: it is
	Size          float64 `json:"size"`    // addresses
	Used          int     `json:"used"`
	Columns       int     `json:"columns"`
	Rows          int     `json:"rows"`
	CellSize      float64 `json:"cellSize"` // addresses of a cell
	Cells         []Cell  `json:"cells"`    // those with blocks
	Blocks        []Block `json:"blocks"`
}

// Cell is a part of a pool that has blocks.
type Cell struct {
	At      int      `json:"at"` // counted from 0, row by row
	CIDR    string   `json:"cidr"`
	Used    int      `json:"used"`
	Claimed float64  `json:"claimed"` // addresses of its blocks
	Holders []string `json:"holders"`
}

// Block is a block of addresses.
type Block struct {
	CIDR     string `json:"cidr"`
	Holder   string `json:"holder"` // empty: no node has it
	Used     int    `json:"used"`
	Size     int    `json:"size"`
	Borrowed int    `json:"borrowed"` // addresses that other nodes have
}

// mapPools makes the map.
func mapPools(pools []*cluster.Pool, blocks []*cluster.Block) Pools {
	out := Pools{Pools: []Pool{}, Stray: []Block{}}
	pools = slices.SortedFunc(slices.Values(pools), func(a, b *cluster.Pool) int { return cmp.Compare(a.Name, b.Name) })
	blocks = slices.SortedFunc(slices.Values(blocks), func(a, b *cluster.Block) int { return a.CIDR.Compare(b.CIDR) })
	rest := map[netip.Prefix]bool{}
	for _, b := range blocks {
		rest[b.CIDR] = true
	}
	for _, p := range pools {
		var own []*cluster.Block
		for _, b := range blocks {
			if p.CIDR.IsValid() && p.CIDR.Overlaps(b.CIDR) && b.CIDR.Bits() >= p.CIDR.Bits() {
				own = append(own, b)
				delete(rest, b.CIDR)
			}
		}
		out.Pools = append(out.Pools, mapPool(p, own))
	}
	for _, b := range blocks {
		if rest[b.CIDR] {
			out.Stray = append(out.Stray, blockOf(b))
		}
	}
	return out
}

// mapPool makes the map of one pool, whose blocks are sorted.
func mapPool(p *cluster.Pool, blocks []*cluster.Block) Pool {
	out := Pool{Name: p.Name, Encapsulation: string(p.Encap), Problem: p.Off, Cells: []Cell{}, Blocks: []Block{}}
	if p.Err != nil {
		out.Problem = p.Err.Error()
	}
	if !p.CIDR.IsValid() {
		return out
	}
	bits := p.CIDR.Addr().BitLen()
	cell := min(max(p.BlockBits, p.CIDR.Bits()), p.CIDR.Bits()+maxCellBits) // the length of a cell's prefix
	wide := cell - p.CIDR.Bits()
	out.CIDR, out.Size, out.CellSize = p.CIDR.String(), math.Exp2(float64(bits-p.CIDR.Bits())), math.Exp2(float64(bits-cell))
	// Twice as wide as high, more or less: a line of text's proportions.
	out.Columns = 1 << ((wide + 2) / 2)
	out.Rows = 1 << max(0, wide-(wide+2)/2)
	if wide == 0 {
		out.Columns, out.Rows = 1, 1
	}
	cells := map[int]*Cell{}
	for _, b := range blocks {
		out.Blocks = append(out.Blocks, blockOf(b))
		out.Used += b.Used
		at := offset(b.CIDR.Addr(), p.CIDR.Bits(), cell)
		c := cells[at]
		if c == nil {
			part, _ := b.CIDR.Addr().Prefix(min(cell, b.CIDR.Bits())) // within the address's bits
			c = &Cell{At: at, CIDR: part.String()}
			cells[at] = c
		}
		c.Used += b.Used
		c.Claimed += math.Exp2(float64(bits - b.CIDR.Bits()))
		if b.Holder != "" && !slices.Contains(c.Holders, b.Holder) {
			c.Holders = append(c.Holders, b.Holder)
		}
	}
	for _, at := range slices.Sorted(maps.Keys(cells)) {
		out.Cells = append(out.Cells, *cells[at])
	}
	return out
}

// offset is the number that the bits from one to another of an address are; they are at most [maxCellBits].
func offset(a netip.Addr, from, to int) int {
	n, b := 0, a.AsSlice()
	for i := from; i < to; i++ {
		n = n<<1 | int(b[i/8]>>(7-i%8)&1)
	}
	return n
}

func blockOf(b *cluster.Block) Block {
	return Block{CIDR: b.CIDR.String(), Holder: b.Holder, Used: b.Used, Size: b.Size, Borrowed: len(b.Borrowed)}
}
