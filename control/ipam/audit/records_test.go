package audit

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/store"
)

// A reserve is a node's as long as the node holds the block: of another one nobody is
// given an address.
func TestReserveNeedsItsBlock(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, holder string
		want         []Finding
	}{
		{"the node's", "node-a", nil},
		{"nobody's", "", []Finding{{
			Problem: "leaked", What: "10.0.0.0", Why: "held ready by node node-a, which gives none of a block that is nobody's",
			Cure: "node node-a frees it after a few times ipam.leakGracePeriod; where no routerd runs there: routerctl ipam release --ip=10.0.0.0",
		}}},
		{"another's", "node-b", []Finding{{
			Problem: "leaked", What: "10.0.0.0", Why: "held ready by node node-a, which gives none of a block that is node-b's",
			Cure: "node node-a frees it after a few times ipam.leakGracePeriod; where no routerd runs there: routerctl ipam release --ip=10.0.0.0",
		}}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			w := newMendWorld(t)
			w.register("node-a")
			w.register("node-b")
			cidr, handle, first := netip.MustParsePrefix("10.0.0.0/30"), store.ReserveHandle("node-a"), 0
			b := &store.Block{
				CIDR: cidr.String(), Allocations: []*int{&first, nil, nil, nil}, Unallocated: []int{1, 2, 3},
				Attributes: []store.Attribute{{HandleID: &handle, Secondary: map[string]string{ipam.AttrNode: "node-a", ipam.AttrType: ipam.AttrTypeReserve}}},
			}
			ops := []store.Op{
				{Action: store.Put, Object: store.Object{Key: store.BlockKey(cidr), Value: b}},
				{Action: store.Put, Object: store.Object{Key: store.HandleKey(handle), Value: &store.Handle{Block: map[string]int{cidr.String(): 1}}}},
			}
			if tc.holder != "" {
				affinity := "host:" + tc.holder
				b.Affinity = &affinity
				ops = append(ops, store.Op{Action: store.Put, Object: store.Object{Key: store.AffinityKey(tc.holder, cidr), Value: &store.Affinity{State: store.AffinityConfirmed}}})
			}
			if _, err := w.st.Txn(t.Context(), ops...); err != nil {
				t.Fatal(err)
			}
			r, err := Read(t.Context(), w.st)
			if err != nil {
				t.Fatal(err)
			}
			_, got := r.Check()
			for i := range got {
				got[i].fix = nil
			}
			if diff := cmp.Diff(tc.want, got, cmp.AllowUnexported(Finding{})); diff != "" {
				t.Errorf("findings (-want +got):\n%s", diff)
			}
		})
	}
}
