package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"syscall"
	"testing"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

// blocksPerTxn keeps a transaction below etcd's limit of 128 operations.
const blocksPerTxn = 60

// blockOf is block number i of 10.64.0.0/10.
func blockOf(i int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(64 + i>>10), byte(i >> 2), byte(i & 3 << 6)}), 26)
}

// putBlocks gives the blocks with these numbers to five nodes in turn. It
// returns how many of them are written for certain, the first ones.
func putBlocks(ctx context.Context, s store.Store, numbers []int) (int, error) {
	for done := 0; ; {
		part := numbers[done:min(len(numbers), done+blocksPerTxn)]
		if len(part) == 0 {
			return done, nil
		}
		var ops []store.Op
		for _, i := range part {
			node := fmt.Sprintf("peer%d", i%5)
			affinity, cidr := "host:"+node, blockOf(i)
			b := &store.Block{CIDR: cidr.String(), Affinity: &affinity}
			for a := range 64 {
				b.Allocations, b.Unallocated = append(b.Allocations, nil), append(b.Unallocated, a)
			}
			ops = append(ops,
				store.Op{Action: store.Put, Object: store.Object{Key: store.BlockKey(cidr), Value: b}},
				store.Op{Action: store.Put, Object: store.Object{Key: store.AffinityKey(node, cidr), Value: &store.Affinity{State: store.AffinityConfirmed}}})
		}
		if _, err := s.Txn(ctx, ops...); err != nil {
			return done, err
		}
		done += len(part)
	}
}

// ours lists the prefixes of routerd's routes.
func (h *host) ours() map[string]bool {
	h.t.Helper()
	out := map[string]bool{}
	for line := range strings.Lines(h.ip("route show proto 77")) {
		f := strings.Fields(strings.TrimPrefix(line, "blackhole "))
		out[f[0]] = true
	}
	return out
}

// TestKilledInTheMiddle kills the daemon while it programs 5,000 routes, again
// and again. What is in the kernel is neither removed nor written again, and
// the rest is completed.
func TestKilledInTheMiddle(t *testing.T) {
	t.Parallel()
	const routes = 5000
	h := newHost(t, "10.1.0.11/24")
	h.quietIPv6()
	h.config["bgp"] = map[string]any{"enabled": false}
	h.config["defaultPool"] = map[string]any{"cidr": "10.64.0.0/10"}
	r := h.start()
	own := netip.MustParseAddr(r.ready().GetVxlanTunnelAddress())
	s := h.store("")
	for i := range 5 {
		// Two of them in this host's subnet.
		h.addNode(s, fmt.Sprintf("peer%d", i), fmt.Sprintf("10.%d.0.%d/24", 1+i/2, 20+i), fmt.Sprintf("10.64.0.%d", 65+i), fmt.Sprintf("10.127.%d.0/26", i))
	}
	var numbers []int
	for i := 4; len(numbers) < routes; i++ {
		if !blockOf(i).Contains(own) {
			numbers = append(numbers, i)
		}
	}
	count := func(n int) error {
		if got := len(h.ours()); got < n {
			return fmt.Errorf("%d of %d routes", got, n)
		}
		return nil
	}
	const ahead = 1000 // of what is in the kernel when the daemon is killed
	written := 0       // of numbers, for certain
	for _, kill := range []int{1200, 2500, 4000} {
		// Each round writes more, and dies while that is programmed.
		ctx, cancel := context.WithCancel(t.Context())
		var done int
		ended := make(chan error, 1)
		go func(some []int) {
			var err error
			done, err = putBlocks(ctx, h.store(""), some)
			ended <- err
		}(numbers[written:min(routes, kill+ahead)])
		await.Until(t, "enough routes to be in the middle", func() error { return count(kill) })
		r.kill(syscall.SIGKILL)
		cancel()
		if err := <-ended; err != nil && !errors.Is(err, store.ErrUnavailable) && !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		written += done
		settled := h.ours()
		t.Logf("killed with %d routes in the kernel", len(settled))
		m := h.monitor()
		r = h.start()
		r.ready()
		for _, line := range m.changes() {
			f := strings.Fields(strings.TrimPrefix(line, "blackhole "))
			if f[0] == "Deleted" || settled[f[0]] {
				t.Errorf("a settled route was touched: %s", line)
			}
		}
		after := h.ours()
		for p := range settled {
			if !after[p] {
				t.Errorf("route %s is gone", p)
			}
		}
	}
	if _, err := putBlocks(t.Context(), h.store(""), numbers[written:]); err != nil {
		t.Fatal(err)
	}
	await.Until(t, "all routes", func() error { return count(routes + 5) })
}
