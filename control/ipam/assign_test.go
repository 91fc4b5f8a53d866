package ipam

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/memory"
)

// TestStored holds everything that one assignment writes to Calico's form.
func TestStored(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("pool", "192.168.0.0/16", blockSize(29)), newPool("six", "fd00:10::/48", blockSize(127)))
	h := w.host("node-a", nil)
	r := v4("net1.abc")
	r.Attributes = map[string]string{AttrPod: "web-0", AttrNamespace: "ns1"}
	got := mustAssign(t, h, r)
	mustDiff(t, "address", []string{"192.168.165.136"}, got)
	r.Family = dataplane.IPv6
	got = mustAssign(t, h, r)
	mustDiff(t, "address", []string{"fd00:10:0:e368:aba5:d040:7241:ac04"}, got)
	mustDiff(t, "store", map[string]string{
		"host/node-a/ipv4/block/192.168.165.136-29":                     `{"state":"confirmed","deleted":false}`,
		"host/node-a/ipv6/block/fd00:10:0:e368:aba5:d040:7241:ac04-127": `{"state":"confirmed","deleted":false}`,
		"handle/net1.abc": `{"block":{"192.168.165.136/29":1,"fd00:10:0:e368:aba5:d040:7241:ac04/127":1},"deleted":false}`,
		"assignment/ipv4/block/192.168.165.136-29": `{"cidr":"192.168.165.136/29","affinity":"host:node-a","affinity_claim_time":"2026-11-21T17:31:36Z",` +
			`"allocations":[0,null,null,null,null,null,null,null],"unallocated":[1,2,3,4,5,6,7],` +
			`"attributes":[{"handle_id":"net1.abc","secondary":{"namespace":"ns1","node":"node-a","pod":"web-0"}}],` +
			`"sequenceNumber":1795282296903635738,"sequenceNumberForAllocation":{"0":1795282296903635737},"deleted":false}`,
		"assignment/ipv6/block/fd00:10:0:e368:aba5:d040:7241:ac04-127": `{"cidr":"fd00:10:0:e368:aba5:d040:7241:ac04/127","affinity":"host:node-a","affinity_claim_time":"2026-11-21T17:31:36Z",` +
			`"allocations":[0,null],"unallocated":[1],` +
			`"attributes":[{"handle_id":"net1.abc","secondary":{"namespace":"ns1","node":"node-a","pod":"web-0"}}],` +
			`"sequenceNumber":1795282296903635738,"sequenceNumberForAllocation":{"0":1795282296903635737},"deleted":false}`,
	}, raw(t, w.st))
	audit(t, w.st)
	mustDiff(t, "blocks", []BlockStatus{
		{netip.MustParsePrefix("192.168.165.136/29"), "pool", 8, 1},
		{netip.MustParsePrefix("fd00:10:0:e368:aba5:d040:7241:ac04/127"), "six", 2, 1},
	}, h.Blocks())
}

