package ipam

import (
	"net/netip"
	"testing"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/store"
)

// TestOlderDeletion: a block that this host made anew stays known where the deletion of the
// one before comes late, in a batch that is further with another kind.
func TestOlderDeletion(t *testing.T) {
	t.Parallel()
	cidr := netip.MustParsePrefix("10.0.0.0/26")
	for _, tt := range []struct {
		name  string
		of    store.Revision // 0: a datastore that does not say
		known bool
	}{
		{"of the one before", 60, true},
		{"of this one", 95, false},
		{"of unknown revision", 0, false},
	} {
		s := newState("a")
		s.learnBlock(cidr, 90, &cluster.Block{CIDR: cidr, Revision: 90})
		key := store.BlockKey(cidr)
		ev := cluster.Decode("a", store.Event{Key: key, Object: store.Object{Key: key, Revision: tt.of}})
		if err := s.apply(ev, 100); err != nil {
			t.Fatal(err)
		}
		if got := s.blocks[cidr] != nil; got != tt.known {
			t.Errorf("after a deletion %s the block is known: %v, want %v", tt.name, got, tt.known)
		}
	}
}
