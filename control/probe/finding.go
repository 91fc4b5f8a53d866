package probe

import (
	"errors"
	"fmt"
	"time"

	"github.com/routerd/routerd/dataplane"
)

// Finding is what one measurement of a path found: facts, no judgement.
type Finding struct {
	Answered bool // a small packet with a checksum of the kernel's came there and back
	Refused  bool // the peer's kernel says that nobody listens
	RTT      time.Duration

	Full int // bytes: the device's MTU, which was asked for
	Size int // bytes: the largest IP packet that got there; Full, if all is well

	// Checksum says whether packets get there whose checksum was left to the
	// device, small ones and those of Size bytes alike.
	Checksum dataplane.Answer
	Segments Count    // datagrams that were sent as one packet, for the device to cut
	Transfer Transfer // over TCP

	// Flows are those of plain packets, of which nothing else is measured but
	// [Finding.Answered] and [Finding.Refused].
	Flows Count
}

// Count says how many were sent and how many got there.
type Count struct{ Sent, Got int }

// bad reports that next to nothing got there. A queue that overflows loses some
// of a burst; a device that cannot cut loses all, or all but the first.
func (c Count) bad() bool { return c.Sent > 0 && 4*c.Got <= c.Sent }

// Transfer is how a short TCP connection fared.
type Transfer struct {
	Connected   bool
	Done        bool
	Bytes       int64 // that the peer's kernel has confirmed
	Elapsed     time.Duration
	Sent        int64 // segments, with those sent again
	Retransmits int64 // segments sent again
}

// bad reports that the connection lived on what it sent again, as it does when
// every packet that the device has to cut is lost. A slow path, or a slow
// machine, sends little again.
func (t Transfer) bad() bool {
	return t.Connected && t.Retransmits >= 3 && (!t.Done || 2*t.Retransmits >= t.Sent)
}

// inconclusive reports that the transfer says nothing of the device: it did not
// finish, and yet nothing was lost.
func (t Transfer) inconclusive() bool { return !t.Done && !t.bad() }

// Goodput is what the transfer got through, in bytes a second; 0 when there
// was none.
func (t Transfer) Goodput() float64 {
	if t.Elapsed <= 0 {
		return 0
	}
	return float64(t.Bytes) / t.Elapsed.Seconds()
}

// verdict is what a finding means for one target.
type verdict struct {
	result dataplane.Answer
	need   Setting // offloads that spoil packets
	mtu    int     // bytes; 0: the device's
	reason string  // why not simply yes
}

// judge says what a finding means. It is pure; what was known before, and
// whether another setting helps, is for the caller.
func judge(t Target, f Finding, err error) verdict {
	if t.plain() {
		return judgePlain(t, f, err)
	}
	switch {
	case err != nil:
		return verdict{reason: err.Error()}
	case !f.Answered && f.Refused:
		return verdict{reason: "packets get there, and nobody answers probes: a node of Calico's, or one whose probes are off"}
	case !f.Answered && t.Accepts:
		return verdict{result: dataplane.No, reason: fmt.Sprintf("no answer through %s from %s at %s: %s", t.Tunnel.Link, t.Node, t.Registered, t.hint())}
	case !f.Answered:
		return verdict{reason: "no answer, and the node has not said that it takes this form in"}
	}
	v := verdict{result: dataplane.Yes}
	if f.Size < f.Full {
		v.mtu = f.Size
		v.reason = fmt.Sprintf("packets of more than %d bytes are lost on the way, and %s takes %d", f.Size, t.Tunnel.Link, f.Full)
	}
	if f.Checksum == dataplane.No {
		v.need |= NoChecksum
		v.result, v.reason = dataplane.No, "packets whose checksum is left to the hardware are lost"
		return v
	}
	if f.Segments.bad() {
		v.need |= NoUDPSegments
	}
	if f.Transfer.bad() {
		v.need |= NoTCPSegments
	}
	switch {
	case v.need != 0:
		v.result, v.reason = dataplane.No, "packets that are left to the hardware to cut are lost"
	case !f.Transfer.Connected:
		v.result, v.reason = dataplane.Unknown, "UDP gets through and TCP's handshake does not: the peer's own offload is at fault, or a firewall"
	case f.Transfer.inconclusive():
		v.result, v.reason = dataplane.Unknown, "the TCP transfer did not end in time, with nothing lost: a busy machine or a slow path"
	}
	return v
}

// helped returns which members of need a measurement shows to be cured.
func helped(need Setting, before, after Finding) Setting {
	var s Setting
	if need&NoChecksum != 0 && after.Checksum == dataplane.Yes {
		s |= NoChecksum
	}
	if need&NoTCPSegments != 0 && !after.Transfer.bad() && after.Transfer.Goodput() > 2*before.Transfer.Goodput() {
		s |= NoTCPSegments
	}
	if need&NoUDPSegments != 0 && !after.Segments.bad() {
		s |= NoUDPSegments
	}
	return s
}

// errNoKey says that the cluster's key has not been read yet.
var errNoKey = errors.New("the cluster's key is not known yet")
