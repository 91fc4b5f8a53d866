// Package attach does what ADD, DEL, CHECK, STATUS and GC of the CNI
// specification (1.1) ask of the daemon.
//
// A verb is a list of steps, each of which can be repeated. Those of ADD: a
// record on disk, an address, the wire, the host's route, the endpoint in the
// datastore, the rules of policy. The record is written first and removed last,
// so that whatever kills the daemon in between, a repeated ADD finishes the work
// and a DEL, a GC or the next start of the daemon undoes it. Everything made is
// named after the container and its interface, so that DEL also works without a
// record.
//
// An attachment has one state, which says how far it is and what the datastore
// may know of it; one table has every transition. The parts of an [Attacher] own
// what they change: ledger the records, releaser what is on its way out, flusher
// what the datastore is to be written, reclaimer what it forgot, mtus and
// gateways what their names say.
//
// While the datastore cannot be reached, DEL removes the wire and then reports
// the datastore: the runtime tries again, and so does [Attacher.Run].
package attach
