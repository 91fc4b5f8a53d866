package packages

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/integration/await"
)

const (
	// What the stage has built of this tree, with two versions.
	built    = "/opt/packages"
	older    = "0.0.1"
	newer    = "0.0.2"
	confFile = "/etc/routerd/routerd.yaml"
	// drain is longer than TimeoutStopSec= of the unit.
	drain = "bgp: {drainOnStop: 18s}\n"
)

func deb(version string) string {
	return filepath.Join(built, version, "routerd_"+version+"_amd64.deb")
}

func rpm(version string) string {
	return filepath.Join(built, version, "routerd-"+version+"-1.x86_64.rpm")
}

// install installs a package on a host that has none. Nothing starts until the
// administrator says so.
func (h *host) install(command ...string) {
	h.t.Helper()
	h.run(command[0], command[1:]...)
	h.expectUnit(map[string]string{"LoadState": "loaded", "ActiveState": "inactive", "UnitFileState": "disabled"})
	h.write(confFile, drain)
	h.run("systemctl", "enable", "--now", "routerd")
	h.expectUnit(map[string]string{"Type": "notify", "ActiveState": "active", "SubState": "running", "UnitFileState": "enabled"})
}

// TestDeb takes the package through its life on a host that forwards packets all
// the time.
func TestDeb(t *testing.T) {
	h := newHost(t)
	h.install("dpkg", "-i", deb(older))
	if out := h.run("systemctl", "status", "--no-pager", "routerd"); !strings.Contains(out, "Active: active (running)") || !strings.Contains(out, "Status: \"") {
		h.t.Errorf("systemctl status says\n%s", out)
	}
	h.serve()
	h.version(older)

	h.restarts("upgrade", func() { h.run("dpkg", "-i", deb(newer)) })
	h.version(newer)
	h.restarts("downgrade", func() { h.run("dpkg", "-i", deb(older)) })
	h.version(older)
	h.restarts("systemctl restart", func() { h.run("systemctl", "restart", "routerd") })
	h.expectUnit(map[string]string{"NRestarts": "0"})
	h.restarts("kill -9", func() { h.run("systemctl", "kill", "-s", "KILL", "routerd") })
	h.expectUnit(map[string]string{"NRestarts": "1"})

	h.leaves("systemctl", "stop", "routerd")
	h.expectUnit(map[string]string{"ActiveState": "inactive", "Result": "success", "UnitFileState": "enabled"})
	h.run("systemctl", "start", "routerd")
	h.inService()

	h.leaves("dpkg", "--remove", "routerd")
	h.expectUnit(map[string]string{"LoadState": "not-found", "ActiveState": "inactive", "UnitFileState": ""})
	h.left("dpkg --remove",
		"/etc/NetworkManager/conf.d/routerd.conf", "/etc/iproute2/rt_protos.d/routerd.conf", "/etc/routerd",
		"/etc/systemd/network/10-routerd.network", "/etc/systemd/networkd.conf.d/routerd.conf", "/run/routerd", "/var/lib/routerd")
	if out := h.run("ip", "route", "show", h.pod.String()); !strings.Contains(out, "dev cali") {
		h.t.Errorf("the pod's route is not there any more: %q", out)
	}
	h.run("dpkg", "--purge", "routerd")
	h.left("dpkg --purge", "/run/routerd", "/var/lib/routerd")
}

// TestRPM is the same of the other package, short of what is about systemd alone.
// The database of this machine's rpm knows nothing of its shell: --nodeps.
func TestRPM(t *testing.T) {
	h := newHost(t)
	h.install("rpm", "-i", "--nodeps", rpm(older))
	h.serve()
	h.version(older)
	h.restarts("rpm -U", func() { h.run("rpm", "-U", "--nodeps", rpm(newer)) })
	h.version(newer)
	h.restarts("rpm -U --oldpackage", func() { h.run("rpm", "-U", "--nodeps", "--oldpackage", rpm(older)) })
	h.version(older)
	h.leaves("rpm", "-e", "routerd")
	h.expectUnit(map[string]string{"LoadState": "not-found", "ActiveState": "inactive", "UnitFileState": ""})
	h.left("rpm -e", "/etc/routerd", "/run/routerd", "/var/lib/routerd")
}

// TestPoweroff takes the host down while packets come until the end: the stop
// takes longer than the unit's TimeoutStopSec=, which the daemon has systemd
// extend, and then the routes are withdrawn all the same. It is the last test.
func TestPoweroff(t *testing.T) {
	h := newHost(t)
	h.install("dpkg", "-i", deb(newer))
	h.serve()
	// All but the very end, which would take the test with it.
	h.write("/run/systemd/system/systemd-poweroff.service.d/stay.conf", "[Unit]\nSuccessAction=none\n[Service]\nType=oneshot\nExecStart=/bin/true\n")
	h.run("systemctl", "daemon-reload")
	f := h.startFlow()
	h.tor.take()
	h.routes.take()
	h.run("systemctl", "poweroff", "--no-block")
	h.waitTor("poweroff", leaving)
	h.waitWithdrawn("poweroff")
	h.t.Logf("poweroff: %s", f.Stop())
	await.True(h.t, "the service ends", func() bool { return h.unit("ActiveState") == "inactive" })
	h.expectUnit(map[string]string{"Result": "success"})
}

// version expects the programs of a package, and the configuration of the
// administrator.
func (h *host) version(want string) {
	h.t.Helper()
	if out := h.run("routerctl", "version"); strings.Count(out, "v"+want) != 2 {
		h.t.Errorf("client and daemon are not both %s:\n%s", want, out)
	}
	if b, err := os.ReadFile(confFile); err != nil || string(b) != drain {
		h.t.Errorf("the configuration is not the administrator's any more: %v: %s", err, b)
	}
}

// leaves runs a command that stops the service for good. Up to the moment in
// which nobody sends any more, nothing is lost.
func (h *host) leaves(command ...string) {
	h.t.Helper()
	what := strings.Join(command, " ")
	h.tor.take()
	h.routes.take()
	f := h.startFlow()
	cmd := exec.CommandContext(h.t.Context(), command[0], command[1:]...)
	var out output
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		h.t.Fatal(err)
	}
	h.waitTor(what, leaving)
	h.more(f)
	h.expectUnit(map[string]string{"ActiveState": "deactivating"})
	h.endFlow(what, f)
	if r := h.torRoute(); !strings.Contains(r, "via "+hostAddr) {
		h.t.Errorf("%s: withdrawn while packets came: %s", what, r)
	}
	if err := cmd.Wait(); err != nil {
		h.t.Fatalf("%s: %v: %s", what, err, out.take())
	}
	h.waitWithdrawn(what)
	h.tor.take()
}

// left compares what there is of routerd in the file system.
func (h *host) left(after string, want ...string) {
	h.t.Helper()
	var got []string
	for _, root := range []string{"/etc", "/usr", "/lib", "/opt/cni", "/var", "/run"} {
		err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
			switch {
			case os.IsNotExist(err):
				return nil
			case err != nil:
				return err
			case strings.HasPrefix(p, "/var/lib/dpkg"), p == "/run/log":
				return fs.SkipDir
			case !strings.Contains(d.Name(), "routerd"):
				return nil
			}
			got = append(got, p)
			if d.IsDir() {
				return fs.SkipDir
			}
			return nil
		})
		if err != nil {
			h.t.Fatal(err)
		}
	}
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" {
		h.t.Errorf("after %s there is (-want +got):\n%s", after, diff)
	}
}
