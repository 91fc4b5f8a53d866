// Package repo holds tests of the repository itself: what may import what, that
// the sample configurations are complete and accepted, that the README's
// commands exist, that nothing in here points at one machine.
package repo
