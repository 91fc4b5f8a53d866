package store

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// AnnotationBFD asks for BFD (RFC 5880) beside BGP: on a BGPPeer for its sessions, on the BGPConfiguration named default for
// those of the node-to-node mesh. Its value is what [ParseBFD] reads. Both sides have to have it.
const AnnotationBFD = "routerd.io/bfd"

// BFD is what an [AnnotationBFD] asks for; the zero value is none.
type BFD struct {
	Interval   time.Duration // between packets, each way
	Multiplier uint8         // so many of them missing are a failure
}

// What the value "on" asks for: a failure is noticed within 900 ms.
const defaultBFDInterval, defaultBFDMultiplier = 300 * time.Millisecond, 3

// Limits of the interval: what a process of its own keeps on a busy host, and a minute.
const minBFD, maxBFD = 10 * time.Millisecond, time.Minute

// ParseBFD reads the value of an [AnnotationBFD]: "on", "off", an interval such as "100ms", or an interval and a multiplier such
// as "50ms x 3".
func ParseBFD(value string) (BFD, error) {
	b := BFD{Interval: defaultBFDInterval, Multiplier: defaultBFDMultiplier}
	switch value {
	case "on":
		return b, nil
	case "off":
		return BFD{}, nil
	}
	interval, multiplier, both := strings.Cut(value, "x")
	if both {
		n, err := strconv.ParseUint(strings.TrimSpace(multiplier), 10, 8)
		if err != nil || n == 0 {
			return BFD{}, fmt.Errorf("the multiplier %q must be a number from 1 to 255, as in \"50ms x 3\"", strings.TrimSpace(multiplier))
		}
		b.Multiplier = uint8(n)
	}
	d, err := time.ParseDuration(strings.TrimSpace(interval))
	if err != nil {
		return BFD{}, errors.New(`must be "on", "off", an interval such as "100ms", or an interval and a multiplier such as "50ms x 3"`)
	}
	if d < minBFD || d > maxBFD {
		return BFD{}, fmt.Errorf("the interval %s must be from %s to %s", d, minBFD, maxBFD)
	}
	b.Interval = d
	return b, nil
}
