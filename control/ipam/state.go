package ipam

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/store"
)

// defaultMaxBlocks is how many blocks a node may hold when no setting says.
const defaultMaxBlocks = 20

// blockInfo is what is known of a stored block.
type blockInfo struct {
	*cluster.Block
	ready  []int // of the reserve, where this node holds the block
	broken error // it cannot be decoded
}

// path is the block's key in the datastore, which gives the order.
func (b *blockInfo) path() string { return store.BlockKey(b.CIDR).Path() }

// affinityInfo is what is known of one of this node's affinities.
type affinityInfo struct {
	rev   store.Revision
	state string // as store.Affinity; "" for confirmed is written out
	obj   store.Object
}

// handleInfo is a handle that this process wrote or met.
type handleInfo struct {
	obj   store.Object
	value *store.Handle
}

// length is a family and a prefix length, by which blocks are counted.
type length struct{ address, prefix int }

func lengthOf(p netip.Prefix) length { return length{p.Addr().BitLen(), p.Bits()} }

// state is what the watch has delivered, and what own writes have added to it
// since. It decides nothing. It is not safe for concurrent use.
type state struct {
	node string

	pools        map[string]*pool
	unusable     func(pool string) string // nil: none is
	sortedPools  []*pool                  // nil: to be sorted anew
	piecewise    bool                     // see Config.Piecewise
	usePodCIDR   bool
	podCIDRs     []netip.Prefix // of this node
	reservations map[string][]netip.Prefix
	occupied     map[string][]netip.Prefix // see [Allocator.SetOccupied]
	reserved     []netip.Prefix            // all of them, what is occupied, and with usePodCIDR what of the pools is other nodes'
	config       store.IPAMConfig
	configErr    error
	registered   bool
	synced       bool // the watch has shown everything
	labels       map[string]string

	blocks     map[netip.Prefix]*blockInfo
	lengths    map[length]int
	own        []*blockInfo // in the order of their keys
	affinities map[netip.Prefix]affinityInfo

	// handles spares reading a handle that was written here. Entries may be
	// stale; then a transaction's condition fails and brings the present one.
	handles map[string]handleInfo

	reserve *reserve
}

func newState(node string) *state {
	return &state{
		node:         node,
		pools:        map[string]*pool{},
		reservations: map[string][]netip.Prefix{},
		occupied:     map[string][]netip.Prefix{},
		config:       store.DefaultIPAMConfig(),
		blocks:       map[netip.Prefix]*blockInfo{},
		lengths:      map[length]int{},
		affinities:   map[netip.Prefix]affinityInfo{},
		handles:      map[string]handleInfo{},
		reserve:      newReserve(ReserveConfig{}),
	}
}

// apply applies a change of the cluster. now is the step's revision, which
// bounds what a deletion may undo. The error says what of the object could not
// be read; the rest of the state is as good as before.
func (s *state) apply(ev *cluster.Change, now store.Revision) error {
	switch ev.Key.Kind {
	case store.KindIPPool:
		s.sortedPools = nil
		if ev.Deleted() {
			delete(s.pools, ev.Key.Name)
			s.setReserved()
			return nil
		}
		p, _ := ev.Value.(*cluster.Pool)
		s.pools[ev.Key.Name] = poolFrom(ev.Key.Name, p)
		s.setReserved()
	case store.KindIPReservation:
		return s.applyReservation(ev)
	case store.KindIPAMConfig:
		return s.applyConfig(ev)
	case store.KindNode:
		if ev.Key.Name == s.node && ev.Err == nil {
			n, ok := ev.Value.(*cluster.Node)
			s.registered, s.labels = ok, nil
			if ok {
				s.labels, s.podCIDRs = n.Labels, n.PodCIDRs
				s.setReserved()
			}
		}
	case store.KindIPAMBlock, store.KindIPAMAffinity:
		if ev.Deleted() {
			s.forget(ev.Key, cmp.Or(ev.Object.Revision, now)) // now may be another kind's
			return nil
		}
		obj := ev.Object
		if obj.Revision == 0 {
			obj.Revision = now // what cannot be decoded may come without
		}
		if ev.Key.Kind == store.KindIPAMAffinity {
			s.learn(obj)
		} else {
			b, _ := ev.Value.(*cluster.Block)
			s.learnBlock(ev.Key.CIDR(), obj.Revision, b)
		}
	}
	if ev.Err != nil {
		return fmt.Errorf("read %s: %w", ev.Key, ev.Err)
	}
	return nil
}

