package policy

import (
	"strings"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/kubecontrollers"
	"github.com/routerd/routerd/store"
)

// putControllers follows what the KubeControllersConfiguration named default says of the host endpoints of Nodes. The host's own
// setting gives them whatever it says. That of all interfaces is reckoned with before a host wrote its own; those of templates are
// only known when they are written, for a Node does not say its interfaces.
func (c *Calculator) putControllers(key store.Key, asked *cluster.Controllers) {
	if key.Name != store.DefaultName {
		return
	}
	on := c.cfg.AutoHostEndpoints
	if asked != nil {
		on = on || asked.Create && asked.Default
		if len(asked.Problems) > 0 {
			c.problems[key] = strings.Join(asked.Problems, "; ")
		}
	}
	if on == c.auto {
		return
	}
	c.auto = on
	for name, n := range c.settings.nodes {
		c.autoHostEndpoint(name, n)
	}
}

// autoHostEndpoint makes, changes or takes away the host endpoint of a node; nil: there is no such node.
func (c *Calculator) autoHostEndpoint(node string, n *cluster.Node) {
	name := node + "-auto-hep"
	key := store.ResourceKey(store.KindHostEndpoint, name)
	var v any
	if n == nil || !c.auto {
		if _, had := c.locals.auto[name]; !had {
			return
		}
		delete(c.locals.auto, name)
	} else {
		hep := kubecontrollers.Of(n)
		c.locals.auto[name], v = hep, hep
	}
	if !c.locals.stored[name] {
		c.putLabelled(key, v)
	}
}
