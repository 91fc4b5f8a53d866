// Package filter is the vocabulary of packet filtering and of address
// translation: what control/policy decides and what a writer to the kernel
// carries out. It knows neither Calico's resources nor nftables.
//
// A [Ruleset] is everything that holds on one host. It is built and kept up to
// date by [Delta] values, each of which is to take effect in one step: a packet
// is judged by the rules before or after it, never by half of them.
//
//	interface → Endpoint → Path (per direction) → Tier → Policy → Rule → Set
//
// Policies and sets are shared: an endpoint names its policies, and a rule
// names the sets that its addresses must be in, so a member that comes or goes
// is one element of one set, whatever the number of rules and endpoints.
//
// [Ruleset.Judge] says what becomes of a packet. It is slow and simple: what
// `routerctl policy explain` shows, and what a kernel is compared with.
//
// All types are values without references into the calculator. Slices and maps
// that came in a Delta are not to be changed.
package filter
