// Package reconcile keeps what several sources want beside what there is, and
// says what has to be done to make the two equal. It knows nothing of the
// things it tracks and does no I/O: the owner of a [Tracker] takes due work
// from it, does it, and reports what became of it.
//
// The rules are these.
//
//   - Wishes are sets. A source replaces its whole wish, or changes some keys
//     of it; the end state is the same.
//   - One wish per key wins: that of the source with the lowest number. The
//     loser's wish is kept and takes over when the winner withdraws.
//   - What there is comes from complete listings ([Tracker.ReplaceHave]) and
//     from what the owner reports; between listings single keys may be
//     corrected by notifications.
//   - Nothing is removed that was never wanted in this life before every
//     source said that its wish is complete.
//   - One bad key never stops the rest: it is tried again with a growing
//     delay, and its trouble is there to be read.
//
// The cost of a change follows the change: only [Tracker.Replace],
// [Tracker.ReplaceHave], the last [Tracker.Synced] and the listing methods
// look at everything.
package reconcile
