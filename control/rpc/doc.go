// Package rpc is the daemon's door: the unix socket, the gRPC services behind
// it, and the one place where errors get their codes.
//
// Services translate between messages and the types of the packages that do
// the work; they decide nothing.
package rpc