func TestPoolSelection(t *testing.T) {
	t.Parallel()
	set := func(change func(*v3.IPPoolSpec)) func(*v3.IPPoolSpec) { return change }
	manual := v3.Manual
	w := newWorld(t,
		newPool("a-off", "10.0.0.0/24", set(func(s *v3.IPPoolSpec) { s.Disabled = true })),
		newPool("b-rack", "10.1.0.0/24", set(func(s *v3.IPPoolSpec) { s.NodeSelector = "rack == 'r9'" })),
		newPool("c-manual", "10.2.0.0/24", set(func(s *v3.IPPoolSpec) { s.AssignmentMode = &manual })),
		newPool("d-tunnel", "10.3.0.0/24", set(func(s *v3.IPPoolSpec) { s.AllowedUses = []v3.IPPoolAllowedUse{v3.IPPoolAllowedUseTunnel} })),
		newPool("e-team", "10.4.0.0/24", set(func(s *v3.IPPoolSpec) { s.NamespaceSelector = "team == 'x'" })),
		newPool("f-six", "fd00::/64"),
		newPool("g-wrong", "10.6.0.0/24", set(func(s *v3.IPPoolSpec) { s.NodeSelector = "rack = 'r1'" })),
		newPool("h-size", "10.7.0.0/24", blockSize(12)),
	)
	w.st.PutRaw(store.ResourceKey(store.KindIPPool, "i-json").Path(), []byte(`{"kind":"IPPool",`))
	w.st.PutRaw(store.ResourceKey(store.KindIPPool, "j-status").Path(), []byte(`{"kind":"IPPool","apiVersion":"projectcalico.org/v3","metadata":{"name":"j-status"},"spec":{"cidr":"10.9.0.0/24"},"status":{"conditions":[{"type":"Allocatable","status":"False"}]}}`))
	h := w.host("node-a", map[string]string{"rack": "r1"})

	_, err := h.Assign(await.Context(t), v4("h1"))
	var refusal *Error
	if !errors.Is(err, ErrNoPool) || !errors.As(err, &refusal) {
		t.Fatalf("got %v, want ErrNoPool", err)
	}
	mustDiff(t, "reasons", []PoolReason{
		{"a-off", "it is disabled"},
		{"b-rack", `its nodeSelector rack == "r9" does not match the node's labels`},
		{"c-manual", "its assignmentMode is Manual, and the request does not name it"},
		{"d-tunnel", "its allowedUses [Tunnel] lack Workload"},
		{"e-team", `its namespaceSelector team == "x" does not match the namespace's labels`},
		{"g-wrong", `nodeSelector: selector "rack = 'r1'", character 6: = is no operator; write == to compare`},
		{"h-size", "blockSize 12 is not between 24 and 32"},
		{"i-json", "its record cannot be decoded"},
		{"j-status", "its status says Allocatable=False"},
	}, refusal.Pools)
	if !strings.Contains(err.Error(), `assign IPv4 address to h1: no usable IP pool: none of the 9 candidates serves node node-a (pool a-off: it is disabled; pool b-rack:`) {
		t.Errorf("error reads: %v", err)
	}

	for _, tc := range []struct {
		name  string
		pools []string
		use   Use
		ns    map[string]string
		in    string // the pool that it comes from
		err   error
	}{
		{"namespace", nil, "", map[string]string{"team": "x"}, "e-team", nil},
		{"use", nil, Tunnel, nil, "d-tunnel", nil},
		{"by name: selectors are not asked", []string{"b-rack"}, "", nil, "b-rack", nil},
		{"by CIDR: manual", []string{"10.2.0.0/24"}, "", nil, "c-manual", nil},
		{"two: blocks that the node holds come first, in the order of their keys", []string{"c-manual", "b-rack"}, "", nil, "b-rack", nil},
		{"by name: disabled", []string{"a-off"}, "", nil, "", ErrUnknownPool},
		{"by name: unknown", []string{"nope"}, "", nil, "", ErrUnknownPool},
		{"by name: use", []string{"d-tunnel"}, "", nil, "", ErrNoPool},
		{"by name: family", []string{"f-six"}, "", nil, "", ErrNoPool},
		{"no pool of the use", nil, LoadBalancer, nil, "", ErrNoPool},
	} {
		r := v4("h-" + tc.name)
		r.Pools, r.Use, r.NamespaceLabels = tc.pools, tc.use, tc.ns
		got, err := h.Assign(await.Context(t), r)
		if !errors.Is(err, tc.err) || (err == nil) != (tc.err == nil) {
			t.Errorf("%s: got error %v, want %v", tc.name, err, tc.err)
			continue
		}
		if err == nil && got[0].Pool != tc.in {
			t.Errorf("%s: got %s from %q, want it from %q", tc.name, got[0].Addr, got[0].Pool, tc.in)
		}
	}
	audit(t, w.st)
}

// A pool that this host cannot use gives workloads nothing, named or not; its
// tunnel keeps its address.
func TestUnusablePool(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/24", func(s *v3.IPPoolSpec) { s.VXLANMode = v3.VXLANModeAlways }))
	h := w.host("a", nil)
	h.mu.Lock()
	h.state.unusable = func(pool string) string { return "the network of eth1 is in " + pool }
	h.mu.Unlock()
	named := v4("h")
	named.Pools = []string{"p"}
	for _, r := range []Request{v4("h"), named} {
		if _, err := h.Assign(await.Context(t), r); !errors.Is(err, ErrNoPool) || !strings.Contains(err.Error(), "pool p: the network of eth1 is in p") {
			t.Errorf("got %v, want ErrNoPool with the reason", err)
		}
	}
	if _, _, err := h.EnsureTunnel(await.Context(t), VXLANTunnel, false); err != nil {
		t.Errorf("tunnel: %v", err)
	}
}

