package vrouter

import (
	"net/netip"

	"github.com/gaissmai/bart"
	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/store"
)

// poolTable is the pools, and the numbers of FelixConfiguration that drivers
// use for them.
type poolTable struct {
	pools    map[string]*cluster.Pool
	poolTree *bart.Table[string]                   // pool CIDR → pool name
	felix    map[string]*v3.FelixConfigurationSpec // by resource name
	settings settings
}

func newPoolTable() *poolTable {
	return &poolTable{
		pools: map[string]*cluster.Pool{}, poolTree: new(bart.Table[string]), felix: map[string]*v3.FelixConfigurationSpec{}, settings: newSettings(),
	}
}

// electPool notes which pool has a CIDR. Validation refuses a second one of
// the same; should the store hold two, all hosts take the same.
func (t *poolTable) electPool(cidr netip.Prefix) {
	best := ""
	for name, p := range t.pools {
		if p.CIDR == cidr && (best == "" || name < best) {
			best = name
		}
	}
	if best == "" {
		t.poolTree.Delete(cidr)
	} else {
		t.poolTree.Insert(cidr, best)
	}
}

// modeOf is how a pool is to be carried.
func (t *poolTable) modeOf(p *cluster.Pool) store.Mode {
	return store.NewMode(p.Encap, t.settings.vni, t.settings.port)
}
