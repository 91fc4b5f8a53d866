// Package dataplane is the vocabulary shared by the core, the drivers and the
// writer to the kernel.
//
// The core decides what should be in the kernel and says so in [Object]
// values. A [Driver] translates a peer into objects without doing any I/O. A
// [Sink], which package dataplane/kernel implements, makes the kernel match.
//
// All types are values: comparable with ==, usable as map keys, free of
// pointers, and safe to share between goroutines.
package dataplane
