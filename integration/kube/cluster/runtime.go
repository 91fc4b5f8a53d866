package cluster

import (
	"fmt"
	"path/filepath"
)

// Runtime is what runs a node's containers.
type Runtime string

// Containerd as Debian has it, which is 1.6 and knows CNI up to 1.0.0; containerd 2, which has CNI 1.1 and asks
// STATUS, built by "make kube-runtime"; and CRI-O, which sends GC, built by "make kube-crio".
const (
	Containerd1 Runtime = "containerd"
	Containerd2 Runtime = "containerd2"
	CRIO        Runtime = "crio"
)

func (r Runtime) check() error {
	switch r {
	case Containerd1, Containerd2, CRIO:
		return nil
	}
	return fmt.Errorf("runtime %q: want %s, %s or %s", r, Containerd1, Containerd2, CRIO)
}

// runtimeSocket is where a node's runtime answers, whichever it is.
const runtimeSocket = "/run/containerd/containerd.sock"

// runtimeOf is how a runtime is used on a node.
type runtimeOf struct {
	program []string // to which its configuration is added
	config  string
	prepare string   // a shell's script that is run before it
	answers []string // a command that succeeds once it answers
	imports []string // a command to which an archive of images is added
	runc    string   // where its runc has the state of containers
}

func (c *Cluster) runtimeOf() runtimeOf {
	built := func(program string) string { return filepath.Join(c.conf.KubeBin, program) }
	if c.conf.Runtime == CRIO {
		return runtimeOf{
			program: []string{built("crio"), "--config-dir", ""},
			config:  fmt.Sprintf(crioConfig, built("pinns")),
			prepare: crioPrepare,
			answers: []string{built("crio"), "status", "--socket", runtimeSocket, "info"},
			imports: []string{"podman", "load", "--quiet", "--input"},
			runc:    "/run/runc",
		}
	}
	r := runtimeOf{
		program: []string{"containerd"}, config: containerdConfig,
		answers: []string{"ctr", "version"}, imports: []string{"ctr", "--namespace", "k8s.io", "images", "import"},
		runc: "/run/containerd/runc/k8s.io",
	}
	if c.conf.Runtime == Containerd2 {
		r.program, r.config = []string{built("containerd")}, fmt.Sprintf(containerd2Config, built("containerd-shim-runc-v2"))
	}
	return r
}

const containerdConfig = `version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.aufs"]
[grpc]
address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "` + pauseImage + `"
# Without CAP_SYS_RESOURCE runc ends without a word where a score is to be lowered.
restrict_oom_score_adj = true
disable_apparmor = true
stream_server_address = "127.0.0.1"
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "overlayfs"
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/opt/cni/bin"
conf_dir = "/etc/cni/net.d"
`

// containerd2Config is the same for containerd 2. It is completed by the path of the shim, which is looked for
// in $PATH first, where Debian's is.
const containerd2Config = `version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.nri.v1.nri", "io.containerd.snapshotter.v1.blockfile", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.erofs", "io.containerd.snapshotter.v1.zfs"]
[grpc]
address = "/run/containerd/containerd.sock"
[plugins."io.containerd.cri.v1.images"]
snapshotter = "overlayfs"
[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "` + pauseImage + `"
[plugins."io.containerd.cri.v1.runtime"]
restrict_oom_score_adj = true
disable_apparmor = true
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
runtime_path = %q
[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["/opt/cni/bin"]
conf_dir = "/etc/cni/net.d"
[plugins."io.containerd.grpc.v1.cri"]
stream_server_address = "127.0.0.1"
`

// crioConfig is completed by the path of pinns.
const crioConfig = `[crio]
root = "/var/lib/containers/storage"
runroot = "/run/containers/storage"
storage_driver = "overlay"
version_file = "/run/crio/version"
clean_shutdown_file = ""
[crio.api]
listen = "` + runtimeSocket + `"
stream_address = "127.0.0.1"
[crio.runtime]
cgroup_manager = "cgroupfs"
conmon_cgroup = "pod"
apparmor_profile = "unconfined"
selinux = false
pinns_path = %q
default_runtime = "runc"
[crio.runtime.runtimes.runc]
runtime_path = "/opt/runc"
runtime_root = "/run/runc"
monitor_path = "/usr/bin/conmon"
monitor_cgroup = "pod"
[crio.image]
pause_image = "` + pauseImage + `"
signature_policy = "/etc/containers/policy.json"
[crio.network]
network_dir = "/etc/cni/net.d"
plugin_dirs = ["/opt/cni/bin"]
`

// crioPrepare makes what CRI-O runs as runc. It leaves out what CRI-O has no settings for: scores for the kernel's
// killer that take CAP_SYS_RESOURCE, and limits of huge pages, whose controller has no cgroup of the container in
// a hierarchy that is not the others' version. An image's name without a registry is Docker's, as other runtimes
// have it.
const crioPrepare = `set -eu
cat >/opt/runc <<'END'
#!/bin/sh
last=
for arg; do
	if [ "$last" = --bundle ]; then
		jq -c 'del(.process.oomScoreAdj, .linux.resources.hugepageLimits)' "$arg/config.json" >"$arg/config.new"
		mv "$arg/config.new" "$arg/config.json"
	fi
	last=$arg
done
exec runc "$@"
END
chmod +x /opt/runc
echo 'unqualified-search-registries = ["docker.io"]' >/etc/containers/registries.conf
rm -rf /etc/containers/registries.conf.d
`
