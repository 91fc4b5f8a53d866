// Package journal is a map on disk that is written by appending: what a daemon
// has promised and must know again after the loss of power.
//
// A file holds one change in each line: a checksum (CRC-32C, RFC 3720 appendix
// B.4) in hexadecimal digits, a space, and a JSON object with the key and, but
// for a deletion, its value. A line that a crash cut short ends the file without
// an end of its own and is dropped: nobody had an answer that it is on the disk. A
// whole line that is damaged, be it the last one, is left out, with an error in
// the log, [Journal.Damage], and a copy of the file beside it; the other lines
// hold. When most of the file is history, it is written anew.
//
// What was appended survives the death of the process at once, and the loss of
// power after [Journal.Sync]. Those who wait for the disk at one time share one
// flush.
package journal