func (s *state) applyReservation(ev *cluster.Change) error {
	var bad error
	if ev.Err != nil {
		// What was known of it still holds: to forget it would hand out
		// addresses that an operator set aside.
		return fmt.Errorf("read %s: %w", ev.Key, ev.Err)
	}
	delete(s.reservations, ev.Key.Name)
	if r, ok := ev.Object.Value.(*v3.IPReservation); ok {
		var out []netip.Prefix
		for i, c := range r.Spec.ReservedCIDRs {
			p, err := netip.ParsePrefix(c)
			if err != nil {
				a, err := netip.ParseAddr(c)
				if err != nil {
					bad = fmt.Errorf("read %s: spec.reservedCIDRs[%d] is %q, which is no CIDR; it reserves nothing", ev.Key, i, c)
					continue
				}
				p = netip.PrefixFrom(a, a.BitLen())
			}
			out = append(out, p.Masked())
		}
		s.reservations[ev.Key.Name] = out
	}
	s.setReserved()
	return bad
}

func (s *state) applyConfig(ev *cluster.Change) error {
	if ev.Err != nil {
		// The settings known last stay in force; with none there is no telling
		// whether affinity is strict.
		if s.config == store.DefaultIPAMConfig() {
			s.configErr = fmt.Errorf("read IPAM's settings: %w; repair or delete them", ev.Err)
		}
		return fmt.Errorf("read %s: %w", ev.Key, ev.Err)
	}
	s.config, s.configErr = store.DefaultIPAMConfig(), nil
	if c, ok := ev.Object.Value.(*store.IPAMConfig); ok {
		s.config = *c
	}
	return nil
}

// learn applies an object that was read or written, unless something newer is
// known.
func (s *state) learn(obj store.Object) {
	cidr := obj.Key.CIDR()
	switch obj.Key.Kind {
	case store.KindIPAMBlock:
		b, _ := cluster.NewBlock(s.node, obj)
		s.learnBlock(cidr, obj.Revision, b)
	case store.KindIPAMAffinity:
		if obj.Key.Namespace != s.node || !cidr.IsValid() || s.affinities[cidr].rev >= obj.Revision {
			return
		}
		info := affinityInfo{rev: obj.Revision, state: store.AffinityPending, obj: obj}
		if a, ok := obj.Value.(*store.Affinity); ok {
			info.state = a.State
			if a.Confirmed() {
				info.state = store.AffinityConfirmed
			}
		}
		s.affinities[cidr] = info
	case store.KindIPAMHandle:
		if h, ok := obj.Value.(*store.Handle); ok && s.handles[obj.Key.Name].obj.Revision < obj.Revision {
			s.handles[obj.Key.Name] = handleInfo{obj, h}
		}
	}
}

// learnBlock is learn for a block; nil: it cannot be decoded.
func (s *state) learnBlock(cidr netip.Prefix, rev store.Revision, b *cluster.Block) {
	if old := s.blocks[cidr]; cidr.IsValid() && (old == nil || old.Revision < rev) {
		s.setBlock(cidr, s.readBlock(cidr, rev, b))
	}
}

// revision returns the revision at which a key is known, 0 if it is not.
func (s *state) revision(key store.Key) store.Revision {
	switch key.Kind {
	case store.KindIPAMBlock:
		if b := s.blocks[key.CIDR()]; b != nil {
			return b.Revision
		}
	case store.KindIPAMAffinity:
		if key.Namespace == s.node {
			return s.affinities[key.CIDR()].rev
		}
	case store.KindIPAMHandle:
		return s.handles[key.Name].obj.Revision
	}
	return 0
}

// forget applies that a key does not exist at a revision.
func (s *state) forget(key store.Key, at store.Revision) {
	cidr := key.CIDR()
	switch key.Kind {
	case store.KindIPAMBlock:
		if old := s.blocks[cidr]; old != nil && old.Revision <= at {
			s.setBlock(cidr, nil)
		}
	case store.KindIPAMAffinity:
		if key.Namespace == s.node && s.affinities[cidr].rev <= at {
			delete(s.affinities, cidr)
		}
	case store.KindIPAMHandle:
		if s.handles[key.Name].obj.Revision <= at {
			delete(s.handles, key.Name)
		}
	}
}

