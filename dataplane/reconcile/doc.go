// Package reconcile keeps what several sources want beside what there is, and
// says what has to be done to make the two equal. It knows nothing of the
// things it tracks and does no I/O: the owner of a [Tracker] takes due work
// from it, does it, and reports what became of it.
//
// The rules are these.
//
//   - Desired states are sets. A source replaces its whole set, or changes keys
//     of it; the end state is the same.
//   - One source per key wins: the one with the lowest number. What the
//     loser wants is kept and takes over when the winner withdraws.
//   - What there is comes from complete listings ([Tracker.ReplaceHave]) and
//     from what the owner reports; between listings single keys may be
//     corrected by notifications.
//   - Nothing is removed that was never wanted in this run before every
//     source said that its set is complete.
//   - One bad key never stops the rest: it is tried again with a growing
//     delay, and its failure is there to be read.
//
// Of keys there may be a million: what is kept of one has no pointers, if the owner
// says how keys are packed ([Packing]) and its values say nothing that their keys do, so that many keys share one.
//
// The cost of a change follows the change: only [Tracker.Replace],
// [Tracker.ReplaceHave], the last [Tracker.Synced] and the listing methods
// look at everything.
package reconcile
