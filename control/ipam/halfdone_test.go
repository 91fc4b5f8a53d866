package ipam

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"strings"
	"testing"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

// TestHalfDone begins with what a crash of a Calico host leaves, and expects
// that the node can assign and that the records agree in the end.
func TestHalfDone(t *testing.T) {
	t.Parallel()
	cidr := netip.MustParsePrefix("10.0.0.0/30")
	for name, tc := range map[string]struct {
		affinity string // of node a, as stored; empty: none
		owner    string // of the block; empty: no block; "-": nobody
		used     bool
		held     bool   // a holds the block at the end
		in       string // empty: wherever; a claim without a block is finished or undone, whichever comes first
	}{
		"claim begun":                           {`{"state":"pending","deleted":false}`, "", false, false, ""},
		"claim begun, block made":               {`{"state":"pending","deleted":false}`, "a", false, true, "10.0.0.0/30"},
		"claim lost to another":                 {`{"state":"pending","deleted":false}`, "b", true, false, "10.0.0.4/30"},
		"confirmed, block lost to another":      {`{"state":"confirmed","deleted":false}`, "b", true, false, "10.0.0.4/30"},
		"confirmed, no block":                   {`{"state":"confirmed","deleted":false}`, "", false, false, ""},
		"block made, no affinity":               {``, "a", true, true, "10.0.0.0/30"},
		"release begun, block in use":           {`{"state":"pendingDeletion","deleted":false}`, "a", true, false, "10.0.0.4/30"},
		"release begun, block disowned":         {`{"state":"pendingDeletion","deleted":false}`, "-", true, false, "10.0.0.4/30"},
		"release begun, block empty":            {`{"state":"pendingDeletion","deleted":false}`, "a", false, false, ""},
		"release begun, block deleted":          {`{"state":"pendingDeletion","deleted":false}`, "", false, false, ""},
		"old affinity without a value":          {`{}`, "a", true, true, "10.0.0.0/30"},
		"affinity that nobody can read":         {`[]`, "a", true, true, "10.0.0.0/30"},
		"affinity unreadable, block another's":  {`[]`, "b", true, false, "10.0.0.4/30"},
		"empty block that nobody holds remains": {``, "-", false, false, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, newPool("p", "10.0.0.0/29", blockSize(30)))
			if tc.affinity != "" {
				w.st.PutRaw(store.AffinityKey("a", cidr).Path(), []byte(tc.affinity))
			}
			if tc.owner != "" {
				b := newBlock(cidr, tc.owner, w.clock.time())
				if tc.owner == "-" {
					b.disown()
				}
				if tc.owner == "b" {
					putAt(t, w.st, store.AffinityKey("b", cidr), &store.Affinity{State: store.AffinityConfirmed})
				}
				if tc.used {
					b.assign([]int{3}, named("old"))
					b.SequenceNumber++
					putAt(t, w.st, store.HandleKey("old"), &store.Handle{Block: map[string]int{cidr.String(): 1}})
				}
				putAt(t, w.st, store.BlockKey(cidr), b.Block)
			}
			h := w.host("a", nil)
			got, err := h.Assign(await.Context(t), Request{Family: dataplane.IPv4, Handle: "h", Count: 2})
			if err != nil {
				t.Fatal(err)
			}
			if tc.in != "" && got[0].Block.String() != tc.in {
				t.Errorf("assigned from %s, want %s", got[0].Block, tc.in)
			}
			if _, err := h.Tidy(await.Context(t)); err != nil {
				t.Fatal(err)
			}
			if tc.owner == "-" && !tc.used && got[0].Block != cidr {
				// Nothing but an assignment touches a block that nobody holds.
				remove(t, w.st, store.BlockKey(cidr))
			}
			held := false
			for _, b := range h.Blocks() {
				held = held || b.CIDR == cidr
			}
			if tc.in != "" && held != tc.held {
				t.Errorf("holds %s: %v, want %v", cidr, held, tc.held)
			}
			audit(t, w.st)
		})
	}
}

