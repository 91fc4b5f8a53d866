package store

import (
	"fmt"
	"net/netip"
	"strings"
	"time"
)

// AnnotationBMP on a BGPConfiguration names the collectors that are told over BMP (RFC 7854) what this host's BGP hears and
// chooses: on the one named default of all nodes, on node.NAME of that node in place of them. Its value is what [ParseBMP] reads.
const AnnotationBMP = "routerd.io/bmp"

// BMP is a collector and what it is told.
type BMP struct {
	Collector                     netip.AddrPort
	PrePolicy, PostPolicy, LocRIB bool
	Statistics                    time.Duration // between reports; 0: none
}

// defaultBMPStatistics is the time between two reports unless a collector has another.
const defaultBMPStatistics = time.Minute

const bmpForm = `"off", or collectors with commas between them, each an address and a port, such as 10.0.0.5:11019 or [2001:db8::5]:11019, and then nothing or some of pre-policy, post-policy, loc-rib and stats=60s`

// ParseBMP reads the value of an [AnnotationBMP].
func ParseBMP(value string) ([]BMP, error) {
	if value == "off" {
		return nil, nil
	}
	var out []BMP
	for part := range strings.SplitSeq(value, ",") {
		words := strings.Fields(part)
		if len(words) == 0 {
			return nil, fmt.Errorf("must be %s", bmpForm)
		}
		b := BMP{Statistics: defaultBMPStatistics}
		var err error
		if b.Collector, err = netip.ParseAddrPort(words[0]); err != nil || b.Collector.Port() == 0 {
			return nil, fmt.Errorf("%q: must be %s", words[0], bmpForm)
		}
		for _, c := range out {
			if c.Collector == b.Collector {
				return nil, fmt.Errorf("the collector %s is there twice", b.Collector)
			}
		}
		for _, w := range words[1:] {
			every, stats := strings.CutPrefix(w, "stats=")
			switch {
			case stats:
				if b.Statistics, err = time.ParseDuration(every); err != nil || b.Statistics != 0 && (b.Statistics < time.Second || b.Statistics > time.Hour) {
					return nil, fmt.Errorf("%q: the time between two reports must be 0 for none, or from 1s to 1h", w)
				}
			case w == "pre-policy":
				b.PrePolicy = true
			case w == "post-policy":
				b.PostPolicy = true
			case w == "loc-rib":
				b.LocRIB = true
			default:
				return nil, fmt.Errorf("%q: must be %s", w, bmpForm)
			}
		}
		if !b.PrePolicy && !b.PostPolicy && !b.LocRIB {
			b.PrePolicy, b.PostPolicy, b.LocRIB = true, true, true
		}
		out = append(out, b)
	}
	return out, nil
}