func TestNoPoolAtAll(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	h := w.host("a", nil)
	_, err := h.Assign(await.Context(t), v4("h"))
	if want := "assign IPv4 address to h: no usable IP pool: there is no IPv4 pool; create one"; err == nil || err.Error() != want {
		t.Errorf("got  %v\nwant %s", err, want)
	}
}

func TestInvalidRequests(t *testing.T) {
	t.Parallel()
	h := newWorld(t, newPool("p", "10.0.0.0/24")).host("a", nil)
	ctx := await.Context(t)
	for says, err := range map[string]error{
		"family is 0":               second(h.Assign(ctx, Request{Handle: "h"})),
		"handle is empty":           second(h.Assign(ctx, v4(""))),
		"count is -1":               second(h.Assign(ctx, Request{Family: dataplane.IPv4, Handle: "h", Count: -1})),
		"maximum of blocks is -2":   second(h.Assign(ctx, Request{Family: dataplane.IPv4, Handle: "h", MaxBlocks: -2})),
		"count is 2":                second(h.AssignAddr(ctx, netip.MustParseAddr("10.0.0.1"), Request{Handle: "h", Count: 2})),
		"not a plain IPv4":          second(h.AssignAddr(ctx, netip.Addr{}, v4("h"))),
		"10.0.0.1 is not IPv6":      second(h.AssignAddr(ctx, netip.MustParseAddr("10.0.0.1"), Request{Family: dataplane.IPv6, Handle: "h"})),
		"address \"fe80::1%eth0\"":  second(h.AssignAddr(ctx, netip.MustParseAddr("fe80::1%eth0"), Request{Handle: "h"})),
		"invalid request: handle i": second(h.ReleaseHandle(ctx, "")),
	} {
		if !errors.Is(err, ErrInvalidRequest) || !strings.Contains(err.Error(), says) {
			t.Errorf("got %v, want %q", err, says)
		}
	}
}

func second[T any](_ T, err error) error { return err }

func TestNodeMissing(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/24"))
	h := w.host("a", nil)
	mustAssign(t, h, v4("h1"))
	remove(t, w.st, store.ResourceKey(store.KindNode, "a"))
	settle(t, h, "the node gone", func(s *state) bool { return !s.registered })
	if _, err := h.Assign(await.Context(t), v4("h2")); !errors.Is(err, ErrNodeMissing) || !strings.Contains(err.Error(), `no Node "a"`) {
		t.Errorf("got %v", err)
	}
	if got, err := h.ReleaseHandle(await.Context(t), "h1"); err != nil || len(got) != 1 {
		t.Errorf("release: got %v, %v", got, err)
	}
}

// TestOrder: from the front of the queue, back to its tail, across blocks.
func TestOrder(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/28", blockSize(30)), newReservation("r", "10.0.0.1/32", "10.0.0.6/31", "10.0.0.8/29", "oops", "10.0.0.250"))
	h := w.host("a", nil) // 10.0.0.0/30 and 10.0.0.4/30 have 0, 2, 3 and 4, 5
	r := v4("all")
	r.Count = 5
	first := mustAssign(t, h, r)
	mustDiff(t, "count", 5, len(first))
	want := map[string]bool{"10.0.0.0": true, "10.0.0.2": true, "10.0.0.3": true, "10.0.0.4": true, "10.0.0.5": true}
	for _, a := range first {
		if !want[a] {
			t.Errorf("%s is reserved or was given twice", a)
		}
		delete(want, a)
	}
	if _, err := h.Assign(await.Context(t), v4("more")); !errors.Is(err, ErrExhausted) || !strings.Contains(err.Error(), "node a lacks 1 of 1 IPv4 addresses in p (10.0.0.0/28)") {
		t.Errorf("got %v", err)
	}
	audit(t, w.st)
	if _, err := h.Release(await.Context(t), Claim{Addr: netip.MustParseAddr("10.0.0.3")}); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Release(await.Context(t), Claim{Addr: netip.MustParseAddr("10.0.0.0")}); err != nil {
		t.Fatal(err)
	}
	mustDiff(t, "first released, first given", []string{"10.0.0.3"}, mustAssign(t, h, v4("x")))
	mustDiff(t, "then the other", []string{"10.0.0.0"}, mustAssign(t, h, v4("y")))
	r.Handle, r.Count = "z", 1
	if _, err := h.Assign(await.Context(t), r); !errors.Is(err, ErrExhausted) {
		t.Errorf("got %v", err)
	}
	audit(t, w.st)
}

func TestAllOrNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/29", blockSize(30)))
	h := w.host("a", nil)
	r := v4("big")
	r.Count = 9
	if _, err := h.Assign(await.Context(t), r); !errors.Is(err, ErrExhausted) || !strings.Contains(err.Error(), "lacks 1 of 9") {
		t.Errorf("got %v", err)
	}
	mustDiff(t, "store", map[string]string{}, raw(t, w.st))
}

func TestBlockLimit(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/24", blockSize(31)), &store.IPAMConfig{AutoAllocateBlocks: true, MaxBlocksPerHost: 2, StrictAffinity: true})
	h := w.host("a", nil)
	r := v4("h")
	r.Count, r.MaxBlocks = 3, 1
	if _, err := h.Assign(await.Context(t), r); !errors.Is(err, ErrBlockLimit) || !strings.Contains(err.Error(), "node a holds 1 blocks in p (10.0.0.0/24), may hold 1") {
		t.Errorf("limit of the request: got %v", err)
	}
	r.MaxBlocks = 0
	mustAssign(t, h, r)
	r.Handle = "i"
	if _, err := h.Assign(await.Context(t), r); !errors.Is(err, ErrBlockLimit) {
		t.Errorf("limit of the settings: got %v", err)
	}
	mustDiff(t, "blocks", 2, len(h.Blocks()))
	audit(t, w.st)
}

func TestDefaultBlockLimit(t *testing.T) {
	t.Parallel()
	h := newWorld(t, newPool("p", "10.0.0.0/24", blockSize(32))).host("a", nil)
	r := v4("h")
	r.Count = 20
	mustAssign(t, h, r)
	if _, err := h.Assign(await.Context(t), v4("i")); !errors.Is(err, ErrBlockLimit) || !strings.Contains(err.Error(), "holds 20 blocks") {
		t.Errorf("got %v", err)
	}
}

// TestBorrow: when no block can be had, single addresses of others' blocks,
// unless affinity is strict.
func TestBorrow(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/30", blockSize(30)))
	a, b := w.host("a", nil), w.host("b", nil)
	mustDiff(t, "a's", []string{"10.0.0.0"}, mustAssign(t, a, v4("ha")))
	catchUp(t, b, w.st)
	r := v4("hb")
	r.Attributes = map[string]string{AttrPod: "p1"}
	mustDiff(t, "borrowed", []string{"10.0.0.1"}, mustAssign(t, b, r))
	mustDiff(t, "b's blocks", []BlockStatus{}, b.Blocks())
	catchUp(t, a, w.st)
	mustDiff(t, "a's blocks", 2, a.Blocks()[0].InUse)
	got, err := b.ByHandle(await.Context(t), "hb")
	if err != nil {
		t.Fatal(err)
	}
	mustDiff(t, "held", []string{"10.0.0.1"}, addrs(got))
	obj, err := w.st.Get(await.Context(t), store.BlockKey(netip.MustParsePrefix("10.0.0.0/30")))
	if err != nil {
		t.Fatal(err)
	}
	mustDiff(t, "attributes of the borrowed address", map[string]string{"node": "b", "pod": "p1"}, obj.Value.(*store.Block).Attribute(1).Secondary)
	audit(t, w.st)

	put(t, w.st, &store.IPAMConfig{AutoAllocateBlocks: true, StrictAffinity: true})
	settle(t, b, "strict affinity", func(s *state) bool { return s.config.StrictAffinity })
	if _, err := b.Assign(await.Context(t), v4("hb2")); !errors.Is(err, ErrExhausted) {
		t.Errorf("strict: got %v", err)
	}
	if released, err := b.ReleaseHandle(await.Context(t), "hb"); err != nil || len(released) != 1 {
		t.Errorf("release of a borrowed address: %v, %v", released, err)
	}
	audit(t, w.st)
}

func TestNoAutoAllocate(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/24", blockSize(30)))
	a, b := w.host("a", nil), w.host("b", nil)
	mustAssign(t, a, v4("ha"))
	put(t, w.st, &store.IPAMConfig{}) // a record without auto_allocate_blocks
	settle(t, b, "the settings", func(s *state) bool { return !s.config.AutoAllocateBlocks })
	catchUp(t, b, w.st)
	got, err := b.Assign(await.Context(t), v4("hb"))
	if err != nil {
		t.Fatal(err)
	}
	mustDiff(t, "borrowed from a's only block", a.Blocks()[0].CIDR, got[0].Block)
	mustDiff(t, "blocks", 0, len(b.Blocks()))
}

