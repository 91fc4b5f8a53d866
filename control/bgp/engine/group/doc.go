// Package group advertises one table to many peers. Those that are sent the same are
// an update group: what is advertised is decided and packed once, into a log of
// messages that each member reads at its own pace.
//
// A member is sent all but what came from itself. One that has just come, or that
// has fallen behind by more than the log holds, is sent what the table holds by a
// walk over it, so a member that reads nothing costs no memory.
//
// A Group and its members are not safe for concurrent use.
package group
