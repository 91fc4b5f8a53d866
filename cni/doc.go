// Package cni is the CNI plugin: it turns what a container runtime says (CNI
// specification 0.3.1 to 1.1.0) into one call to the daemon, and the daemon's
// answer into a result. It also makes the network configuration that names the
// plugin, and installs both.
//
// A runtime starts the plugin for every container, so the package imports
// little and does its work without goroutines of its own.
package cni

import "time"

// DefaultSocket is where the daemon listens unless configured otherwise.
const DefaultSocket = "/run/routerd/cni.sock"

// PluginType is the plugin's name: of the binary, and in `type` of a network
// configuration.
const PluginType = "routerd-cni"

// The time that a verb may take, unless configured otherwise. A daemon that
// starts or a datastore that elects a leader is waited for; what takes longer
// is for the runtime to repeat.
const (
	DefaultAddTimeout    = 60 * time.Second
	DefaultDelTimeout    = 30 * time.Second
	DefaultStatusTimeout = 20 * time.Second // a kubelet asks every 5 s, and takes a runtime for dead that it has not heard of for 30
)
