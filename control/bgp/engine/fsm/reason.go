package fsm

import "fmt"

// Cause is why a connection or a session ended.
type Cause uint8

// The causes.
const (
	Stopped       Cause = iota + 1 // by Stop, without a NOTIFICATION
	Sent                           // this side sent a NOTIFICATION
	Received                       // the peer did
	HoldTimer                      // nothing came from the peer; it was sent NOTIFICATION 4/0
	SendHoldTimer                  // the peer read nothing (RFC 9687)
	Lost                           // the connection was closed, or broke
	NotConnected                   // no connection came about
	PeerRestarted                  // the peer opened a new connection (RFC 4724 section 4.2)
)

// Reason says why a session ended, or did not come about.
type Reason struct {
	Cause        Cause
	Notification Notification // of Sent, Received and HoldTimer
	Err          error        // of the connection, or what was wrong with a message
	State        State        // of the connection when it ended
	PeerAS       uint32       // that the peer's OPEN says; 0: none came
}

func (r Reason) String() string {
	text := map[Cause]string{
		Stopped: "stopped", Sent: "sent", Received: "received", HoldTimer: "hold timer expired", SendHoldTimer: "send hold timer expired",
		Lost: "connection lost", NotConnected: "not connected", PeerRestarted: "the peer restarted",
	}[r.Cause]
	if r.Cause == Sent || r.Cause == Received {
		text += " " + r.Notification.String()
	}
	if r.Err != nil {
		text += fmt.Sprintf(": %v", r.Err)
	}
	return text
}

// Retains reports whether the routes of the peer whose session ended are kept for its
// restart time: the connection was lost without a word (RFC 4724 section 4.2), or with
// one that is no hard reset, and both sides have RFC 8538.
func (r Reason) Retains(s *Session) bool {
	if !s.GracefulRestart {
		return false
	}
	switch r.Cause {
	case Lost, PeerRestarted:
		return true
	case HoldTimer, SendHoldTimer:
		return s.Notification
	case Sent, Received:
		_, hard := r.Notification.HardReset()
		return s.Notification && !hard
	}
	return false
}
