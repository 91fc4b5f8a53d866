// Package policy says what Calico's policies mean on one host. A [Calculator]
// takes the store's events and gives the steps ([filter.Delta]) from one
// [filter.Ruleset] to the next. It does no I/O and has no goroutines; one
// owner calls it.
//
// What it costs follows what changes. Every endpoint and network set of the
// cluster stands in an index of labels; every selector that a rule in force on
// this host uses stands in an index of conditions. So one label that changes
// is tried against the selectors that ask for it, and the outcome is single
// members of single sets. Policies that select nothing on this host have no
// sets at all.
//
// Meaning, in short (Calico's API v3; tiers, order and defaults as Felix has
// them):
//
//   - Tiers by order (absent last), then name; policies in a tier by order
//     (absent last), then name, namespace, kind. A tier concerns a direction of
//     an endpoint when a policy in it selects the endpoint and has that type.
//     What no rule of such a tier decides takes its default action.
//   - After the tiers the profiles, as the endpoint lists them; then Deny.
//   - A policy of a tier that does not exist stands in a tier without an order
//     whose default action is Deny.
//   - An object that cannot be read leaves in force what was known of it; see
//     [Calculator.Problems]. A policy of which nothing was known denies what it
//     selects, if at least that can be read: closed, never open.
package policy
