// Package hostile attacks hosts as a pod, a peer, another node or a bad record of
// the datastore can, in labs of real daemons, and holds what docs/security.md
// promises: a test an attack.
package hostile