// readBlock reads a block; nil: it cannot be decoded.
func (s *state) readBlock(cidr netip.Prefix, rev store.Revision, b *cluster.Block) *blockInfo {
	if b == nil {
		return &blockInfo{Block: &cluster.Block{CIDR: cidr, Revision: rev}, broken: fmt.Errorf("block %s: %w", cidr, store.ErrDecode)}
	}
	info := &blockInfo{Block: b}
	if v := b.Value(); v != nil {
		info.ready = v.HeldBy(store.ReserveHandle(s.node))
	}
	return info
}

// mayHaveFree reports whether a look into the block is worth while.
func (b *blockInfo) mayHaveFree(now time.Time, cooldown time.Duration) bool {
	return b.Used < b.Size || !b.Cooling.IsZero() && now.Sub(b.Cooling) >= cooldown
}

// setBlock replaces what is known of a block; nil forgets it.
func (s *state) setBlock(cidr netip.Prefix, info *blockInfo) {
	s.reserve.settled(cidr, info)
	if old := s.blocks[cidr]; old != nil {
		s.lengths[lengthOf(cidr)]--
		s.own = slices.DeleteFunc(s.own, func(b *blockInfo) bool { return b == old })
		delete(s.blocks, cidr)
	}
	if info == nil {
		return
	}
	s.blocks[cidr] = info
	s.lengths[lengthOf(cidr)]++
	if info.Object != nil {
		i, _ := slices.BinarySearchFunc(s.own, info, func(a, b *blockInfo) int { return strings.Compare(a.path(), b.path()) })
		s.own = slices.Insert(s.own, i, info)
	}
}

// trimHandles bounds the memory of handles, which other programs may delete
// without this one hearing of it.
func (s *state) trimHandles() {
	limit := 1024
	for _, b := range s.own {
		limit += b.Used
	}
	if len(s.handles) > 2*limit {
		clear(s.handles)
	}
}

// blockAround returns the known block that contains an address.
func (s *state) blockAround(a netip.Addr) *blockInfo {
	for l, n := range s.lengths {
		if n == 0 || l.address != a.BitLen() {
			continue
		}
		if p, err := a.Prefix(l.prefix); err == nil && s.blocks[p] != nil {
			return s.blocks[p]
		}
	}
	return nil
}

// overlapping returns a known block that shares addresses with p. Blocks of
// another size than a pool's are left over from a pool that was there before.
func (s *state) overlapping(p netip.Prefix) *blockInfo {
	if b := s.blocks[p]; b != nil {
		return b
	}
	finer := false
	for l, n := range s.lengths {
		switch {
		case n == 0 || l.address != p.Addr().BitLen() || l.prefix == p.Bits():
		case l.prefix > p.Bits():
			finer = true
		default:
			if w, err := p.Addr().Prefix(l.prefix); err == nil && s.blocks[w] != nil {
				return s.blocks[w]
			}
		}
	}
	if !finer {
		return nil
	}
	for c, b := range s.blocks {
		if c.Bits() > p.Bits() && p.Contains(c.Addr()) {
			return b
		}
	}
	return nil
}

func (s *state) poolsByName() []*pool {
	if s.sortedPools == nil {
		s.sortedPools = make([]*pool, 0, len(s.pools))
		for _, p := range s.pools {
			s.sortedPools = append(s.sortedPools, p)
		}
		slices.SortFunc(s.sortedPools, func(a, b *pool) int { return strings.Compare(a.name, b.name) })
	}
	return s.sortedPools
}

// blockLimit returns how many blocks the node may hold for a request.
func (s *state) blockLimit(r *Request) int {
	limit := s.config.MaxBlocksPerHost
	if limit <= 0 {
		limit = defaultMaxBlocks
	}
	if r.MaxBlocks > 0 {
		limit = min(limit, r.MaxBlocks)
	}
	return limit
}

// cooldown returns how long a released address rests.
func (s *state) cooldown() time.Duration {
	return s.config.Cooldown()
}

// empties reports whether a block is this node's, empty, and one to be given up.
func (s *state) empties(cidr netip.Prefix) bool {
	b := s.blocks[cidr]
	return b != nil && b.Object != nil && b.Used == 0 && s.unwanted(cidr)
}
