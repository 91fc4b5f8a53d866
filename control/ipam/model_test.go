package ipam

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/memory"
)

// model says what may be assigned to whom, and knows nothing of blocks' queues,
// of handles' records or of transactions.
type model struct {
	pools    map[netip.Prefix]int // CIDR → block length
	reserved []netip.Prefix
	config   store.IPAMConfig
	now      time.Time

	held   map[netip.Addr]string // address → handle
	blocks map[netip.Prefix]owned
}

type owned struct {
	node  string
	since time.Time
}

func (m *model) everyBlock() []netip.Prefix {
	var out []netip.Prefix
	for pool, bits := range m.pools {
		for c := netip.PrefixFrom(pool.Addr(), bits); ; {
			out = append(out, c)
			if c = after(pool, c, bits); c.Addr() == pool.Addr() {
				break
			}
		}
	}
	return out
}

func (m *model) free(block netip.Prefix) int {
	n := 0
	for a := block.Addr(); block.Contains(a); a = a.Next() {
		if m.held[a] == "" && !containsAddr(m.reserved, a) {
			n++
		}
	}
	return n
}

func (m *model) used(block netip.Prefix) bool {
	for a := range m.held {
		if block.Contains(a) {
			return true
		}
	}
	return false
}

// reclaimable reports whether a node may take a block over.
func (m *model) reclaimable(block netip.Prefix, node string) bool {
	o, ok := m.blocks[block]
	return ok && o.node != node && !m.used(block) && m.now.Sub(o.since) >= reclaimAge
}

// available counts the addresses of a family that a node may get.
func (m *model) available(node string, f dataplane.Family) int {
	n := 0
	for _, b := range m.everyBlock() {
		if dataplane.FamilyOf(b.Addr()) != f {
			continue
		}
		o, exists := m.blocks[b]
		switch {
		case exists && o.node == node,
			!exists && m.config.AutoAllocateBlocks,
			exists && !m.config.StrictAffinity,
			m.config.AutoAllocateBlocks && m.reclaimable(b, node):
			n += m.free(b)
		}
	}
	return n
}

// assigned takes an outcome in, or says what is wrong with it.
func (m *model) assigned(node, handle string, as []Assignment, explicit bool) error {
	took := map[netip.Prefix]bool{}
	for _, a := range as {
		bits := 0
		for pool, b := range m.pools {
			if pool.Contains(a.Addr) {
				bits = b
			}
		}
		block := netip.PrefixFrom(a.Addr, bits).Masked()
		switch {
		case m.held[a.Addr] != "":
			return fmt.Errorf("%s is held by %s", a.Addr, m.held[a.Addr])
		case bits == 0 || a.Block != block:
			return fmt.Errorf("%s is said to be in block %s, it is in %s", a.Addr, a.Block, block)
		case !explicit && containsAddr(m.reserved, a.Addr):
			return fmt.Errorf("%s is reserved", a.Addr)
		}
		o, exists := m.blocks[block]
		switch {
		case took[block] || exists && o.node == node:
		case !exists, !explicit && m.config.AutoAllocateBlocks && m.reclaimable(block, node):
			if !explicit && !m.config.AutoAllocateBlocks {
				return fmt.Errorf("block %s was taken while blocks are not to be", block)
			}
			m.blocks[block] = owned{node, m.now}
		case m.config.StrictAffinity:
			return fmt.Errorf("%s of %s was borrowed while affinity is strict", a.Addr, block)
		}
		took[block] = true
	}
	for _, a := range as {
		m.held[a.Addr] = handle
	}
	return nil
}

