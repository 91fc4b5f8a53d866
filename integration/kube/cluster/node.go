package cluster

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/routerd/routerd/dataplane"
)

// Node is a node of the cluster: a network, a mount and a UTS namespace in which a
// containerd, a kubelet and a kube-proxy run.
type Node struct {
	Name string
	Rack int // two nodes each; between racks packets are routed

	number                  int // from 1
	c                       *Cluster
	dir                     string
	holder                  *program // whose namespaces the others enter
	runtime, kubelet, proxy *program
}

// mounts gives the node its view of the files, in a mount namespace of its own, and
// stays. Its directory is $0, its name $1.
//
//   - The runtime's overlays, and what the kubelet measures, are on no overlay.
//   - The settings that the kubelet makes for the whole machine go to files.
const mounts = `set -eu
mount --make-rprivate /
for d in etc opt var; do
	mkdir -p "$0/$d.upper" "$0/$d.work"
	mount -t overlay -o "lowerdir=/$d,upperdir=$0/$d.upper,workdir=$0/$d.work" overlay "/$d"
done
mount -t tmpfs tmpfs /run
mkdir -p /run/netns /run/lock
rm -rf /etc/cni /opt/cni /etc/kubernetes
for d in containerd containers kubelet; do
	mkdir -p "$0/$d" "/var/lib/$d"
	mount --bind "$0/$d" "/var/lib/$d"
done
mkdir -p /etc/kubernetes/manifests
for s in vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops kernel/keys/root_maxkeys kernel/keys/root_maxbytes; do
	file="$0/$(echo $s | tr / .)"
	cat "/proc/sys/$s" >"$file"
	mount --bind "$file" "/proc/sys/$s"
done
echo "$2" >/etc/machine-id
echo "$1" >/etc/hostname
hostname "$1"
mount --make-rshared /
exec sleep infinity
`

// kubeletConfig is completed by the cgroup below which the pods are.
const kubeletConfig = `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
cgroupDriver: cgroupfs
cgroupRoot: /%s
failCgroupV1: false
failSwapOn: false
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
staticPodPath: /etc/kubernetes/manifests
resolvConf: ""
makeIPTablesUtilChains: false
enforceNodeAllocatable: []
evictionHard: {memory.available: 50Mi, nodefs.available: 1%%, nodefs.inodesFree: 1%%, imagefs.available: 1%%}
imageGCHighThresholdPercent: 100
localStorageCapacityIsolation: false
`

// startNode makes a node and returns when its kubelet runs. The node is ready when
// its network is.
func (c *Cluster) startNode(ctx context.Context, n *Node) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("start %s: %w", n.Name, err)
		}
	}()
	if err := os.MkdirAll(n.dir, 0o755); err != nil {
		return err
	}
	if err := c.connect(ctx, n); err != nil {
		return err
	}
	machineID := fmt.Sprintf("%032x", n.number)
	holder := exec.Command("nsenter", "--net=/run/netns/"+n.Name, "--", "unshare", "--mount", "--uts", "--propagation", "slave",
		"sh", "-c", mounts, n.dir, n.Name, machineID)
	if n.holder, err = start(filepath.Join(n.dir, "mounts.log"), holder); err != nil {
		return err
	}
	err = poll(ctx, "its mounts", func() error {
		_, err := output(n.Command(ctx, "sh", "-c", `grep -q "^`+machineID+`" /etc/machine-id && test "$(hostname)" = `+n.Name))
		return err
	}, n.holder)
	if err != nil {
		return err
	}
	if err := MakeCgroup(n.cgroup()); err != nil {
		return err
	}
	kubelet := fmt.Sprintf(kubeletConfig, n.cgroup())
	if c.conf.DNS {
		kubelet += c.dnsKubelet()
	}
	if slices.Contains(c.conf.Families, dataplane.IPv6) {
		kubelet += "address: \"::\"\n" // by default those of IPv4
	}
	for name, text := range map[string]string{
		"runtime.toml": c.runtime.config,
		"kubelet.yaml": kubelet,
		"kubelet.conf": c.kubeconfig(kubeletToken(n.Name)),
		"proxy.conf":   c.kubeconfig(proxyToken),
	} {
		if err := os.WriteFile(filepath.Join(n.dir, name), []byte(text), 0o600); err != nil {
			return err
		}
	}
	if c.runtime.prepare != "" {
		if _, err := n.Output(ctx, "sh", "-c", c.runtime.prepare); err != nil {
			return err
		}
	}
	if err := n.StartRuntime(ctx); err != nil {
		return err
	}
	if err := n.importImages(ctx, c.images()); err != nil {
		return err
	}
	if err := n.StartProxy(); err != nil {
		return err
	}
	return n.StartKubelet()
}

func (n *Node) importImages(ctx context.Context, archive string) error {
	_, err := n.Output(ctx, append(slices.Clone(n.c.runtime.imports), archive)...)
	return err
}

func (n *Node) cgroup() string { return n.c.conf.Name + "/" + n.Name }

// addr is the node's address in a family.
func (n *Node) addr(f family) netip.Addr { return f.host(n.Rack, 10+n.number) }

// Command is a program on the node.
func (n *Node) Command(ctx context.Context, args ...string) *exec.Cmd {
	pid := n.holder.cmd.Process.Pid
	enter := []string{fmt.Sprintf("--mount=/proc/%d/ns/mnt", pid), fmt.Sprintf("--net=/proc/%d/ns/net", pid), fmt.Sprintf("--uts=/proc/%d/ns/uts", pid), "--"}
	cmd := exec.CommandContext(ctx, "nsenter", append(enter, args...)...)
	cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/"}
	return cmd
}