// TestGiveUpBlocks: blocks of pools that do not select the node any more go
// back when they are empty.
func TestGiveUpBlocks(t *testing.T) {
	t.Parallel()
	rack := func(s *v3.IPPoolSpec) { s.NodeSelector = "rack == 'r1'" }
	w := newWorld(t, newPool("p", "10.0.0.0/24", blockSize(30), rack), newPool("q", "10.1.0.0/24", blockSize(30), rack))
	h := w.host("a", map[string]string{"rack": "r1"})
	r := v4("stays")
	r.Pools = []string{"p"}
	mustAssign(t, h, r)
	r.Handle, r.Pools = "goes", []string{"q"}
	gone := mustAssign(t, h, r)
	if _, err := h.ReleaseHandle(await.Context(t), "goes"); err != nil {
		t.Fatal(err)
	}
	mustDiff(t, "blocks", 2, len(h.Blocks()))
	put(t, w.st, newNode("a", map[string]string{"rack": "r2"}))
	settle(t, h, "the empty block given up", func(s *state) bool { return len(s.own) == 1 })
	if b := h.Blocks()[0]; b.Pool != "p" || b.CIDR.Contains(netip.MustParseAddr(gone[0])) {
		t.Errorf("kept %v", b)
	}
	audit(t, w.st)
	if _, err := h.ReleaseHandle(await.Context(t), "stays"); err != nil {
		t.Fatal(err)
	}
	// The host gives it back by itself, or Tidy does if it comes first.
	if _, err := h.Tidy(await.Context(t)); err != nil {
		t.Fatal(err)
	}
	settle(t, h, "the last block given up", func(s *state) bool { return len(s.own) == 0 })
	mustDiff(t, "store", map[string]string{}, raw(t, w.st))
}

func TestReleaseGuards(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/30", blockSize(32)))
	h := w.host("a", nil)
	ctx := await.Context(t)
	r := v4("h")
	r.Count = 4
	got, err := h.Assign(ctx, r)
	if err != nil {
		t.Fatal(err)
	}
	first := got[0]
	if _, err := h.Release(ctx, Claim{Addr: got[1].Addr}, Claim{Addr: first.Addr, Handle: "i"}); !errors.Is(err, ErrNotHolder) || !strings.Contains(err.Error(), `held by "h", not by "i"`) {
		t.Errorf("another handle: %v", err)
	}
	mustDiff(t, "nothing is released with a wrong claim", 4, len(audit(t, w.st)))
	if out, err := h.Release(ctx, Claim{first.Addr, "h", first.Sequence}, Claim{Addr: first.Addr}, Claim{Addr: netip.MustParseAddr("1.2.3.4")}); err != nil || len(out) != 1 {
		t.Errorf("release: %v, %v", out, err)
	}
	if out, err := h.Release(ctx, Claim{first.Addr, "h", first.Sequence}); err != nil || len(out) != 0 {
		t.Errorf("released twice: %v, %v", out, err)
	}
	w.clock.turn(time.Second)
	mustDiff(t, "given anew", []string{first.Addr.String()}, mustAssign(t, h, v4("h")))
	if _, err := h.Release(ctx, Claim{first.Addr, "h", first.Sequence}); !errors.Is(err, ErrNotHolder) || !strings.Contains(err.Error(), "given anew since") {
		t.Errorf("an old sequence number: %v", err)
	}
	audit(t, w.st)
	var all []Claim
	for a := range audit(t, w.st) {
		all = append(all, Claim{Addr: a, Handle: "h"})
	}
	if out, err := h.Release(ctx, all...); err != nil || len(out) != 4 {
		t.Errorf("release of all: %v, %v", out, err)
	}
	mustDiff(t, "left", 0, len(audit(t, w.st)))
}

// TestManyClaims releases more than one transaction takes, while the block
// has no holder: it goes with its last address.
func TestManyClaims(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/24", blockSize(24)))
	h := w.host("a", nil)
	var claims []Claim
	for i := range 200 {
		for _, a := range mustAssign(t, h, v4(fmt.Sprint("h", i))) {
			claims = append(claims, Claim{Addr: netip.MustParseAddr(a)})
		}
	}
	putAt(t, w.st, store.AffinityKey("a", netip.MustParsePrefix("10.0.0.0/24")), &store.Affinity{State: store.AffinityPendingDeletion})
	settle(t, h, "the affinity's end begun", func(s *state) bool {
		return s.affinities[netip.MustParsePrefix("10.0.0.0/24")].state == store.AffinityPendingDeletion
	})
	if _, err := h.Tidy(await.Context(t)); err != nil {
		t.Fatal(err)
	}
	mustDiff(t, "blocks held", 0, len(h.Blocks()))
	audit(t, w.st)
	out, err := h.Release(await.Context(t), claims...)
	if err != nil || len(out) != 200 {
		t.Errorf("released %d, %v", len(out), err)
	}
	mustDiff(t, "store", map[string]string{}, raw(t, w.st))
}

