package cluster

import (
	"fmt"
	"path/filepath"
)

// Runtime is what runs a node's containers.
type Runtime string

// Containerd as Debian has it, which is 1.6 and knows CNI up to 1.0.0, and containerd 2,
// which has CNI 1.1 and asks STATUS: "make kube-runtime" builds it.
const (
	Containerd1 Runtime = "containerd"
	Containerd2 Runtime = "containerd2"
)

func (r Runtime) check() error {
	if r != Containerd1 && r != Containerd2 {
		return fmt.Errorf("runtime %q: want %s or %s", r, Containerd1, Containerd2)
	}
	return nil
}

// containerdProgram is the program of the runtime on a node.
func (c *Cluster) containerdProgram() string {
	if c.conf.Runtime == Containerd2 {
		return filepath.Join(c.conf.KubeBin, "containerd")
	}
	return "containerd"
}

func (c *Cluster) containerdConfig() string {
	if c.conf.Runtime == Containerd2 {
		return fmt.Sprintf(containerd2Config, filepath.Join(c.conf.KubeBin, "containerd-shim-runc-v2"))
	}
	return containerdConfig
}
