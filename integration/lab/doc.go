// Package lab brings up a small data centre on one machine: hosts and their
// pods are network namespaces, racks are bridges, a router namespace joins
// them, and each host runs a real routerd.
//
// A lab's namespaces are <lab>-spine, <lab>-<host> and <lab>-<host>-<pod>; all
// its files are in one directory below [Root], and all its processes live in
// its namespaces. That is how [Down] finds everything, also after the caller of
// [Up] was killed: what is about to be made is written down first.
//
// Everything needs root.
package lab
