// Package apiv1 is the API between the daemon and its clients on the same
// host: the CNI plugin and routerctl. Both services are served on unix sockets
// that only root can open.
//
// The .proto files are the source; `make generate` makes the rest.
package apiv1
