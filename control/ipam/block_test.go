package ipam

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/routerd/routerd/store"
)

func named(handle string) store.Attribute {
	return store.Attribute{HandleID: &handle, Secondary: map[string]string{AttrNode: "node-a"}}
}

// TestBlockJSON holds a block to Calico's form, byte by byte.
func TestBlockJSON(t *testing.T) {
	t.Parallel()
	b := newBlock(netip.MustParsePrefix("192.168.99.0/29"), "node-a", time.Unix(0, 1795282296903635736))
	b.assign([]int{3}, store.Attribute{HandleID: new("ipip-tunnel-addr-node-a"), Secondary: map[string]string{"node": "node-a", "type": "ipipTunnelAddress"}})
	b.SequenceNumber++
	b.assign([]int{0}, store.Attribute{HandleID: new("net1.abc"), Secondary: map[string]string{"node": "node-a", "namespace": "ns1", "pod": "web-0", "timestamp": "2026-11-21 17:31:36.8948024 +0000 UTC"}})
	b.SequenceNumber++
	got, err := json.Marshal(b.Block)
	if err != nil {
		t.Fatal(err)
	}
	want := `{"cidr":"192.168.99.0/29","affinity":"host:node-a","affinity_claim_time":"2026-11-21T17:31:36Z",` +
		`"allocations":[1,null,null,0,null,null,null,null],"unallocated":[1,2,4,5,6,7],` +
		`"attributes":[{"handle_id":"ipip-tunnel-addr-node-a","secondary":{"node":"node-a","type":"ipipTunnelAddress"}},` +
		`{"handle_id":"net1.abc","secondary":{"namespace":"ns1","node":"node-a","pod":"web-0","timestamp":"2026-11-21 17:31:36.8948024 +0000 UTC"}}],` +
		`"sequenceNumber":1795282296903635738,"sequenceNumberForAllocation":{"0":1795282296903635737,"3":1795282296903635736},"deleted":false}`
	mustDiff(t, "block", want, string(got))

	b.release([]int{3, 0}, time.Unix(0, 0), 0)
	b.disown()
	if got, err = json.Marshal(b.Block); err != nil {
		t.Fatal(err)
	}
	want = `{"cidr":"192.168.99.0/29","affinity":null,` +
		`"allocations":[null,null,null,null,null,null,null,null],"unallocated":[1,2,4,5,6,7,3,0],` +
		`"attributes":[],"sequenceNumber":1795282296903635738,"sequenceNumberForAllocation":{},"deleted":false}`
	mustDiff(t, "empty block", want, string(got))
}

// nobody uses an address.
func nobody(netip.Addr) bool { return false }

func TestBlockPeek(t *testing.T) {
	t.Parallel()
	b := newBlock(netip.MustParsePrefix("10.0.0.8/29"), "a", time.Unix(1, 0))
	b.assign([]int{0}, named("h"))
	reserved := []netip.Prefix{netip.MustParsePrefix("10.0.0.10/31"), netip.MustParsePrefix("10.9.0.0/16"), netip.MustParsePrefix("10.0.0.15/32")}
	mustDiff(t, "unreserved", []int{1, 4, 5, 6}, b.peek(8, reserved, nobody))
	mustDiff(t, "two of them", []int{1, 4}, b.peek(2, reserved, nobody))
	mustDiff(t, "all reserved", []int(nil), b.peek(8, []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}, nobody))
	mustDiff(t, "nothing reserved", []int{1, 2, 3}, b.peek(3, nil, nobody))
	mustDiff(t, "one in use", []int{1, 3, 4}, b.peek(3, nil, func(a netip.Addr) bool { return a == netip.MustParseAddr("10.0.0.10") }))
}

func TestBlockCooldown(t *testing.T) {
	t.Parallel()
	t0 := time.Date(2026, 1, 2, 3, 4, 5, 6e8, time.UTC)
	b := newBlock(netip.MustParsePrefix("10.0.0.0/30"), "a", t0)
	b.assign([]int{0, 1}, named("h"))
	b.assign([]int{2}, named("i"))
	b.SequenceNumber++
	b.release([]int{0}, t0, time.Minute)
	b.release([]int{2}, t0, time.Minute)
	js, err := json.Marshal(b.Attributes)
	if err != nil {
		t.Fatal(err)
	}
	mustDiff(t, "attributes", `[{"handle_id":"h","secondary":{"node":"node-a"}},{"releasedAt":"2026-01-02T03:04:05Z"}]`, string(js))
	mustDiff(t, "free while cooling", []int{3}, b.peek(4, nil, nobody))
	mustDiff(t, "held by h", []int{1}, b.Block.HeldBy("h"))
	if b.collect(t0.Add(58*time.Second), time.Minute) {
		t.Error("collected before its time")
	}
	if !b.collect(t0.Add(time.Minute), time.Minute) {
		t.Error("not collected after its time")
	}
	mustDiff(t, "free afterwards", []int{3, 0, 2}, b.peek(4, nil, nobody))
	if err := checkBlock(b.Block, b.cidr); err != nil {
		t.Error(err)
	}
}

