package vrouter

import "github.com/routerd/routerd/dataplane"

// setReach takes in what was measured of the underlay in a family.
func (t *table) setReach(f dataplane.Family, peers map[string]dataplane.Reach) { t.reach[f] = peers }

// setDelivery takes in what probes through tunnels found in a family.
func (t *table) setDelivery(f dataplane.Family, peers map[string][]dataplane.Delivery) {
	t.delivery[f] = peers
}