// heldBy returns what a handle holds of some families.
func (m *model) heldBy(handle string, families ...dataplane.Family) []netip.Addr {
	var out []netip.Addr
	for a, h := range m.held {
		if h == handle && slices.Contains(families, dataplane.FamilyOf(a)) {
			out = append(out, a)
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return out
}

// machine drives three hosts and the model side by side.
type machine struct {
	*model
	st    *memory.Store
	clock *clock
	hosts map[string]*host
}

func newMachine(t *rapid.T) *machine {
	m := &machine{st: memory.New(), clock: newClock(), hosts: map[string]*host{}, model: &model{
		pools: map[netip.Prefix]int{
			netip.MustParsePrefix("10.0.0.0/28"): 30, netip.MustParsePrefix("10.0.1.0/30"): 31,
			netip.MustParsePrefix("fd00::/124"): 126, netip.MustParsePrefix("fd00:1::/126"): 127,
		},
		config: store.DefaultIPAMConfig(),
		held:   map[netip.Addr]string{},
		blocks: map[netip.Prefix]owned{},
	}}
	m.now = m.clock.time()
	for cidr, bits := range m.pools {
		put(t, m.st, newPool("p"+strings.ReplaceAll(cidr.Addr().String(), "::", "-v6"), cidr.String(), blockSize(bits)))
	}
	for _, n := range []string{"a", "b", "c"} {
		put(t, m.st, newNode(n, nil))
		m.hosts[n] = start(t, m.st, n, m.clock.time)
	}
	return m
}

func (m *machine) close() {
	for _, h := range m.hosts {
		h.stop()
	}
	_ = m.st.Close()
}

func (m *machine) pickHost(t *rapid.T) *host {
	return m.hosts[rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "host")]
}

func pickHandle(t *rapid.T) string {
	return fmt.Sprintf("h%d", rapid.IntRange(0, 4).Draw(t, "handle"))
}

// assign asks for addresses of one family, or of both together.
func (m *machine) assign(t *rapid.T) {
	h, handle := m.pickHost(t), pickHandle(t)
	families := rapid.SampledFrom([][]dataplane.Family{dataplane.Families()[:1], dataplane.Families()[1:], dataplane.Families()}).Draw(t, "families")
	idempotent := rapid.Bool().Draw(t, "idempotent")
	var parts []Part
	want, enough := make([]int, len(families)), true
	for i, f := range families {
		r := Request{Family: f, Handle: handle, Count: rapid.IntRange(1, 6).Draw(t, "count"), Idempotent: idempotent}
		if want[i] = r.Count; idempotent {
			want[i] = max(0, r.Count-len(m.heldBy(handle, f)))
		}
		enough = enough && m.available(h.cfg.Node, f) >= want[i]
		parts = append(parts, Part{Request: r})
	}
	got, err := h.AssignTogether(context.Background(), parts...)
	if !enough {
		if !errors.Is(err, ErrExhausted) {
			t.Fatalf("%s: %d addresses are not available: got %v, %v", h.cfg.Node, want, got, err)
		}
		return // and nothing has changed, as check finds out
	}
	if err != nil {
		t.Fatalf("%s: %d addresses are available: %v", h.cfg.Node, want, err)
	}
	for i, f := range families {
		m.got(t, h, handle, f, got[i], want[i], idempotent)
	}
}

// got takes the outcome of one part in.
func (m *machine) got(t *rapid.T, h *host, handle string, f dataplane.Family, got []Assignment, want int, idempotent bool) {
	if idempotent {
		before := m.heldBy(handle, f)
		kept := got[:len(before)]
		var have []netip.Addr
		for _, k := range kept {
			have = append(have, k.Addr)
		}
		slices.SortFunc(have, netip.Addr.Compare)
		mustDiff(t, "held before", before, have)
		got = got[len(before):]
	}
	if len(got) != want {
		t.Fatalf("got %d %s addresses, want %d", len(got), f, want)
	}
	if err := m.assigned(h.cfg.Node, handle, got, false); err != nil {
		t.Fatalf("%s: %v", h.cfg.Node, err)
	}
}

func (m *machine) pickAddr(t *rapid.T) netip.Addr {
	blocks := m.everyBlock()
	slices.SortFunc(blocks, netip.Prefix.Compare)
	b := rapid.SampledFrom(blocks).Draw(t, "block")
	return addrAt(b, rapid.IntRange(0, blockLen(b)-1).Draw(t, "ordinal"))
}

func (m *machine) assignAddr(t *rapid.T) {
	h, handle, addr := m.pickHost(t), pickHandle(t), m.pickAddr(t)
	got, err := h.AssignAddr(context.Background(), addr, Request{Handle: handle, Idempotent: true})
	var block netip.Prefix
	for _, b := range m.everyBlock() {
		if b.Contains(addr) {
			block = b
		}
	}
	o, exists := m.blocks[block]
	switch {
	case m.held[addr] == handle:
		if err != nil || got.Addr != addr {
			t.Fatalf("held already: got %v, %v", got, err)
		}
	case m.held[addr] != "":
		if !errors.Is(err, ErrTaken) {
			t.Fatalf("held by %s: got %v, %v", m.held[addr], got, err)
		}
	case exists && o.node != h.cfg.Node && m.config.StrictAffinity:
		if !errors.Is(err, ErrStrictAffinity) {
			t.Fatalf("%s in %v: got %v, %v", addr, o, got, err)
		}
	case err != nil:
		t.Fatalf("free: %v", err)
	default:
		if err := m.assigned(h.cfg.Node, handle, []Assignment{got}, true); err != nil {
			t.Fatalf("%s: %v", h.cfg.Node, err)
		}
	}
}

func (m *machine) releaseHandle(t *rapid.T) {
	h, handle := m.pickHost(t), pickHandle(t)
	got, err := h.ReleaseHandle(context.Background(), handle)
	if err != nil {
		t.Fatalf("%v", err)
	}
	slices.SortFunc(got, netip.Addr.Compare)
	mustDiff(t, "released", m.heldBy(handle, dataplane.Families()...), got)
	for _, a := range got {
		delete(m.held, a)
	}
}

func (m *machine) releaseAddr(t *rapid.T) {
	h, handle, addr := m.pickHost(t), pickHandle(t), m.pickAddr(t)
	got, err := h.Release(context.Background(), Claim{Addr: addr, Handle: handle})
	switch holder := m.held[addr]; {
	case holder == "":
		if err != nil || len(got) != 0 {
			t.Fatalf("free already: got %v, %v", got, err)
		}
	case holder != handle:
		if !errors.Is(err, ErrNotHolder) {
			t.Fatalf("held by %s: got %v, %v", holder, got, err)
		}
	case err != nil || len(got) != 1:
		t.Fatalf("got %v, %v", got, err)
	default:
		delete(m.held, addr)
	}
}

func (m *machine) configure(t *rapid.T) {
	m.config = rapid.SampledFrom([]store.IPAMConfig{{AutoAllocateBlocks: true}, {AutoAllocateBlocks: true, StrictAffinity: true}, {}}).Draw(t, "settings")
	put(t, m.st, new(m.config))
	for _, h := range m.hosts {
		settle(t, h, "the settings", func(s *state) bool { return s.config == m.config })
	}
}

func (m *machine) reserve(t *rapid.T) {
	m.reserved = nil
	var cidrs []string
	for range rapid.IntRange(0, 3).Draw(t, "reservations") {
		a := m.pickAddr(t)
		p, err := a.Prefix(a.BitLen() - rapid.IntRange(0, 3).Draw(t, "free bits"))
		if err != nil {
			t.Fatalf("%v", err)
		}
		m.reserved, cidrs = append(m.reserved, p), append(cidrs, p.String())
	}
	put(t, m.st, newReservation("r", cidrs...))
	for _, h := range m.hosts {
		settle(t, h, "the reservations", func(s *state) bool { return slices.Equal(s.reserved, m.reserved) })
	}
}

// restart starts a host again, with an empty memory.
func (m *machine) restart(t *rapid.T) {
	h := m.pickHost(t)
	h.stop()
	m.hosts[h.cfg.Node] = start(t, m.st, h.cfg.Node, m.clock.time)
	settle(t, m.hosts[h.cfg.Node], "the pools", func(s *state) bool { return len(s.pools) == len(m.pools) && s.registered })
}

// check compares the store with the model.
func (m *machine) check(t *rapid.T) {
	mustDiff(t, "assigned", m.held, audit(t, m.st))
	owners := map[string]string{}
	objs, _, err := m.st.List(context.Background(), store.KindIPAMBlock, "")
	if err != nil {
		t.Fatalf("list: %v", err)
	}
	for _, o := range objs {
		owners[o.Key.Name] = o.Value.(*store.Block).Holder()
	}
	want := map[string]string{}
	for b, o := range m.blocks {
		want[b.String()] = o.node
	}
	mustDiff(t, "who holds which block", want, owners)
	for _, name := range slices.Sorted(maps.Keys(m.hosts)) {
		catchUp(t, m.hosts[name], m.st)
	}
}

// TestModel holds random sequences of operations on three hosts to the model.
func TestModel(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		m := newMachine(t)
		defer m.close()
		t.Repeat(map[string]func(*rapid.T){
			"assign":        m.assign,
			"assign more":   m.assign,
			"assignAddr":    m.assignAddr,
			"releaseHandle": m.releaseHandle,
			"releaseAddr":   m.releaseAddr,
			"configure":     m.configure,
			"reserve":       m.reserve,
			"restart":       m.restart,
			"wait": func(t *rapid.T) {
				m.clock.turn(time.Duration(rapid.SampledFrom([]int{1, 30, 61}).Draw(t, "seconds")) * time.Second)
				m.now = m.clock.time()
			},
			"": m.check,
		})
	})
}
