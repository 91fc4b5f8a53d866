package cluster

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/routerd/routerd/store"
)

// othersKept is for how long the endpoints of other hosts are followed when they are not asked for
// any more: policies come and go, and each time that all pods are listed anew costs the API
// server more than the changes of some minutes.
const othersKept = 10 * time.Minute

// demand is who asks for the endpoints of other hosts, and since when there is no one who does.
type demand struct {
	askers map[string]bool
	left   time.Time // when the last one left; zero: there was none
}

// set returns the demand after an asker began to ask, or ceased to.
func (d demand) set(asker string, asks bool, now time.Time) demand {
	if d.askers[asker] == asks {
		return d
	}
	next := demand{askers: maps.Clone(d.askers), left: d.left}
	if next.askers == nil {
		next.askers = make(map[string]bool)
	}
	if asks {
		next.askers[asker] = true
		return next
	}
	if delete(next.askers, asker); len(next.askers) == 0 {
		next.left = now
	}
	return next
}

// wanted reports whether they are to be followed, and for how long that holds if no one
// begins to ask, or ceases to; 0: until then.
func (d demand) wanted(now time.Time) (is bool, holds time.Duration) {
	if len(d.askers) > 0 {
		return true, 0
	}
	if d.left.IsZero() {
		return false, 0
	}
	holds = max(0, d.left.Add(othersKept).Sub(now))
	return holds > 0, holds
}

// Others says whether the endpoints of other hosts are followed, where the datastore can
// leave them out ([store.NodeWatcher]).
type Others struct {
	Optional bool      // the datastore can leave them out
	Followed bool      // they are followed, or are about to be
	Complete bool      // all are known, and each change is
	Askers   []string  // who asks for them, sorted
	Left     time.Time // when the last of those who asked did so no more, where none is left; zero: there was none
}

// Others returns what holds now.
func (c *Cluster) Others() Others {
	_, optional := c.cfg.Store.(store.NodeWatcher)
	c.mu.Lock()
	defer c.mu.Unlock()
	o := Others{Optional: optional, Followed: !optional, Complete: !c.ownOnly, Askers: slices.Sorted(maps.Keys(c.demand.askers))}
	if optional {
		o.Followed, _ = c.others.Is()
	}
	if len(o.Askers) == 0 {
		o.Left = c.demand.left
	}
	return o
}

// AskOthers says whether an asker asks for the endpoints of other hosts. Once all of them
// are known, steps have no OwnOnly. It does not wait.
func (c *Cluster) AskOthers(asker string, asks bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.demand = c.demand.set(asker, asks, time.Now())
	c.demanded.Set()
}

// followDemand has the datastore's watch follow the endpoints of other hosts while that is
// wanted, until ctx ends.
func (c *Cluster) followDemand(ctx context.Context) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		c.mu.Lock()
		is, holds := c.demand.wanted(time.Now())
		was, _ := c.others.Is()
		c.others.Set(is)
		c.mu.Unlock()
		if is != was {
			c.cfg.Log.Info("whether the endpoints of other hosts are followed", "followed", is)
		}
		timer.Stop()
		if holds > 0 {
			timer.Reset(holds)
		}
		select {
		case <-c.demanded:
		case <-timer.C:
		case <-ctx.Done():
			return
		}
	}
}
