package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/integration/await"
)

const networkdBinary = "/lib/systemd/systemd-networkd"

// networkd is a real systemd-networkd on a host, in a mount namespace with a
// system bus and nothing else of systemd.
type networkd struct {
	h   *host
	bus *exec.Cmd
	cmd *exec.Cmd
	log log
}

// newNetworkd prepares a host for networkd that has routerd's snippets, and a
// file that makes it manage eth0.
func newNetworkd(h *host, addr string) *networkd {
	h.t.Helper()
	etc := filepath.Join(h.dir, "systemd")
	for name, from := range map[string]string{
		"networkd.conf.d/routerd.conf": "../../configs/networkd/routerd.conf", "network/10-routerd.network": "../../configs/networkd/10-routerd.network",
		"network/50-eth0.network": "",
	} {
		content := []byte("[Match]\nName=eth0\n[Network]\nAddress=" + addr + "\nLinkLocalAddressing=no\nIPv6AcceptRA=no\n")
		var err error
		if from != "" {
			content, err = os.ReadFile(from)
		}
		path := filepath.Join(etc, name)
		if err := errors.Join(err, os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, content, 0o644)); err != nil { //nolint:gosec // networkd reads it as another user
			h.t.Fatal(err)
		}
	}
	if err := os.Chmod(h.dir, 0o755); err != nil { //nolint:gosec // the same
		h.t.Fatal(err)
	}
	n := &networkd{h: h}
	h.t.Cleanup(func() {
		if h.t.Failed() {
			h.t.Logf("log of networkd:\n%s", n.log.String())
		}
	})
	// A read-only /sys says that no udev is to be waited for.
	script := `set -e
mount --make-rprivate /
mount -t sysfs -o ro sysfs /sys
mount --bind "$1" /etc/systemd
mount -t tmpfs tmpfs /run
mkdir -p /run/dbus /run/systemd/netif/links /run/systemd/netif/leases /run/systemd/netif/lldp
chown -R systemd-network /run/systemd/netif
exec dbus-daemon --system --nofork --nopidfile`
	n.bus = n.start("unshare", "-m", "sh", "-c", script, "sh", etc)
	await.Until(h.t, "the system bus", func() error { return n.try("test", "-S", "/run/dbus/system_bus_socket") })
	return n
}

// start starts a command on the host, which is killed when the test ends.
func (n *networkd) start(args ...string) *exec.Cmd {
	n.h.t.Helper()
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Env = append(os.Environ(), "SYSTEMD_LOG_TARGET=console", "SYSTEMD_LOG_LEVEL=debug")
	cmd.Stdout, cmd.Stderr = &n.log, &n.log
	if err := n.h.ns.Do(cmd.Start); err != nil {
		n.h.t.Fatal(err)
	}
	n.h.t.Cleanup(func() { n.end(cmd, syscall.SIGKILL) })
	return cmd
}

// end ends a command that start started.
func (n *networkd) end(cmd *exec.Cmd, sig syscall.Signal) {
	if cmd.ProcessState == nil {
		_ = cmd.Process.Signal(sig)
		_ = cmd.Wait() // it was told to end
	}
}

func (n *networkd) inside(args ...string) []string {
	return append([]string{"nsenter", "-t", strconv.Itoa(n.bus.Process.Pid), "-m", "--"}, args...)
}

func (n *networkd) try(args ...string) error {
	_, err := n.h.exec(n.inside(args...)...)
	return err
}

// up starts networkd and waits until it has configured eth0.
func (n *networkd) up() {
	n.h.t.Helper()
	n.cmd = n.start(n.inside(networkdBinary)...)
	n.configured()
}

func (n *networkd) configured() {
	n.h.t.Helper()
	await.Until(n.h.t, "networkd has configured eth0", func() error {
		out, err := n.h.exec(n.inside("networkctl", "--no-legend", "--no-pager", "list", "eth0")...)
		if f := strings.Fields(out); err == nil && (len(f) < 5 || f[4] != "configured") {
			err = errors.New(out)
		}
		return err
	})
}

// networkdVersion is that of this machine.
func networkdVersion(t *testing.T) int {
	t.Helper()
	out, err := exec.Command(networkdBinary, "--version").Output()
	if err != nil {
		t.Fatalf("%v: these tests need systemd-networkd and dbus-daemon (make deps)", err)
	}
	m := regexp.MustCompile(`^systemd (\d+)`).FindSubmatch(bytes.TrimSpace(out))
	if m == nil {
		t.Fatalf("version: %s", out)
	}
	v, err := strconv.Atoi(string(m[1]))
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// TestBesideNetworkd restarts a real networkd beside the daemon and makes it
// configure the uplink again. What is routerd's stays, or where networkd is too
// old to be told about next hops, is put back.
func TestBesideNetworkd(t *testing.T) {
	t.Parallel()
	version := networkdVersion(t)
	h := newHost(t, "10.1.0.11/24")
	n := newNetworkd(h, "10.1.0.11/24")
	h.ip("addr del 10.1.0.11/24 dev eth0") // networkd gives it
	n.up()
	r := h.start()
	r.ready()
	r.program()
	look := func() string {
		return h.ip("route show proto 77") + h.ip("nexthop show proto 77") + h.ip("-o -4 addr show dev vxlan.calico")
	}
	before := look()
	touched := func() []string { return r.log.lines("putting it back", "component=kernel") }

	n.end(n.cmd, syscall.SIGTERM)
	n.up()
	if lines := touched(); len(lines) > 0 {
		t.Errorf("a restart of networkd touches what is routerd's:\n%s", strings.Join(lines, "\n"))
	}
	if diff := cmp.Diff(before, look()); diff != "" {
		t.Errorf("after a restart of networkd (-before +after):\n%s", diff)
	}

	if err := n.try("networkctl", "reconfigure", "eth0"); err != nil {
		t.Fatal(err)
	}
	n.configured()
	await.Until(t, "everything is as it was", func() error {
		if diff := cmp.Diff(before, look()); diff != "" {
			return fmt.Errorf("(-before +after):\n%s", diff)
		}
		return nil
	})
	removed := n.log.lines("Removing foreign", "proto: 77")
	hops := n.log.lines("Removing foreign nexthop", "gw: 10.1.0.12")
	t.Logf("systemd %d removes %d routes and %d next hops of routerd when it configures the uplink again; put back: %d", version, len(removed), len(hops), len(touched()))
	if len(removed) > 0 {
		t.Errorf("networkd removes routes although it was told not to:\n%s", strings.Join(removed, "\n"))
	}
	// Version 256 can be told about next hops.
	if version >= 256 && len(hops) > 0 {
		t.Errorf("networkd removes next hops although it was told not to:\n%s", strings.Join(hops, "\n"))
	}
	if len(hops) > 0 && len(touched()) == 0 {
		t.Error("nothing is told of it")
	}
}
