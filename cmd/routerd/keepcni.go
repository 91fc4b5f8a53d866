package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/routerd/routerd/cni"
)

// lookAtCNI is how often the daemon looks whether the plugin's files are there.
const lookAtCNI = 5 * time.Second

// keepCNI puts the CNI plugin and its configuration in place as soon as workloads can
// be attached, and puts them back when something removes or changes them: what is
// there makes a kubelet start pods. They stay when the daemon stops.
func (d *router) keepCNI(ctx context.Context) error {
	if !d.cfg.CNI.Manage {
		<-ctx.Done()
		return ctx.Err()
	}
	select {
	case <-d.restored:
	case <-ctx.Done():
		return ctx.Err()
	}
	tick := time.NewTicker(lookAtCNI)
	defer tick.Stop()
	installed, seen, failed := false, "", "" // seen: as the files were when nothing had to be done
	for {
		if now := d.cniFiles(); installed && now != seen || !installed && d.attachReady() == nil {
			changed, err := d.installCNI()
			installed = installed || err == nil
			if seen = ""; err == nil && !changed {
				seen = now
			}
			if err != nil && err.Error() != failed {
				d.log.Error("the CNI plugin cannot be put in place; will try again", "error", err)
			}
			if failed = ""; err != nil {
				failed = err.Error()
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (d *router) installCNI() (changed bool, err error) {
	self, err := os.Executable()
	if err != nil {
		return false, fmt.Errorf("find the plugin's binary: %w", err)
	}
	c := d.cfg
	files, err := cni.Install(cni.InstallOptions{
		Binary: filepath.Join(filepath.Dir(self), "routerd-cni"), BinDir: c.CNI.BinDir, ConfDir: c.CNI.ConfDir, Conflist: conflistOptions(c),
	})
	if len(files) > 0 {
		d.log.Info("the CNI plugin is in place", "changed", files)
	}
	return len(files) > 0, err
}

// cniFiles tells apart what is there of the plugin's files: by size and time, for they
// are looked at often.
func (d *router) cniFiles() string {
	var b strings.Builder
	for _, path := range []string{
		filepath.Join(d.cfg.CNI.BinDir, cni.PluginType), filepath.Join(d.cfg.CNI.BinDir, cni.LoopbackType), filepath.Join(d.cfg.CNI.ConfDir, cni.ConflistName),
	} {
		info, err := os.Lstat(path)
		switch {
		case errors.Is(err, os.ErrNotExist):
			fmt.Fprintln(&b, path, "missing")
		case err != nil:
			fmt.Fprintln(&b, path, err)
		default:
			fmt.Fprintln(&b, path, info.Size(), info.Mode(), info.ModTime())
		}
	}
	return b.String()
}