// TestReclaim: an empty block that another node has held for a minute is taken
// over.
func TestReclaim(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/30", blockSize(30)), &store.IPAMConfig{AutoAllocateBlocks: true, StrictAffinity: true})
	a, b := w.host("a", nil), w.host("b", nil)
	mustAssign(t, a, v4("ha"))
	if _, err := a.ReleaseHandle(await.Context(t), "ha"); err != nil {
		t.Fatal(err)
	}
	catchUp(t, b, w.st)
	w.clock.turn(reclaimAge - time.Second)
	if _, err := b.Assign(await.Context(t), v4("hb")); !errors.Is(err, ErrExhausted) {
		t.Errorf("before a minute has passed: got %v", err)
	}
	w.clock.turn(2 * time.Second)
	mustDiff(t, "taken over", []string{"10.0.0.0"}, mustAssign(t, b, v4("hb")))
	audit(t, w.st)
	catchUp(t, a, w.st)
	mustDiff(t, "a's blocks", 0, len(a.Blocks()))
}

func TestIdempotent(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/24", blockSize(30)), newPool("six", "fd00::/64"))
	h := w.host("a", nil)
	r := v4("h")
	r.Count, r.Idempotent = 2, true
	first := mustAssign(t, h, r)
	mustDiff(t, "again", first, mustAssign(t, h, r))
	h.stop()
	again := start(t, w.st, "a", w.clock.time) // knows nothing of the handle
	defer again.stop()
	mustDiff(t, "after a restart", first, mustAssign(t, again, r))
	r.Count = 3
	more := mustAssign(t, again, r)
	mustDiff(t, "what was held, and one more", append(first, more[2]), more)
	r.Family = dataplane.IPv6
	r.Count = 1
	six := mustAssign(t, again, r)
	mustDiff(t, "other family", 1, len(six))
	mustDiff(t, "assigned", 4, len(audit(t, w.st)))

	other := w.host("b", nil) // knows nothing of a's block
	r.Family = dataplane.IPv4
	r.Count = 3
	mustDiff(t, "on another node", more, mustAssign(t, other, r))
	got, err := other.ReleaseHandle(await.Context(t), "h")
	if err != nil {
		t.Fatal(err)
	}
	mustDiff(t, "released", 4, len(got))
	mustDiff(t, "left", 0, len(audit(t, w.st)))
	if got, err := again.ReleaseHandle(await.Context(t), "h"); err != nil || len(got) != 0 {
		t.Errorf("released twice: %v, %v", got, err)
	}
	if got, err := again.ByHandle(await.Context(t), "h"); err != nil || len(got) != 0 {
		t.Errorf("held after release: %v, %v", got, err)
	}
}

func TestAssignAddr(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/24", blockSize(30), func(s *v3.IPPoolSpec) { s.NodeSelector = "!all()" }), newReservation("r", "10.0.0.8/30"),
		newPool("off", "10.9.0.0/24", func(s *v3.IPPoolSpec) { s.Disabled = true }))
	a, b := w.host("a", nil), w.host("b", nil)
	addr := netip.MustParseAddr("10.0.0.9")
	got, err := a.AssignAddr(await.Context(t), addr, Request{Handle: "h"})
	if err != nil {
		t.Fatal(err)
	}
	mustDiff(t, "got", Assignment{addr, netip.MustParsePrefix("10.0.0.8/30"), "p", "h", got.Sequence}, got)
	audit(t, w.st)
	catchUp(t, b, w.st)
	for name, tc := range map[string]struct {
		h    *host
		addr string
		r    Request
		want error
		says string
	}{
		"same handle, not idempotent": {a, "10.0.0.9", Request{Handle: "h"}, ErrTaken, "10.0.0.9 is held by h"},
		"same handle, idempotent":     {a, "10.0.0.9", Request{Handle: "h", Idempotent: true}, nil, ""},
		"on another node, idempotent": {b, "10.0.0.9", Request{Handle: "h", Idempotent: true}, nil, ""},
		"another handle":              {b, "10.0.0.9", Request{Handle: "i", Idempotent: true}, ErrTaken, "10.0.0.9 is held by h"},
		"outside":                     {a, "10.1.0.9", Request{Handle: "i"}, ErrOutsidePools, "10.1.0.9; there are off, p"},
		"disabled":                    {a, "10.9.0.9", Request{Handle: "i"}, ErrOutsidePools, "pool off: it is disabled"},
		"use":                         {a, "10.0.0.10", Request{Handle: "i", Use: LoadBalancer}, ErrOutsidePools, "lack LoadBalancer"},
		"other pools":                 {a, "10.0.0.10", Request{Handle: "i", Pools: []string{"off"}}, ErrOutsidePools, "the request names other pools"},
		"another's block":             {b, "10.0.0.10", Request{Handle: "j"}, nil, ""},
	} {
		_, err := tc.h.AssignAddr(await.Context(t), netip.MustParseAddr(tc.addr), tc.r)
		if !errors.Is(err, tc.want) || (err == nil) != (tc.want == nil) || err != nil && !strings.Contains(err.Error(), tc.says) {
			t.Errorf("%s: got %v, want %v, %q", name, err, tc.want, tc.says)
		}
	}
	put(t, w.st, &store.IPAMConfig{AutoAllocateBlocks: true, StrictAffinity: true})
	settle(t, b, "strict affinity", func(s *state) bool { return s.config.StrictAffinity })
	if _, err := b.AssignAddr(await.Context(t), netip.MustParseAddr("10.0.0.11"), Request{Handle: "k"}); !errors.Is(err, ErrStrictAffinity) || !strings.Contains(err.Error(), "lies in 10.0.0.8/30, which node a holds") {
		t.Errorf("strict: got %v", err)
	}
	mustDiff(t, "assigned", map[netip.Addr]string{addr: "h", netip.MustParseAddr("10.0.0.10"): "j"}, audit(t, w.st))
}

