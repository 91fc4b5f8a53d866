package policy

import (
	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/store"
)

// nodes are the Nodes of the cluster and the sets of their addresses that rules ask for
// ([store.RuleNodes]). A selector of endpoints never matches a Node, so they are apart. Few clusters
// have such a rule: until the first one the Nodes are in no index.
type nodes struct {
	members
	asked bool
}

func (n *nodes) put(c *Calculator, name string, node *cluster.Node) {
	if !n.asked {
		return
	}
	var v any // nil, and not a *cluster.Node that is
	if node != nil {
		v = node
	}
	n.members.put(c, store.ResourceKey(store.KindNode, name), v)
}

// acquire takes a set into use, of whatever it is.
func (c *Calculator) acquire(d setDef) {
	if !d.nodes {
		c.members.acquire(d)
		return
	}
	n := &c.nodes
	if !n.asked {
		n.init()
		n.asked = true
		for name, node := range c.settings.nodes {
			n.put(c, name, node)
		}
		n.settle()
	}
	n.acquire(d)
}

// release gives a set back.
func (c *Calculator) release(id filter.SetID) {
	if _, ok := c.nodes.sets[id]; ok {
		c.nodes.release(id)
		return
	}
	c.members.release(id)
}