func TestCooldown(t *testing.T) {
	t.Parallel()
	seconds := 30
	w := newWorld(t, newPool("p", "10.0.0.0/31", blockSize(31)), &store.IPAMConfig{AutoAllocateBlocks: true, StrictAffinity: true, IPCooldownSeconds: &seconds})
	h := w.host("a", nil)
	r := v4("h")
	r.Count = 2
	first := mustAssign(t, h, r)
	if _, err := h.ReleaseHandle(await.Context(t), "h"); err != nil {
		t.Fatal(err)
	}
	mustDiff(t, "assigned", 0, len(audit(t, w.st)))
	if _, err := h.Assign(await.Context(t), r); !errors.Is(err, ErrExhausted) {
		t.Errorf("while cooling: got %v", err)
	}
	if _, err := h.AssignAddr(await.Context(t), netip.MustParseAddr(first[0]), Request{Handle: "h"}); !errors.Is(err, ErrTaken) || !errors.Is(err, ErrCooldown) || !strings.Contains(err.Error(), ", for 30s") {
		t.Errorf("while cooling: got %v", err)
	}
	w.clock.turn(31 * time.Second)
	mustDiff(t, "cooled down", first, mustAssign(t, h, r))
	audit(t, w.st)
}

// TestUnreadable: a record that cannot be decoded, or makes no sense, does not
// stop what does not need it.
func TestUnreadable(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/29", blockSize(30)))
	other := newBlock(netip.MustParsePrefix("10.0.0.4/30"), "a", w.clock.time())
	other.assign([]int{0}, named("lost"))
	other.SequenceNumber++
	putAt(t, w.st, store.HandleKey("lost"), &store.Handle{Block: map[string]int{"10.0.0.4/30": 1}})
	w.st.PutRaw(store.BlockKey(other.cidr).Path(), []byte(`{"cidr":"10.0.0.4/30","allocations":[9]`))
	w.st.PutRaw(store.HandleKey("bad").Path(), []byte(`nonsense`))
	w.st.PutRaw(store.IPAMConfigKey().Path(), []byte(`[]`))
	h := w.host("a", nil)
	if _, err := h.Assign(await.Context(t), v4("h")); err == nil || !errors.Is(err, store.ErrDecode) || !strings.Contains(err.Error(), "read IPAM's settings") {
		t.Errorf("with unreadable settings and none known: got %v", err)
	}
	put(t, w.st, &store.IPAMConfig{AutoAllocateBlocks: true, MaxBlocksPerHost: 7})
	settle(t, h, "the settings", func(s *state) bool { return s.config.MaxBlocksPerHost == 7 })
	rev := w.st.PutRaw(store.IPAMConfigKey().Path(), []byte(`[]`))
	put(t, w.st, newReservation("r", "10.9.9.9/32"))
	settle(t, h, "the state after the settings broke", func(s *state) bool { return len(s.reservations) == 1 && rev > 0 })
	if _, err := h.Assign(await.Context(t), v4("bad")); !errors.Is(err, store.ErrDecode) || !strings.Contains(err.Error(), "Handle(bad)") && !strings.Contains(err.Error(), "handle bad") {
		t.Errorf("a handle that nobody can read: got %v", err)
	}
	for i := range 4 {
		if got := mustAssign(t, h, v4(fmt.Sprint("h", i))); !netip.MustParsePrefix("10.0.0.0/30").Contains(netip.MustParseAddr(got[0])) {
			t.Errorf("got %s, from the block that nobody can read", got)
		}
	}
	for says, err := range map[string]error{
		"block 10.0.0.4/30": second(h.ReleaseHandle(await.Context(t), "lost")),
		"10.0.0.4/30":       second(h.Assign(await.Context(t), v4("more"))),
	} {
		if !errors.Is(err, store.ErrDecode) || !strings.Contains(strings.ToLower(err.Error()), says) {
			t.Errorf("got %v, want a complaint about %s", err, says)
		}
	}
	putAt(t, w.st, store.BlockKey(other.cidr), other.Block)
	catchUp(t, h, w.st)
	if got, err := h.ReleaseHandle(await.Context(t), "lost"); err != nil || len(got) != 1 {
		t.Errorf("after the repair: %v, %v", got, err)
	}
}

