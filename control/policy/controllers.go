package policy

import (
	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/store"
)

// putControllers follows what the KubeControllersConfiguration named default says of the host endpoints of Nodes; nil: there is
// none. The host's own setting gives them whatever it says.
func (c *Calculator) putControllers(key store.Key, k *v3.KubeControllersConfiguration) {
	if key.Name != store.DefaultName {
		return
	}
	on, unsupported := autoHostEndpoints(k)
	if unsupported != "" {
		c.problems[key] = unsupported
	}
	if on = on || c.cfg.AutoHostEndpoints; on == c.auto {
		return
	}
	c.auto = on
	for name, n := range c.settings.nodes {
		c.autoHostEndpoint(name, n)
	}
}

// autoHostEndpoints reports whether every Node has a host endpoint of all its interfaces, as Calico's controllers make it, and what is
// asked for beside that and is not done.
func autoHostEndpoints(k *v3.KubeControllersConfiguration) (on bool, unsupported string) {
	if k == nil || k.Spec.Controllers.Node == nil || k.Spec.Controllers.Node.HostEndpoint == nil {
		return false, ""
	}
	h := k.Spec.Controllers.Node.HostEndpoint
	if h.AutoCreate != v3.Enabled {
		return false, ""
	}
	if len(h.Templates) > 0 {
		unsupported = "spec.controllers.node.hostEndpoint.templates has no effect: make HostEndpoints for these interfaces"
	}
	return h.CreateDefaultHostEndpoint != v3.DefaultHostEndpointsDisabled, unsupported
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
		hep := autoHostEndpoint(name, n)
		c.locals.auto[name], v = hep, hep
	}
	if !c.locals.stored[name] {
		c.putLabelled(key, v)
	}
}
