package doctor

import (
	"fmt"
	"slices"
	"time"
)

// By how much clocks of hosts may differ. Certificates are valid from an hour before they are made on, so that
// with more than that a new one is refused; what people read by its time (history, events, a change to be confirmed that
// outlives a daemon) is wrong by as much as the clock is.
const (
	clockDiffers = 5 * time.Second
	clockFar     = time.Hour
)

// Clock is by how much a host's wall clock is ahead of this host's: between two times, for its answer took a while.
type Clock struct {
	Node            string
	AtLeast, AtMost time.Duration // negative: behind
}

// ClockOf is what an answer says of a host's clock: asked and heard are this host's clock before and after.
func ClockOf(node string, asked, said, heard time.Time) Clock {
	return Clock{Node: node, AtLeast: said.Sub(heard), AtMost: said.Sub(asked)}
}

// beside returns how far a clock is at least from one that is so much ahead of this host's.
func (c Clock) beside(ahead time.Duration) time.Duration {
	switch {
	case c.AtLeast > ahead:
		return c.AtLeast - ahead
	case c.AtMost < ahead:
		return c.AtMost - ahead
	}
	return 0
}

// clocks finds hosts whose clocks differ from those of most, or from this host's where most do not agree.
func clocks(f Facts) []Finding {
	self := f.Node.GetName()
	all := append([]Clock{{Node: self}}, f.Clocks...)
	most, agreed := agreement(all)
	var out []Finding
	for _, c := range all {
		by := c.beside(most)
		if by.Abs() < clockDiffers {
			continue
		}
		d := Finding{
			Severity: Warning, Check: "clock", Node: c.Node, Object: c.Node,
			Cause: "its clock is not synchronized, or to a wrong source; certificates, join tokens and the time limit for confirming a change depend on it",
			Cure:  fmt.Sprintf("timedatectl set-ntp true # on %s; chronyc tracking or timedatectl timesync-status shows its time source", c.Node),
		}
		if by.Abs() >= clockFar {
			d.Severity = Critical // it does not take certificates that are made now, or takes them for ended
		}
		than := fmt.Sprintf("those of %d of %d hosts", agreed, len(all))
		if agreed*2 <= len(all) {
			than = "that of " + self + ", and no more than half of the hosts agree: find out which is right"
		}
		d.What = fmt.Sprintf("the clock of %s is %s %s", c.Node, aheadOf(by), than)
		out = append(out, d)
	}
	return out
}

func aheadOf(by time.Duration) string {
	word := "ahead of"
	if by < 0 {
		word = "behind"
	}
	return by.Abs().Round(time.Second).String() + " " + word
}

// agreement returns how far ahead of this host's the clocks are of most hosts, and how many these are. Where no more
// than half agree it is this host's own that counts.
func agreement(all []Clock) (ahead time.Duration, hosts int) {
	middles := make([]time.Duration, 0, len(all))
	for _, c := range all {
		middles = append(middles, c.AtLeast+(c.AtMost-c.AtLeast)/2)
	}
	slices.Sort(middles)
	count := func(at time.Duration) (n int) {
		for _, c := range all {
			if c.beside(at).Abs() < clockDiffers {
				n++
			}
		}
		return n
	}
	if m := middles[len(middles)/2]; count(m)*2 > len(all) && count(0)*2 <= len(all) {
		return m, count(m)
	}
	return 0, count(0)
}
