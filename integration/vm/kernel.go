package vm

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// metaPackage depends on the newest kernel of the release. The cloud flavour
// has the drivers of virtual machines only, which makes it small.
const metaPackage = "linux-image-cloud-amd64"

// kernelPackage matches the concrete package that metaPackage depends on.
var kernelPackage = regexp.MustCompile(`(?m)^\s*Depends:\s*(linux-image-[0-9][a-z0-9.+-]*-cloud-amd64)\s*$`)

// moduleRoots are the modules that tests and routerd ask for, below the
// kernel/ directory of a module tree; what they depend on comes along. A name
// that ends in a slash takes all modules of that directory and below.
func moduleRoots() []string {
	return []string{
		"drivers/virtio/virtio_pci", "drivers/char/virtio_console",
		"drivers/net/dummy", "drivers/net/ifb", "drivers/net/macvlan", "drivers/net/tun",
		"drivers/net/veth", "drivers/net/vrf", "drivers/net/vxlan/vxlan",
		"net/ipv4/ipip", "net/ipv4/ip_gre", "net/ipv6/ip6_tunnel", "net/ipv6/sit",
		"net/bridge/bridge", "net/bridge/br_netfilter", "net/8021q/8021q",
		"net/ipv4/netfilter/", "net/ipv6/netfilter/", "net/netfilter/nf_", "net/netfilter/nft_",
		"net/netfilter/nfnetlink_log", "net/netfilter/xt_", "net/netfilter/ipset/", "net/netfilter/ipvs/ip_vs", "net/netfilter/ipvs/ip_vs_rr", "net/netfilter/x_tables", "net/sched/", "net/xfrm/xfrm_user", "net/packet/af_packet_diag", "net/sctp/sctp",
		"net/ipv4/inet_diag", "net/ipv4/tcp_diag", "net/ipv4/udp_diag", "net/unix/unix_diag",
	}
}

// kernel is an unpacked kernel package.
type kernel struct {
	dir     string // holds lib/modules/
	release string // as uname -r says in the machine
	image   string // path of what is started
}

func (k kernel) modules() string { return filepath.Join(k.dir, "lib", "modules", k.release) }

// openKernel finds the one kernel that an unpacked package holds.
func openKernel(dir string) (kernel, error) {
	images, err := filepath.Glob(filepath.Join(dir, "boot", "vmlinuz-*"))
	beside, err2 := filepath.Glob(filepath.Join(dir, "lib", "modules", "*", "vmlinuz")) // since Linux 6.19
	if err := errors.Join(err, err2); err != nil {
		return kernel{}, err
	}
	if n := len(images) + len(beside); n != 1 {
		return kernel{}, fmt.Errorf("%d kernels in %s: want one", n, dir)
	}
	k := kernel{dir: dir}
	if len(images) == 1 {
		k.image, k.release = images[0], strings.TrimPrefix(filepath.Base(images[0]), "vmlinuz-")
	} else {
		k.image, k.release = beside[0], filepath.Base(filepath.Dir(beside[0]))
	}
	if _, err := os.Stat(filepath.Join(k.modules(), "modules.dep")); err != nil {
		return kernel{}, fmt.Errorf("kernel %s: %w", k.release, err)
	}
	return k, nil
}

// fetchKernel returns the cached kernel, or downloads and unpacks Debian's into
// the cache. Nothing is installed. which is as in [Config.Kernel].
func fetchKernel(ctx context.Context, cache, which string, progress io.Writer) (kernel, error) {
	dir := filepath.Join(cache, "kernel")
	if _, err := os.Stat(dir); err == nil {
		return openKernel(dir)
	} else if !errors.Is(err, fs.ErrNotExist) {
		return kernel{}, err
	}
	if runtime.GOARCH != "amd64" {
		return kernel{}, fmt.Errorf("the test machine is built for amd64 and this is %s", runtime.GOARCH)
	}
	tmp, err := os.MkdirTemp(cache, "fetch-")
	if err != nil {
		return kernel{}, err
	}
	defer os.RemoveAll(tmp)
	root := filepath.Join(tmp, "root")
	fetch := fetchRelease
	if which == Backports {
		fetch = fetchBackports
	}
	release, err := fetch(ctx, tmp, root, progress)
	if err != nil {
		return kernel{}, err
	}
	if _, err := output(ctx, tmp, "depmod", "-b", root, release); err != nil {
		return kernel{}, fmt.Errorf("index the modules of %s: %w", release, err)
	}
	if _, err := openKernel(root); err != nil {
		return kernel{}, err
	}
	// The rename comes last, so that a directory of this name is complete.
	if err := os.Rename(root, dir); err != nil {
		return kernel{}, err
	}
	return openKernel(dir)
}

