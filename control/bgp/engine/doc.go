// Package engine speaks BGP: it has the sessions with all peers, the table of what
// they announce, and advertises what its caller's policy lets out. It knows neither a
// datastore nor Calico's resources.
//
// One lock guards the table. A session's reader holds it while it applies a
// message, so when the table is busy it is TCP that has the peer wait. What takes long is
// done in steps, between which others have their turn. No KEEPALIVE waits for the lock.
package engine
