package vm

import (
	"context"
	_ "embed"
	"os"
	"path"
	"path/filepath"
	"strings"
)

//go:embed command.service
var commandService []byte

// systemdTools are the programs of a machine whose first process is systemd:
// its own, and those that install packages.
func systemdTools() []string {
	return []string{
		"/lib/systemd/systemd", "/lib/systemd/systemd-journald", "/lib/systemd/systemd-shutdown", "systemctl", "journalctl",
		"dpkg", "dpkg-deb", "dpkg-split", "tar", "ldconfig", "start-stop-daemon", "rpm",
	}
}

// rpmFiles is where rpm has its macros.
const rpmFiles = "/usr/lib/rpm"

// systemdUnits are Debian's units that the machine has: the targets that
// services are ordered by, the journal, and the ways down. Nothing that sets up
// a machine, which the first script has done.
func systemdUnits() []string {
	return []string{
		"sysinit.target", "basic.target", "multi-user.target", "sockets.target", "timers.target", "paths.target", "slices.target",
		"local-fs-pre.target", "local-fs.target", "swap.target", "network-pre.target", "network.target",
		"rescue.target", "emergency.target",
		"systemd-journald.service", "systemd-journald.socket", "systemd-journald-dev-log.socket",
		"shutdown.target", "umount.target", "final.target",
		"poweroff.target", "systemd-poweroff.service", "reboot.target", "systemd-reboot.service",
	}
}

// addSystemd makes systemd the first process of a machine, and its command a
// service.
func addSystemd(ctx context.Context, a *archive) error {
	files, err := toolFiles(ctx, systemdTools())
	if err != nil {
		return err
	}
	// Systemd 254 and later start services by a program of their own.
	if _, err := os.Stat("/lib/systemd/systemd-executor"); err == nil {
		files = append(files, "/lib/systemd/systemd-executor")
	}
	for _, f := range files {
		a.file(f, f)
	}
	a.tree(rpmFiles, rpmFiles)
	const units = "/lib/systemd/system"
	for _, u := range systemdUnits() {
		a.file(path.Join(units, u), filepath.Join(units, u))
	}
	a.symlink(path.Join(units, "default.target"), "multi-user.target")
	for _, u := range []string{"systemd-journald.socket", "systemd-journald-dev-log.socket"} {
		a.symlink(path.Join(units, "sockets.target.wants", u), "../"+u)
	}
	a.mkdir("/mnt")
	a.bytes("/etc/vm/command.service", 0o644, commandService)
	// For the reasons that vmrun has for its command; a start may take minutes on
	// a busy host.
	a.bytes("/etc/systemd/system.conf", 0o644, []byte("[Manager]\nDefaultEnvironment=GOGC=800\nDefaultTimeoutStartSec=10min\n"))
	// A machine without an identity would be one that boots for the first time.
	a.bytes("/etc/machine-id", 0o444, []byte(strings.Repeat("5eed", 8)+"\n"))
	a.file("/etc/os-release", "/etc/os-release")
	return nil
}
