// Package attach does what ADD, DEL, CHECK, STATUS and GC of the CNI
// specification (1.1) ask of the daemon.
//
// An ADD goes through steps, each of which can be repeated: a record on disk,
// an address, the wire, the host's route, the endpoint in the datastore. The
// record is written first and removed last, so that whatever kills the daemon
// in between, a repeated ADD finishes the work and a DEL, a GC or the next
// start of the daemon undoes it. Everything made is named after the container
// and its interface, so that DEL also works without a record.
//
// While the datastore cannot be reached, DEL cuts the wire and then reports
// the datastore: the runtime tries again, and so does [Attacher.Run].
package attach
