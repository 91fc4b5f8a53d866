// Package runtimes tests bin/routerd and bin/routerd-cni under real container
// runtimes: cnitool, containerd and podman start real containers from an image
// that is built from nothing, on a host that is a network namespace, and other
// network plugins take their addresses from routerd-cni. Nothing outside of the
// test's directories and namespaces is touched: the runtimes' fixed paths are
// mounted over, in a mount namespace of their own.
package runtimes