func TestTunnel(t *testing.T) {
	t.Parallel()
	ipip := func(s *v3.IPPoolSpec) { s.IPIPMode = v3.IPIPModeAlways }
	w := newWorld(t, newPool("direct", "10.0.0.0/24"), newPool("six", "fd00::/64", func(s *v3.IPPoolSpec) { s.VXLANMode = v3.VXLANModeCrossSubnet }))
	h := w.host("a", nil)
	ctx := await.Context(t)
	_, _, err := h.EnsureTunnel(ctx, IPIPTunnel, false)
	if !errors.Is(err, ErrNoPool) || !strings.Contains(err.Error(), "pool direct: its encapsulation is Direct") {
		t.Errorf("got %v, want ErrNoPool", err)
	}
	if _, _, err := h.EnsureTunnel(ctx, 0, false); !errors.Is(err, ErrInvalidRequest) {
		t.Errorf("got %v", err)
	}
	six, _, err := h.EnsureTunnel(ctx, VXLANv6Tunnel, false)
	if err != nil || six.Handle != "vxlan-v6-tunnel-addr-a" {
		t.Errorf("got %v, %v", six, err)
	}

	put(t, w.st, newPool("one", "10.1.0.0/24", ipip))
	settle(t, h, "the pool", func(s *state) bool { return len(s.pools) == 3 })
	first, _, err := h.EnsureTunnel(ctx, IPIPTunnel, false)
	if err != nil {
		t.Fatal(err)
	}
	second, _, err := h.EnsureTunnel(ctx, IPIPTunnel, false)
	if err != nil {
		t.Fatal(err)
	}
	mustDiff(t, "kept", first, second)
	obj, err := w.st.Get(ctx, store.BlockKey(first.Block))
	if err != nil {
		t.Fatal(err)
	}
	mustDiff(t, "attribute", map[string]string{"node": "a", "type": "ipipTunnelAddress"}, obj.Value.(*store.Block).Attribute(0).Secondary)

	// The pool is disabled, and there is no other: its packets are still
	// carried, and so is the address.
	off := newPool("one", "10.1.0.0/24", ipip, func(s *v3.IPPoolSpec) { s.Disabled = true })
	put(t, w.st, off)
	settle(t, h, "the disabled pool", func(s *state) bool { return s.pools["one"].off != "" })
	still, old, err := h.EnsureTunnel(ctx, IPIPTunnel, false)
	if err != nil || len(old) != 0 {
		t.Fatalf("in a disabled pool: %v, %v", old, err)
	}
	mustDiff(t, "kept in a disabled pool", first, still)
	// One that no device has any more does not come back.
	if got, _, err := h.EnsureTunnel(ctx, IPIPTunnel, true); !errors.Is(err, ErrNoPool) {
		t.Errorf("leaving, in a disabled pool: %v, %v, want ErrNoPool", got, err)
	}

	// With another one it gives way, and stays until it is released.
	put(t, w.st, newPool("two", "10.2.0.0/24", ipip))
	settle(t, h, "the pools", func(s *state) bool { return len(s.pools) == 4 })
	moved, old, err := h.EnsureTunnel(ctx, IPIPTunnel, false)
	if err != nil {
		t.Fatal(err)
	}
	mustDiff(t, "pool", "two", moved.Pool)
	mustDiff(t, "old", []Assignment{first}, old)
	left := map[netip.Addr]string{moved.Addr: "ipip-tunnel-addr-a", six.Addr: "vxlan-v6-tunnel-addr-a"}
	both := maps.Clone(left)
	both[first.Addr] = "ipip-tunnel-addr-a"
	mustDiff(t, "assigned", both, audit(t, w.st))
	if err := h.ReleaseTunnel(ctx, IPIPTunnel, moved.Addr); err != nil {
		t.Fatal(err)
	}
	mustDiff(t, "after the release", left, audit(t, w.st))

	// The pool goes, with the address still in it: the block follows the
	// address.
	remove(t, w.st, store.ResourceKey(store.KindIPPool, "one"))
	remove(t, w.st, store.ResourceKey(store.KindIPPool, "two"))
	settle(t, h, "the pools that are left", func(s *state) bool { return len(s.pools) == 2 })
	if _, _, err := h.EnsureTunnel(ctx, IPIPTunnel, false); !errors.Is(err, ErrNoPool) {
		t.Errorf("without a pool: %v, want ErrNoPool", err)
	}
	for range 2 {
		if err := h.ReleaseTunnel(ctx, IPIPTunnel, netip.Addr{}); err != nil {
			t.Fatal(err)
		}
	}
	settle(t, h, "the blocks of pools that are gone", func(s *state) bool { return len(s.own) == 1 && len(s.affinities) == 1 })
	mustDiff(t, "left", map[netip.Addr]string{six.Addr: "vxlan-v6-tunnel-addr-a"}, audit(t, w.st))
}

// TestUnknownMembers: what a newer program keeps in a block outlives writes.
func TestUnknownMembers(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/30", blockSize(30)))
	h := w.host("a", nil)
	mustAssign(t, h, v4("h1"))
	key := store.BlockKey(netip.MustParsePrefix("10.0.0.0/30"))
	obj, err := w.st.Get(await.Context(t), key)
	if err != nil {
		t.Fatal(err)
	}
	w.st.PutRaw(key.Path(), []byte(strings.Replace(string(obj.Raw), `{"cidr"`, `{"novelty":{"x":1},"cidr"`, 1)))
	catchUp(t, h, w.st)
	for i := range 2 {
		mustAssign(t, h, v4(fmt.Sprint("more", i)))
	}
	if _, err := h.ReleaseHandle(await.Context(t), "h1"); err != nil {
		t.Fatal(err)
	}
	if obj, err = w.st.Get(await.Context(t), key); err != nil || !strings.Contains(string(obj.Raw), `"novelty":{"x":1}`) {
		t.Errorf("stored: %s, %v", obj.Raw, err)
	}
}
