// Package rib is BGP's table: what each peer announced, which of it is chosen
// (RFC 4271 section 9.1), and what changed since its reader last asked.
//
// It is made for millions of prefixes: they are integers in open addressing with
// dense ids, paths are 16 bytes in pieces, and neither has a pointer. The choice is a
// function of the paths alone and never of the order in which they came, so
// there is no comparison of age.
package rib