func TestOpenBlock(t *testing.T) {
	t.Parallel()
	cidr := netip.MustParsePrefix("10.0.0.0/30")
	sound := func(change func(*store.Block)) *store.Block {
		b := newBlock(cidr, "a", time.Unix(1, 0))
		b.assign([]int{1}, named("h"))
		b.SequenceNumber++
		change(b.Block)
		return b.Block
	}
	for name, tc := range map[string]struct {
		change func(*store.Block)
		queue  []int
		owner  string
		err    string
	}{
		"sound":                {func(*store.Block) {}, []int{0, 2, 3}, "a", ""},
		"order is kept":        {func(b *store.Block) { b.Unallocated = []int{3, 0, 2} }, []int{3, 0, 2}, "a", ""},
		"queue lacks ordinals": {func(b *store.Block) { b.Unallocated = []int{3} }, []int{3, 0, 2}, "a", ""},
		"queue repeats":        {func(b *store.Block) { b.Unallocated = []int{2, 2, 0, 3, 0} }, []int{2, 0, 3}, "a", ""},
		"queue lies":           {func(b *store.Block) { b.Unallocated = []int{1, 7, -1, 0, 2, 3} }, []int{0, 2, 3}, "a", ""},
		"no maps":              {func(b *store.Block) { b.SequenceNumberForAllocation = nil }, []int{0, 2, 3}, "a", ""},
		"unused attribute":     {func(b *store.Block) { b.Attributes = append(b.Attributes, named("x")) }, []int{0, 2, 3}, "a", ""},
		"another cidr":         {func(b *store.Block) { b.CIDR = "10.0.0.4/30" }, nil, "", `cidr is "10.0.0.4/30"`},
		"too short":            {func(b *store.Block) { b.Allocations = b.Allocations[:2] }, nil, "", "allocations has 2 entries, not 4"},
		"no such attribute":    {func(b *store.Block) { *b.Allocations[1] = 5 }, nil, "", "allocations[1] is 5, but there are 1 attributes"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			from := sound(tc.change)
			before, err := json.Marshal(from)
			if err != nil {
				t.Fatal(err)
			}
			b, err := openBlock(cidr, from)
			if tc.err != "" {
				if err == nil || !strings.Contains(err.Error(), tc.err) {
					t.Fatalf("got %v, want %q", err, tc.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			mustDiff(t, "queue", tc.queue, b.Unallocated)
			mustDiff(t, "attributes", []store.Attribute{named("h")}, b.Attributes)
			if owner := b.Block.Holder(); owner != tc.owner {
				t.Errorf("owner %q, want %q", owner, tc.owner)
			}
			b.assign([]int{0}, named("h2"))
			b.release([]int{1}, time.Unix(2, 0), 0)
			after, err := json.Marshal(from)
			if err != nil {
				t.Fatal(err)
			}
			mustDiff(t, "the block that was read", string(before), string(after))
		})
	}
}

// TestBlockAlgebra holds random sequences to a map from address to handle.
func TestBlockAlgebra(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		cidr := netip.MustParsePrefix(rapid.SampledFrom([]string{"10.0.0.16/28", "10.0.0.5/32", "fd00::40/124"}).Draw(t, "cidr"))
		now, cooldown := time.Unix(1000, 0), time.Duration(rapid.IntRange(0, 2).Draw(t, "cooldown"))*time.Second
		b := newBlock(cidr, "a", now)
		held := map[int]string{}
		resting := map[int]time.Time{}
		var free []int // the queue
		for i := range blockLen(cidr) {
			free = append(free, i)
		}
		t.Repeat(map[string]func(*rapid.T){
			"assign": func(t *rapid.T) {
				handle := fmt.Sprintf("h%d", rapid.IntRange(0, 3).Draw(t, "handle"))
				got := b.peek(rapid.IntRange(1, 5).Draw(t, "count"), nil, nobody)
				if len(got) == 0 {
					return
				}
				mustDiff(t, "taken from the front", free[:len(got)], got)
				b.assign(got, named(handle))
				free = free[len(got):]
				for _, o := range got {
					held[o] = handle
				}
			},
			"release": func(t *rapid.T) {
				handle := fmt.Sprintf("h%d", rapid.IntRange(0, 3).Draw(t, "handle"))
				got := b.Block.HeldBy(handle)
				b.release(got, now, cooldown)
				for _, o := range got {
					if held[o] != handle {
						t.Fatalf("%d is not held by %s", o, handle)
					}
					delete(held, o)
					if cooldown > 0 {
						resting[o] = now
					} else {
						free = append(free, o)
					}
				}
			},
			"wait": func(t *rapid.T) {
				now = now.Add(time.Second)
				b.collect(now, cooldown)
				for o := range blockLen(cidr) {
					if at, ok := resting[o]; ok && now.Sub(at) >= cooldown {
						delete(resting, o)
						free = append(free, o)
					}
				}
			},
			"": func(t *rapid.T) {
				again, err := openBlock(cidr, b.Block)
				if err != nil {
					t.Fatalf("read back: %v", err)
				}
				b = again
				b.SequenceNumber++
				if err := checkBlock(b.Block, cidr); err != nil {
					t.Fatalf("%v", err)
				}
				mustDiff(t, "queue", free, b.Unallocated)
				for o := range blockLen(cidr) {
					a, handle := b.Block.Attribute(o), ""
					if a != nil && a.HandleID != nil {
						handle = *a.HandleID
					}
					if handle != held[o] || (a == nil) != slices.Contains(free, o) {
						t.Fatalf("%d is held by %q, want %q", o, handle, held[o])
					}
				}
			},
		})
	})
}
