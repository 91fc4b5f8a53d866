package ui

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Rates is what a device carries, in bits a second.
type Rates struct {
	Device   string  `json:"device"`
	Received float64 `json:"received"`
	Sent     float64 `json:"sent"`
	Dropped  float64 `json:"dropped"` // packets a second, both ways
}

// counters are a device's, since it was made.
type counters struct{ rxBytes, txBytes, dropped uint64 }

// parseCounters reads /proc/net/dev (proc_pid_net(5)). Lines that are none of a device are left out.
func parseCounters(text string) map[string]counters {
	out := map[string]counters{}
	for line := range strings.Lines(text) {
		name, rest, ok := strings.Cut(line, ":")
		f := strings.Fields(rest)
		if !ok || len(f) < 16 {
			continue
		}
		var n [16]uint64
		good := true
		for i := range n {
			v, err := strconv.ParseUint(f[i], 10, 64)
			good = good && err == nil
			n[i] = v
		}
		if good {
			out[strings.TrimSpace(name)] = counters{rxBytes: n[0], txBytes: n[8], dropped: n[3] + n[11]}
		}
	}
	return out
}

// rates compares two readings, of the devices that both have and whose counters did not begin anew.
func rates(was, is map[string]counters, took time.Duration) []Rates {
	out := []Rates{}
	if took <= 0 {
		return out
	}
	per := func(a, b uint64) float64 { return float64(b-a) / took.Seconds() }
	for name, b := range is {
		a, ok := was[name]
		if !ok || b.rxBytes < a.rxBytes || b.txBytes < a.txBytes || b.dropped < a.dropped {
			continue
		}
		out = append(out, Rates{
			Device: name, Received: 8 * per(a.rxBytes, b.rxBytes), Sent: 8 * per(a.txBytes, b.txBytes), Dropped: per(a.dropped, b.dropped),
		})
	}
	slices.SortFunc(out, func(a, b Rates) int { return cmp.Compare(a.Device, b.Device) })
	return out
}

// shown leaves workloads' interfaces and the loopback out: of each that would be too many, and of no use.
func shown(all map[string]counters) map[string]counters {
	for name := range all {
		if name == "lo" || strings.HasPrefix(name, "cali") {
			delete(all, name)
		}
	}
	return all
}
