package main

import (
	"os"
	"path/filepath"

	"github.com/routerd/routerd/control/atomicfile"
	"github.com/routerd/routerd/control/bootid"
)

// bootMark is the file that says in which boot of the host the daemon has run.
func bootMark(runDir string) string { return filepath.Join(runDir, "booted") }

// booted reports whether this is the daemon's first start since the host booted.
func (d *router) booted() bool {
	boot, err := bootid.Read()
	if err != nil {
		d.log.Warn("it is not known whether the host has booted; the kernel is left as it is until the datastore answers", "error", err)
		return false
	}
	if mark, err := os.ReadFile(bootMark(d.cfg.RunDir)); err == nil && string(mark) == boot {
		return false
	}
	if err := atomicfile.Write(bootMark(d.cfg.RunDir), []byte(boot), 0o600); err != nil {
		d.log.Warn("that the daemon has started since the host booted is not noted", "error", err)
	}
	return true
}