// TestOtherBlockSize: blocks left from a pool with another block size never
// overlap new ones.
func TestOtherBlockSize(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newPool("p", "10.0.0.0/28", blockSize(28)))
	h := w.host("a", nil)
	for _, c := range []string{"10.0.0.4/30", "10.0.0.8/31"} {
		b := newBlock(netip.MustParsePrefix(c), "z", w.clock.time())
		b.assign([]int{0}, named("old"))
		b.SequenceNumber++
		putAt(t, w.st, store.BlockKey(b.cidr), b.Block)
	}
	catchUp(t, h, w.st)
	put(t, w.st, &store.IPAMConfig{AutoAllocateBlocks: true, StrictAffinity: true})
	settle(t, h, "strict affinity", func(s *state) bool { return s.config.StrictAffinity })
	if got, err := h.Assign(await.Context(t), v4("h")); !errors.Is(err, ErrExhausted) {
		t.Errorf("a /28 over a /30 and a /31: got %v, %v", got, err)
	}
	if got, err := h.AssignAddr(await.Context(t), netip.MustParseAddr("10.0.0.1"), Request{Handle: "h"}); !errors.Is(err, ErrOutsidePools) || !strings.Contains(err.Error(), "would overlap") {
		t.Errorf("got %v, %v", got, err)
	}
	remove(t, w.st, store.ResourceKey(store.KindIPPool, "p"))
	put(t, w.st, newPool("p", "10.0.0.0/28", blockSize(30)))
	settle(t, h, "the new pool", func(s *state) bool { return s.pools["p"] != nil && s.pools["p"].blockBits == 30 })
	seen := map[string]bool{}
	for i := range 2 {
		got, err := h.Assign(await.Context(t), Request{Family: dataplane.IPv4, Handle: fmt.Sprint("h", i), Count: 4})
		if err != nil {
			t.Fatal(err)
		}
		seen[got[0].Block.String()] = true
	}
	mustDiff(t, "blocks beside the old ones", map[string]bool{"10.0.0.0/30": true, "10.0.0.12/30": true}, seen)
}

func TestNotReady(t *testing.T) {
	t.Parallel()
	st := memory.New()
	defer st.Close()
	st.Fail(errors.New("no route to host"))
	h := start(t, st, "a", newClock().time)
	defer h.stop()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	_, err := h.Assign(ctx, v4("h"))
	if !errors.Is(err, ErrNotReady) || !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "the datastore's state has not been read yet") {
		t.Errorf("got %v", err)
	}
	put := func(v any) { put(t, st, v) }
	st.Fail(nil)
	put(newPool("p", "10.0.0.0/24"))
	put(newNode("a", nil))
	settle(t, h, "node and pool", func(s *state) bool { return s.registered && len(s.pools) == 1 })
	mustAssign(t, h, v4("h"))
	h.stop()
	if _, err := h.Assign(await.Context(t), v4("i")); !errors.Is(err, ErrStopped) {
		t.Errorf("after the end: got %v", err)
	}
}
