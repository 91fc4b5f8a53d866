// Package conn runs package fsm's machines on TCP: it connects and accepts, reads and
// writes messages, and lets timers expire.
package conn
