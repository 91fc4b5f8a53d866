package ui

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/routerd/routerd/dataplane/netdev"
)

// Rates is what a device carries, in bits a second.
type Rates struct {
	Device   string  `json:"device"`
	Received float64 `json:"received"`
	Sent     float64 `json:"sent"`
	Dropped  float64 `json:"dropped"` // packets a second, both ways
}

// rates compares two readings, of the devices that both have and whose counters did not begin anew.
func rates(was, is map[string]netdev.Counters, took time.Duration) []Rates {
	out := []Rates{}
	if took <= 0 {
		return out
	}
	per := func(a, b uint64) float64 { return float64(b-a) / took.Seconds() }
	for name, b := range is {
		a, ok := was[name]
		if !ok || b.ReceivedBytes < a.ReceivedBytes || b.SentBytes < a.SentBytes || b.Dropped < a.Dropped {
			continue
		}
		out = append(out, Rates{
			Device: name, Received: 8 * per(a.ReceivedBytes, b.ReceivedBytes), Sent: 8 * per(a.SentBytes, b.SentBytes), Dropped: per(a.Dropped, b.Dropped),
		})
	}
	slices.SortFunc(out, func(a, b Rates) int { return cmp.Compare(a.Device, b.Device) })
	return out
}

// shown leaves workloads' interfaces and the loopback out: of each that would be too many, and of no use.
func shown(all map[string]netdev.Counters) map[string]netdev.Counters {
	for name := range all {
		if name == "lo" || strings.HasPrefix(name, "cali") {
			delete(all, name)
		}
	}
	return all
}
