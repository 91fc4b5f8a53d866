package runtimes

import (
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// capabilities are what the image's daemon is given, of what configs/systemd/routerd.service explains; runtimes that
// name a namespace by a process want SYS_PTRACE too.
func capabilities() []string {
	return []string{"CAP_NET_ADMIN", "CAP_NET_RAW", "CAP_NET_BIND_SERVICE", "CAP_SYS_ADMIN"}
}

// sysctls is where the daemon has the kernel's settings in a container, in which /proc/sys is read-only.
const sysctls = "/host/proc/sys"

// buildDaemon builds the image of the daemon as `make image` does.
func (h *host) buildDaemon() {
	h.t.Helper()
	file, err := filepath.Abs("../../configs/image/Containerfile")
	if err != nil {
		h.t.Fatal(err)
	}
	podman, env := h.podman()
	h.must(env, append(podman, "build", "--quiet", "--tag", "routerd:test", "--file", file, h.bin)...)
}

// mounts are the host's directories that the image's daemon needs, and where it has them.
func (h *host) mounts() map[string]string {
	return map[string]string{
		filepath.Join(h.dir, "run"): "/run/routerd", filepath.Join(h.dir, "state"): "/var/lib/routerd", "/run/netns": "/run/netns", "/proc/sys/net": sysctls + "/net",
	}
}

// served expects that the daemon attaches a pod whose namespace is younger than itself, and detaches it.
func (h *host) served() {
	h.t.Helper()
	h.awaitReady()
	tool, cache := cnitool(h.t), []string{"HOME=" + h.dir}
	pod := h.pod("served")
	addr := parseResult(h.t, h.must(cache, tool, "add", "rtnet", pod)).IPs[0].Address.Addr()
	h.reachable(addr.String())
	h.must(cache, tool, "check", "rtnet", pod)
	h.must(cache, tool, "del", "rtnet", pod)
	h.nothingLeft()
}

// expectCapabilities compares what a process may do with what it was given.
func (h *host) expectCapabilities(pid string) {
	h.t.Helper()
	m := regexp.MustCompile(`(?m)^CapEff:\s*([0-9a-f]+)$`).FindStringSubmatch(h.must(nil, "cat", "/proc/"+pid+"/status"))
	if m == nil {
		h.t.Fatalf("no capabilities of process %s", pid)
	}
	if m[1] != "0000000000203400" { // SYS_ADMIN (21), NET_RAW (13), NET_ADMIN (12), NET_BIND_SERVICE (10): capabilities(7)
		h.t.Errorf("the daemon has the capabilities %s", m[1])
	}
}

// TestImage runs the daemon's image by podman and by containerd, each with a file system that is read-only, the
// default system calls and as few capabilities as it needs.
func TestImage(t *testing.T) {
	t.Parallel()
	for name, run := range map[string]func(*host) (pid string){
		"podman": func(h *host) string {
			podman, env := h.podman()
			args := append(podman, "run", "--detach", "--name", "routerd", "--network", "host", "--read-only", "--cap-drop", "all", "--env", "ROUTERD_DATAPLANE_SYSCTLDIR="+sysctls)
			for _, c := range capabilities() {
				args = append(args, "--cap-add", c)
			}
			for from, to := range h.mounts() {
				args = append(args, "--volume", from+":"+to+":rslave")
			}
			h.must(env, append(args, "routerd:test", "run", "--node-name", "image")...)
			h.t.Cleanup(func() {
				if h.t.Failed() {
					out, err := h.run(env, append(slices.Clip(podman), "logs", "routerd")...)
					h.t.Logf("log of the daemon (%v):\n%s", err, out)
				}
				h.must(env, append(slices.Clip(podman), "rm", "--force", "--time", "10", "routerd")...)
			})
			return strings.TrimSpace(h.must(env, append(slices.Clip(podman), "inspect", "--format", "{{.State.Pid}}", "routerd")...))
		},
		"containerd": func(h *host) string {
			podman, env := h.podman()
			archive := filepath.Join(h.dir, "image.tar")
			h.must(env, append(podman, "save", "--quiet", "--format", "docker-archive", "--output", archive, "routerd:test")...)
			ctr := h.containerd()
			h.must(nil, append(ctr, "image", "import", "--snapshotter", "native", archive)...)
			args := append(ctr, "run", "--detach", "--snapshotter", "native", "--net-host", "--read-only", "--seccomp", "--runc-root", h.runcDir(), "--env", "ROUTERD_DATAPLANE_SYSCTLDIR="+sysctls)
			for _, c := range []string{ // of ctr's
				"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FSETID", "CAP_FOWNER", "CAP_MKNOD", "CAP_SETGID", "CAP_SETUID", "CAP_SETFCAP", "CAP_SETPCAP", "CAP_SYS_CHROOT", "CAP_KILL", "CAP_AUDIT_WRITE",
			} {
				args = append(args, "--cap-drop", c)
			}
			for _, c := range capabilities() {
				args = append(args, "--cap-add", c)
			}
			for from, to := range h.mounts() {
				args = append(args, "--mount", "type=bind,src="+from+",dst="+to+",options=rbind:rslave:rw")
			}
			image := strings.TrimSpace(h.must(nil, append(ctr, "image", "ls", "-q")...))
			h.must(nil, append(args, image, "routerd", "routerd", "run", "--node-name", "image")...)
			h.t.Cleanup(func() { _, _ = h.run(nil, append(ctr, "task", "kill", "--signal", "9", "routerd")...) })
			m := regexp.MustCompile(`(?m)^routerd\s+(\d+)\s`).FindStringSubmatch(h.must(nil, append(ctr, "task", "ls")...))
			if m == nil {
				h.t.Fatal("containerd has no task routerd")
			}
			return m[1]
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newBareHost(t, "image-"+name)
			for dir := range h.mounts() {
				if strings.HasPrefix(dir, h.dir) {
					h.must(nil, "mkdir", "-p", dir)
				}
			}
			h.pid = h.viewed("sleep", "infinity")
			h.buildDaemon()
			pid := run(h)
			h.served()
			h.expectCapabilities(pid)
		})
	}
}
