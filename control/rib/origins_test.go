package rib

import (
	"net/netip"
	"testing"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/store"
)

func FuzzBlockOrigins(f *testing.F) {
	f.Add("192.168.0.0/26", 3, 0, "node2")
	f.Add("fd00::/122", 63, 0, "node2")
	f.Fuzz(func(t *testing.T, cidr string, ord, attr int, node string) {
		if ord < 0 || ord > 1<<12 {
			return
		}
		block, err := netip.ParsePrefix(cidr)
		if err != nil || block != block.Masked() {
			return // no key of a block has it
		}
		b := &store.Block{CIDR: cidr, Allocations: make([]*int, ord+1), Attributes: []store.Attribute{{Secondary: map[string]string{"node": node}}}}
		b.Allocations[ord] = &attr
		read, _ := cluster.NewBlock("", store.Object{Key: store.BlockKey(block), Value: b})
		for p := range blockOrigins(read) {
			if !block.Contains(p.Addr()) {
				t.Errorf("block %s yields %s, which lies outside", cidr, p)
			}
		}
	})
}
