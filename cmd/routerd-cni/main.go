// Command routerd-cni is the CNI plugin of routerd. Container runtimes execute
// it; package cni says what it does.
package main

import (
	"os"
	"runtime/debug"

	"github.com/routerd/routerd/cni"
)

// version is set by the linker (-X main.version=…).
var version = "unknown"

func main() {
	// The process lives for milliseconds: collecting garbage costs more than it
	// gives.
	debug.SetGCPercent(-1)
	os.Exit(cni.Main(version, os.Stdout, os.Stderr))
}
