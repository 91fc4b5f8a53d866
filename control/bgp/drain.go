package bgp

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/routerd/routerd/control/bgp/engine/attrs"
	"github.com/routerd/routerd/store"
)

// gracefulShutdownText is the community GRACEFUL_SHUTDOWN in a Config's tags (RFC 8326 section 3): the path is about to go, so
// others are to be preferred while it still works.
const (
	gracefulShutdownText = "65535:0"
	gracefulShutdown     = 0xffff0000
)

// drainPreference is the LOCAL_PREF of what a host that is drained originates: the least that is not the absence of one.
const drainPreference = 1

// leave makes what a host that is drained passes on, a reflector above all, the last choice of those who have it from
// another one too.
func leave(e *attrs.Edit) {
	pref := uint32(drainPreference)
	e.LocalPref = &pref
	e.Communities = append(slices.Clone(e.Communities), gracefulShutdown)
}

// Leave has peers prefer other ways, as if the Node were drained. It holds until the controller ends.
func (c *Controller) Leave() {
	c.mu.Lock()
	c.view.leaving = true
	c.mu.Unlock()
	c.poke()
}

// Withdraw has the controller end with telling its peers, which drop this host's routes, and not as before a restart.
func (c *Controller) Withdraw() { c.withdraw.Store(true) }

// Attracts reports whether a peer sends here by what BGP says: a peer that has a session and is no node of the cluster.
func (c *Controller) Attracts() bool { return c.speaker.attracts() }

// drain changes what is advertised from a host that is drained.
func (d *derivation) drain(c *Config) {
	c.Drain = d.self.drain
	if c.Drain == "" && d.v.leaving {
		c.Drain = store.DrainShift
	}
	switch c.Drain {
	case store.DrainWithdrawn:
		c.Announce, c.Hidden, c.Tags, c.Leaving, c.Services = nil, nil, nil, nil, nil
	case store.DrainShift:
		c.LocalPref, c.LocalPref6 = drainPreference, drainPreference
		tags := make(map[netip.Prefix]string, len(c.Announce))
		for _, p := range c.Announce {
			if tags[p] = c.Tags[p]; !c.Leaving[p] {
				tags[p] = strings.TrimSpace(c.Tags[p] + " " + gracefulShutdownText)
			}
		}
		c.Tags = tags
	}
}
