package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/routerd/routerd/cni"
	"github.com/routerd/routerd/control/cnifiles"
)

// keepCNI keeps the CNI plugin that stands beside this program where the container
// runtime looks for it.
func (d *router) keepCNI(ctx context.Context) error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find the plugin's binary: %w", err)
	}
	k := cnifiles.Keeper{
		Files: cni.InstallOptions{
			Binary: filepath.Join(filepath.Dir(self), "routerd-cni"), BinDir: d.cfg.CNI.BinDir, ConfDir: d.cfg.CNI.ConfDir, Conflist: conflistOptions(d.cfg),
		},
		Ready: d.attachReady, Log: d.log,
	}
	return k.Run(ctx)
}
