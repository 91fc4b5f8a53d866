package nft

import (
	"fmt"

	"github.com/routerd/routerd/dataplane/filter"
)

// Counter says what met a packet how often. It is about the first packets of
// flows: those of established flows, as connection tracking has it, are
// accepted before any rule is looked at.
type Counter struct {
	// Policy and Rule are those of a rule: its index in the policy's list of the
	// direction. Of what is no rule, Policy is zero and Rule is
	// [filter.NoRule].
	Policy    filter.PolicyID
	Direction filter.Direction
	Hook      filter.Hook // of policies of workloads and of forwarded traffic: Normal
	Rule      int
	Staged    bool // counted what the rule would have done
	Action    filter.Action

	Tier   string        // of which this is the end
	Reason filter.Reason // of what is no rule

	Packets, Bytes uint64

	// Unlogged is how many of Packets were not logged because of
	// [Config.LogRate].
	Unlogged uint64
}

// key is a counter without its numbers.
func (c Counter) key() Counter {
	c.Packets, c.Bytes, c.Unlogged = 0, 0, 0
	return c
}

// counted reports whether there is anything to count.
func (c Counter) counted() bool { return c.Reason != "" }

// comment is what is seen in the kernel's rule.
func (c Counter) comment() string {
	switch {
	case !c.counted():
		return ""
	case c.Reason == filter.ByRule:
		staged := ""
		if c.Staged {
			staged = "staged "
		}
		return fit(fmt.Sprintf("%s%s %d: %s", staged, c.Direction, c.Rule, c.Policy))
	case c.Reason == filter.ByTierEnd:
		return fit(fmt.Sprintf("%s: end of tier %s", c.Direction, c.Tier))
	}
	return fit(string(c.Reason))
}

// logPrefix is what a listener to a group of nfnetlink_log gets: one letter
// for the verdict (A, D, P), the direction, and whose it is.
func (c Counter) logPrefix() string {
	verdict := c.Action.String()[:1]
	return fmt.Sprintf("%s|%s", verdict, c.comment())
}