// fetchRelease unpacks the kernel of this host's release below root, and returns its release.
func fetchRelease(ctx context.Context, tmp, root string, progress io.Writer) (string, error) {
	name, err := kernelPackageName(ctx, progress)
	if err != nil {
		return "", err
	}
	fmt.Fprintf(progress, "vm: downloading Debian's %s\n", name)
	// APT::Sandbox::User: as root apt drops to a user that may not write here.
	if _, err := output(ctx, tmp, "apt-get", "-o", "APT::Sandbox::User=root", "download", name); err != nil {
		return "", fmt.Errorf("download kernel package %s: %w", name, err)
	}
	debs, err := filepath.Glob(filepath.Join(tmp, "*.deb"))
	if err != nil {
		return "", err
	}
	if len(debs) != 1 {
		return "", fmt.Errorf("download kernel package %s: got %d files: want one", name, len(debs))
	}
	if _, err := output(ctx, tmp, "dpkg-deb", "-x", debs[0], root); err != nil {
		return "", fmt.Errorf("unpack kernel package %s: %w", name, err)
	}
	return strings.TrimPrefix(name, "linux-image-"), nil
}

// kernelPackageName asks apt for the concrete kernel package of this release.
func kernelPackageName(ctx context.Context, progress io.Writer) (string, error) {
	out, err := output(ctx, "", "apt-cache", "depends", metaPackage)
	m := kernelPackage.FindSubmatch(out)
	if err == nil && m == nil || err != nil && !errors.Is(err, exec.ErrNotFound) {
		fmt.Fprintf(progress, "vm: the package lists do not know %s: updating them\n", metaPackage)
		if _, err := output(ctx, "", "apt-get", "update"); err != nil {
			return "", fmt.Errorf("update the package lists: %w", err)
		}
		out, err = output(ctx, "", "apt-cache", "depends", metaPackage)
		m = kernelPackage.FindSubmatch(out)
	}
	if err != nil {
		return "", fmt.Errorf("look up %s: %w", metaPackage, err)
	}
	if m == nil {
		return "", fmt.Errorf("look up %s: no package source offers it: the test machine needs Debian's kernel", metaPackage)
	}
	return string(m[1]), nil
}

// output runs a tool and returns what it prints; its error carries what the
// tool said.
func output(ctx context.Context, dir, name string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "LC_ALL=C", "DEBIAN_FRONTEND=noninteractive")
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		if msg := strings.TrimSpace(stderr.String()); msg != "" {
			return stdout.Bytes(), fmt.Errorf("%s: %w: %s", name, err, msg)
		}
		return stdout.Bytes(), fmt.Errorf("%s: %w", name, err)
	}
	return stdout.Bytes(), nil
}

// moduleClosure returns the modules that roots name and all that these depend
// on, sorted, as paths relative to the module tree. dep is the contents of
// modules.dep (see depmod(8)): lines of "module: dependency …". What is in builtin is part of the kernel itself.
func moduleClosure(dep io.Reader, builtin, roots []string) ([]string, error) {
	deps := map[string][]string{}
	sc := bufio.NewScanner(dep)
	sc.Buffer(nil, 1<<20)
	for sc.Scan() {
		mod, rest, ok := strings.Cut(sc.Text(), ":")
		if !ok {
			return nil, fmt.Errorf("modules.dep: line %q has no colon", sc.Text())
		}
		deps[mod] = strings.Fields(rest)
	}
	if err := sc.Err(); err != nil {
		return nil, fmt.Errorf("read modules.dep: %w", err)
	}
	want := map[string]bool{}
	for _, root := range roots {
		found := false
		for mod, needs := range deps {
			if !moduleMatches(mod, root) {
				continue
			}
			found = true
			want[mod] = true
			for _, d := range needs { // modules.dep lists them transitively
				want[d] = true
			}
		}
		if !found && !slices.ContainsFunc(builtin, func(mod string) bool { return moduleMatches(mod, root) }) {
			return nil, fmt.Errorf("the kernel package has no module %s", root)
		}
	}
	out := make([]string, 0, len(want))
	for m := range want {
		out = append(out, m)
	}
	slices.Sort(out)
	return out, nil
}

// moduleMatches reports whether a module's path is the one that root names, or
// begins with root where root is a prefix (it ends in "/" or "_", or names a
// family of modules such as nfnetlink).
func moduleMatches(mod, root string) bool {
	rel := strings.TrimPrefix(mod, "kernel/")
	if strings.HasSuffix(root, "/") || strings.HasSuffix(root, "_") {
		return strings.HasPrefix(rel, root)
	}
	base, _, _ := strings.Cut(path.Base(rel), ".")
	return path.Join(path.Dir(rel), base) == root
}

// lock takes an exclusive lock on the cache directory, so that two runs do not
// build the same thing at once, and returns how to release it.
func lock(ctx context.Context, dir string) (func(), error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	// A blocking flock could not be interrupted by ctx.
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			f.Close()
			return nil, fmt.Errorf("lock %s: %w", dir, err)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			f.Close()
			return nil, fmt.Errorf("wait for another run that builds in %s: %w", dir, ctx.Err())
		}
	}
}
