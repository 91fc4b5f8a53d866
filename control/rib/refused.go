package rib

import (
	"fmt"
	"net/netip"

	"github.com/routerd/routerd/dataplane"
)

// errPart says why a part of a node's block is left out that others announced.
func errPart(block netip.Prefix, node string) error {
	return fmt.Errorf("it is a part of block %s, which node %s holds, and only that node announces parts of it; "+
		"to take it from a peer all the same, have a BGPFilter of that peer accept it by a cidr inside the block", block, node)
}

// errCovers says why a prefix of a pool is left out in which a node's own
// address lies: on its owner, the host would cut itself off from its network,
// and elsewhere what goes to the tunnel's end would go into the tunnel.
func errCovers(node string, a netip.Addr) error {
	return fmt.Errorf("the address %s of node %s itself lies in it: give the pool a CIDR apart from the hosts' network", a, node)
}

// errBridged says why a prefix of this host's own has no route that drops what no workload
// has: pods of another network have addresses of it.
func errBridged(a dataplane.UnderlayAddress) error {
	return fmt.Errorf("pods that another network attached are behind %s, which has %s: the kernel's route leads there", a.Link, a.Prefix)
}

// errUnready says why another network's route to a node is left in place.
func errUnready(node string, u dataplane.UnderlayRoute) error {
	return fmt.Errorf("node %s has not said that it accepts packets, and another network's route to %s leads there", node, u.Prefix)
}

// errPlain says why what BGP announced of a block is left out where the store's way to
// it cannot be used: it would have the packets go in plain.
func errPlain(pool string) error {
	return fmt.Errorf("pool %s asks for a tunnel, and the next hop is no node to which one leads", pool)
}
