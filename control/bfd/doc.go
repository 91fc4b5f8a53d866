// Package bfd finds out within milliseconds that a peer is not reached any more: Bidirectional Forwarding Detection
// (RFC 5880), over one hop (RFC 5881) and over several (RFC 5883), in asynchronous mode, without echo and without
// authentication.
//
// [Machine] is one session, without sockets or clock. [Engine] runs many of them on UDP. A daemon that is busy may be
// late by more than the fifty milliseconds that a session is asked to keep, so the engine runs in a process of its own:
// [Serve] is that process, and [Supervisor] is what the daemon has of it.
package bfd

import (
	"fmt"
	"net/netip"
	"time"
)

// State of a session (RFC 5880 section 4.1, Sta).
type State uint8

// The states, by their numbers on the wire.
const (
	AdminDown State = iota
	Down
	Init
	Up
)

func (s State) String() string {
	switch s {
	case AdminDown:
		return "AdminDown"
	case Down:
		return "Down"
	case Init:
		return "Init"
	case Up:
		return "Up"
	}
	return fmt.Sprintf("State(%d)", uint8(s))
}

// Diagnostic says why a session left the state Up (RFC 5880 section 4.1, Diag).
type Diagnostic uint8

// The diagnostics that are sent here.
const (
	NoDiagnostic       Diagnostic = 0
	TimeExpired        Diagnostic = 1
	NeighborDown       Diagnostic = 3
	AdministrativeDown Diagnostic = 7
)

func (d Diagnostic) String() string {
	names := [...]string{
		"no diagnostic", "control detection time expired", "echo function failed", "neighbor signaled session down",
		"forwarding plane reset", "path down", "concatenated path down", "administratively down", "reverse concatenated path down",
	}
	if int(d) < len(names) {
		return names[d]
	}
	return fmt.Sprintf("diagnostic %d", uint8(d))
}

// Key names a session: RFC 5881 and 5883 have one session between two addresses.
type Key struct {
	Local, Remote netip.Addr // of one family, unmapped; link-local ones with their zone
	Multihop      bool
}

func (k Key) String() string { return fmt.Sprintf("%v -> %v", k.Local, k.Remote) }

// Timing is what this side asks of a session.
type Timing struct {
	MinTx      time.Duration // Desired Min TX Interval
	MinRx      time.Duration // Required Min RX Interval
	Multiplier uint8         // Detect Mult: so many packets may be missing
}

// Limits of what may be asked for. The least interval is what a process of its own keeps on a busy host; the longest
// is that of BFD's slow start times sixty.
const (
	MinInterval = 10 * time.Millisecond
	MaxInterval = time.Minute
)

// Check says what is wrong with t, naming the field.
func (t Timing) Check() error {
	for _, f := range []struct {
		name string
		d    time.Duration
	}{{"transmit interval", t.MinTx}, {"receive interval", t.MinRx}} {
		if f.d < MinInterval || f.d > MaxInterval {
			return fmt.Errorf("%s %v: use a duration from %v to %v", f.name, f.d, MinInterval, MaxInterval)
		}
	}
	if t.Multiplier == 0 {
		return fmt.Errorf("multiplier 0: use a number from 1 to 255, such as 3")
	}
	return nil
}

// Status is what is known of a session.
type Status struct {
	Key                Key
	State, RemoteState State
	// Diagnostic and RemoteDiagnostic say why either side left the state Up.
	Diagnostic, RemoteDiagnostic Diagnostic
	// Failed says that the session was up and is not, though neither side took it down: the peer is not reached.
	Failed bool
	// Independent is the peer's C bit: its BFD goes on while its control plane is away (RFC 5882 section 4.3).
	Independent bool
	Interval    time.Duration // between our packets, before jitter
	Detection   time.Duration // without packets, after which the session goes down; zero while none was received
	Since       time.Time     // of the state
	Late        time.Duration // the longest that this side was late, since the session last came up: the host had no time for it
	Flaps       uint64        // how often it left the state Up
	Sent        uint64
	Received    uint64
	// Fault is why packets cannot be sent, if they cannot.
	Fault string
}
