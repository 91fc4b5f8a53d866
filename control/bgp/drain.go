package bgp

import (
	"net/netip"
	"strings"

	"github.com/routerd/routerd/store"
)

// gracefulShutdownText is the community GRACEFUL_SHUTDOWN in a Config's tags (RFC 8326 section 3): the path is about to go, so
// others are to be preferred while it still works.
const gracefulShutdownText = "65535:0"

// drainPreference is the LOCAL_PREF of what a host that is drained originates: the least that is not the absence of one.
const drainPreference = 1

// drain changes what is advertised from a host that is drained.
func (d *derivation) drain(c *Config) {
	switch d.self.drain {
	case store.DrainWithdrawn:
		c.Announce, c.Hidden, c.Tags = nil, nil, nil
	case store.DrainShift:
		c.LocalPref, c.LocalPref6 = drainPreference, drainPreference
		tags := make(map[netip.Prefix]string, len(c.Announce))
		for _, p := range c.Announce {
			tags[p] = strings.TrimSpace(c.Tags[p] + " " + gracefulShutdownText)
		}
		c.Tags = tags
	}
}
