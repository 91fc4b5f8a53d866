// Package fsm is BGP's state machine (RFC 4271 section 8) without sockets or clock:
// its caller reports what happened and when, and does what it returns. What was
// agreed in OPEN, and why a session ended, are values.
//
// One [Machine] is a peer with all its connections, so that collisions (RFC 4271
// section 6.8) are resolved in one place. It is not safe for concurrent use.
package fsm