// Path is where this process finds a file of the node.
func (n *Node) Path(path string) string {
	return filepath.Join(fmt.Sprintf("/proc/%d/root", n.holder.cmd.Process.Pid), path)
}

// Output runs a program on the node and returns what it printed.
func (n *Node) Output(ctx context.Context, args ...string) (string, error) {
	return output(n.Command(ctx, args...))
}

// background starts a program that stays, on the node.
func (n *Node) background(name string, args ...string) (*program, error) {
	return start(n.Log(name), n.Command(context.Background(), args...))
}

// Background starts a program that stays, on the node, with a log of its name. stop ends it by SIGTERM,
// and is to be called before the node ends.
func (n *Node) Background(name string, args ...string) (stop func(), err error) {
	p, err := n.background(name, args...)
	if err != nil {
		return nil, err
	}
	return func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		p.stop(ctx)
	}, nil
}

// Log is the file of what a program of the node wrote: "kubelet", "containerd",
// "kube-proxy", or one of [Node.Background].
func (n *Node) Log(program string) string { return filepath.Join(n.dir, program+".log") }

// StartRuntime starts the runtime and returns when it answers.
func (n *Node) StartRuntime(ctx context.Context) (err error) {
	n.runtime, err = n.background("runtime", append(slices.Clone(n.c.runtime.program), "--config", filepath.Join(n.dir, "runtime.toml"))...)
	if err != nil {
		return err
	}
	return poll(ctx, "the runtime answers", func() error {
		_, err := n.Output(ctx, n.c.runtime.answers...)
		return err
	}, n.runtime)
}

// StopRuntime ends the runtime. The pods stay.
func (n *Node) StopRuntime(ctx context.Context) { n.runtime.stop(ctx) }

// PauseContainer has the processes of a container do nothing until it is resumed.
func (n *Node) PauseContainer(ctx context.Context, id string) error {
	_, err := n.Output(ctx, "runc", "--root", n.c.runtime.runc, "pause", id)
	return err
}

// ResumeContainer undoes [Node.PauseContainer].
func (n *Node) ResumeContainer(ctx context.Context, id string) error {
	_, err := n.Output(ctx, "runc", "--root", n.c.runtime.runc, "resume", id)
	return err
}

// StartKubelet starts the kubelet.
func (n *Node) StartKubelet() (err error) {
	n.kubelet, err = n.background("kubelet", filepath.Join(n.c.conf.KubeBin, "kubelet"),
		"--config="+filepath.Join(n.dir, "kubelet.yaml"), "--kubeconfig="+filepath.Join(n.dir, "kubelet.conf"),
		"--hostname-override="+n.Name, "--node-ip="+n.c.each(func(f family) string { return n.addr(f).String() }),
		fmt.Sprintf("--node-labels=topology.kubernetes.io/zone=rack%d", n.Rack))
	return err
}

// StopKubelet ends the kubelet. The pods stay.
func (n *Node) StopKubelet(ctx context.Context) { n.kubelet.stop(ctx) }

// StartProxy starts kube-proxy.
func (n *Node) StartProxy() (err error) {
	n.proxy, err = n.background("kube-proxy", filepath.Join(n.c.conf.KubeBin, "kube-proxy"),
		"--proxy-mode="+n.c.conf.ProxyMode, "--kubeconfig="+filepath.Join(n.dir, "proxy.conf"), "--hostname-override="+n.Name,
		"--cluster-cidr="+n.c.each(func(f family) string { return f.pods }), "--metrics-bind-address=127.0.0.1:10249",
		// Settings of the machine, which no namespace has for itself.
		"--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0")
	return err
}

// StopProxy ends kube-proxy, and takes away what it did.
func (n *Node) StopProxy(ctx context.Context) error {
	n.proxy.stop(ctx)
	_, err := n.Output(ctx, filepath.Join(n.c.conf.KubeBin, "kube-proxy"), "--cleanup", "--proxy-mode="+n.c.conf.ProxyMode)
	return err
}

// stop ends the node's programs, the pods with them.
func (n *Node) stop(ctx context.Context) {
	for _, p := range []*program{n.kubelet, n.proxy, n.runtime, n.holder} {
		if p != nil {
			ctx, cancel := context.WithTimeout(ctx, time.Second)
			p.stop(ctx)
			cancel()
		}
	}
}

// connect makes the node's network namespace and wires it to its rack, whose gateway
// is the router.
func (c *Cluster) connect(ctx context.Context, n *Node) error {
	rack := fmt.Sprintf("rack%d", n.Rack)
	commands := []string{
		"netns add " + n.Name,
		"link add " + n.Name + " type veth peer name eth0 netns " + n.Name,
		"link set " + n.Name + " master " + rack + " up",
		"-n " + n.Name + " link set lo up",
		"-n " + n.Name + " link set eth0 up",
	}
	for _, f := range c.families {
		commands = append(commands, "-n "+n.Name+" addr add "+f.added(n.Rack, 10+n.number, "eth0"),
			"-n "+n.Name+" route add default via "+f.host(n.Rack, 1).String())
	}
	return ip(ctx, commands...)
}

// ip runs ip(8) with each line of arguments.
func ip(ctx context.Context, lines ...string) error {
	for _, line := range lines {
		if _, err := output(exec.CommandContext(ctx, "ip", strings.Fields(line)...)); err != nil {
			return err
		}
	}
	return nil
}
