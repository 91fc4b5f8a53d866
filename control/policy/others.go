package policy

import (
	"slices"

	"github.com/routerd/routerd/dataplane/filter"
)

// AsksOthers reports whether rules in force, or those that wait to be, depend on who the workloads
// of other hosts are: they are about whom a selector names. Such a rule with some of them alone could
// let through what it must not, as one that denies or that a notSelector has.
func (c *Calculator) AsksOthers() bool { return c.held || len(c.members.byText) > 0 }

// Held reports whether something waits until the workloads of other hosts are all known: until then an
// endpoint has the rules from before, or, where it is new, none, so that its workload does not start.
func (c *Calculator) Held() bool { return c.held }

// holds reports whether a local endpoint has to wait for the workloads of other hosts.
func (c *Calculator) holds(e *filter.Endpoint) bool {
	if !c.ownOnly || !c.selectedAt(e) {
		return false
	}
	c.held = true
	return true
}

// dependsOnOthers reports whether a local endpoint does.
func (c *Calculator) dependsOnOthers() bool {
	for _, id := range c.locals.ids {
		if e := c.build(c.locals.list[id].iface, id); c.selectedAt(&e) {
			return true
		}
	}
	return false
}

// selectedAt reports whether a policy or a profile of a local endpoint selects.
func (c *Calculator) selectedAt(e *filter.Endpoint) bool {
	return slices.ContainsFunc(e.Policies(), func(id filter.PolicyID) bool { return c.policies.all[id].selects() })
}
