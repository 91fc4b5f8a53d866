package vm

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

//go:embed init.sh
var initScript []byte

//go:embed command.sh
var commandRunner []byte

//go:embed modprobe.sh
var modprobeScript []byte

// recipe changes whenever the code below builds another base from the same
// inputs, so that an old one in the cache is not taken for the new.
const recipe = "4"

// tools are the host's programs that scenarios call in the machine. The
// machine's busybox has the rest.
func tools() []string {
	return []string{
		"bird", "birdc", "bridge", "dash", "etcdctl", "ip", "nft", "ping", "ss", "tc", "tcpdump",
		// networkd restarted beside routerd, in a mount namespace with a bus.
		"/lib/systemd/systemd-networkd", "networkctl", "dbus-daemon", "mount", "nsenter", "unshare",
	}
}

// busFiles are the configuration of the system bus, and who may say what on it.
func busFiles() []string {
	return []string{"/usr/share/dbus-1/system.conf", "/usr/share/dbus-1/system.d/org.freedesktop.network1.conf"}
}

// passwd has the users that tools change to: tcpdump gives up root when it can.
const (
	passwd = "root:x:0:0:root:/root:/bin/sh\ntcpdump:x:104:104::/nonexistent:/bin/false\nbird:x:105:105::/run/bird:/bin/false\n" +
		"messagebus:x:106:106::/nonexistent:/bin/false\nsystemd-network:x:107:107::/nonexistent:/bin/false\nnobody:x:65534:65534::/nonexistent:/bin/false\n"
	group = "root:x:0:\ntcpdump:x:104:\nbird:x:105:\nmessagebus:x:106:\nsystemd-network:x:107:\nnogroup:x:65534:\n"
	hosts = "127.0.0.1 localhost vm\n::1 localhost\n"
)

// image is what a machine starts from. The base is open, so that a run which
// rebuilds the cache meanwhile takes nothing away.
type image struct {
	kernel kernel
	base   *os.File
	more   []File // beside it
}

// prepare returns the kernel and the base initramfs, from the cache where they
// are there.
func prepare(ctx context.Context, cfg Config) (image, error) {
	progress := cfg.Progress
	// Tools run in directories of their own, where a relative path is another.
	cache, err := filepath.Abs(cfg.Cache)
	if err != nil {
		return image{}, err
	}
	// Another kernel has a cache of its own, down to the base image.
	cache = filepath.Join(cache, cfg.Kernel)
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return image{}, err
	}
	unlock, err := lock(ctx, cache)
	if err != nil {
		return image{}, err
	}
	defer unlock()
	k, err := fetchKernel(ctx, cache, cfg.Kernel, progress)
	if err != nil {
		return image{}, err
	}
	var more []File
	for _, name := range cfg.Packages {
		root, commands, err := fetchProgram(ctx, cache, name, progress)
		if err != nil {
			return image{}, err
		}
		more = append(more, File{root, path.Join(programs, name)}, File{commands, "/usr/local/bin"})
	}
	added, err := toolFiles(ctx, cfg.Tools)
	if err != nil {
		return image{}, err
	}
	for _, f := range added {
		more = append(more, File{f, f})
	}
	files, err := toolFiles(ctx, append(tools(), "busybox"))
	if err != nil {
		return image{}, err
	}
	key, err := baseKey(k, files)
	if err != nil {
		return image{}, err
	}
	name := filepath.Join(cache, "base-"+key+".cpio")
	base, err := os.Open(name)
	if errors.Is(err, os.ErrNotExist) {
		start := time.Now()
		if err := buildBase(ctx, cache, name, k, files); err != nil {
			return image{}, fmt.Errorf("build the machine's initramfs: %w", err)
		}
		fmt.Fprintf(progress, "vm: built the base image in %.1fs\n", time.Since(start).Seconds())
		base, err = os.Open(name)
	}
	if err != nil {
		return image{}, err
	}
	return image{kernel: k, base: base, more: more}, nil
}

// toolFiles returns the host files that tools need: themselves, their
// libraries and the loader, each under the path by which it is asked for.
func toolFiles(ctx context.Context, tools []string) ([]string, error) {
	set := map[string]bool{}
	for _, t := range tools {
		p, err := exec.LookPath(t)
		if err != nil {
			return nil, fmt.Errorf("the test machine needs %s from this host (make deps installs it): %w", t, err)
		}
		set[p] = true
		// ldd fails for a static program, and says so; libraries that are
		// missing show up as a line with "not found".
		out, err := output(ctx, "", "ldd", p)
		if err != nil && !strings.Contains(err.Error(), "not a dynamic executable") {
			return nil, err
		}
		libs, err := parseLdd(out)
		if err != nil {
			return nil, fmt.Errorf("libraries of %s: %w", p, err)
		}
		for _, l := range libs {
			set[l] = true
		}
	}
	var files []string
	for f := range set {
		files = append(files, f)
	}
	slices.Sort(files)
	return files, nil
}

// parseLdd returns the paths in the output of ldd(1): "name => path (address)"
// and "path (address)".
func parseLdd(out []byte) ([]string, error) {
	var libs []string
	sc := bufio.NewScanner(bytes.NewReader(out))
	for sc.Scan() {
		line := strings.TrimSpace(sc.Text())
		if name, rest, ok := strings.Cut(line, " => "); ok {
			if strings.HasPrefix(rest, "not found") {
				return nil, fmt.Errorf("library %s is not on this host", name)
			}
			line = rest
		}
		p, _, _ := strings.Cut(line, " ")
		if strings.HasPrefix(p, "/") {
			libs = append(libs, p)
		}
	}
	return libs, sc.Err()
}

// baseKey identifies what goes into the base: a changed tool, kernel or script
// gives another key.
func baseKey(k kernel, files []string) (string, error) {
	h := sha256.New()
	fmt.Fprintf(h, "%s\n%s\n%q\n%s\n%s\n%s\n%q\n", recipe, k.release, moduleRoots(), initScript, commandRunner, modprobeScript, passwd+group+hosts)
	for _, f := range files {
		st, err := os.Stat(f)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(h, "%s %d %d\n", f, st.Size(), st.ModTime().UnixNano())
	}
	return hex.EncodeToString(h.Sum(nil))[:16], nil
}

func buildBase(ctx context.Context, cache, name string, k kernel, files []string) error {
	old, err := filepath.Glob(filepath.Join(cache, "base-*.cpio"))
	if err != nil {
		return err
	}
	tmp, err := os.CreateTemp(cache, "build-")
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name())
	defer tmp.Close()
	a := newArchive(tmp)
	a.bytes("/init", 0o755, initScript)
	a.bytes("/etc/vm/run", 0o755, commandRunner)
	for _, d := range []string{"/proc", "/sys", "/dev", "/run", "/tmp", "/var", "/root", "/etc", "/etc/systemd"} {
		a.mkdir(d)
	}
	a.bytes("/etc/passwd", 0o644, []byte(passwd))
	a.bytes("/etc/group", 0o644, []byte(group))
	a.bytes("/etc/hosts", 0o644, []byte(hosts))
	a.bytes("/etc/nsswitch.conf", 0o644, []byte("passwd: files\ngroup: files\nhosts: files\n"))
	for _, f := range append(files, busFiles()...) {
		a.file(f, f)
	}
	if err := addBusybox(ctx, a); err != nil {
		return err
	}
	// The names of protocols and tables, where this release of iproute2 has
	// them.
	for _, d := range []string{"/etc/iproute2", "/usr/share/iproute2"} {
		if _, err := os.Stat(d); err == nil {
			a.tree(d, d)
		}
	}
	if err := addModules(a, k); err != nil {
		return err
	}
	if err := errors.Join(a.Close(), tmp.Close()); err != nil {
		return err
	}
	if err := os.Rename(tmp.Name(), name); err != nil {
		return err
	}
	for _, f := range old {
		if err := os.Remove(f); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

// addBusybox puts busybox behind every name in /bin that no tool of the host
// takes; /bin comes last in the machine's PATH.
func addBusybox(ctx context.Context, a *archive) error {
	host, err := exec.LookPath("busybox")
	if err != nil {
		return err
	}
	if libs, err := output(ctx, "", "ldd", host); err == nil && len(libs) > 0 {
		return fmt.Errorf("%s needs libraries: the machine's first process must not (install busybox-static)", host)
	}
	a.file("/bin/busybox", host)
	applets, err := output(ctx, "", host, "--list")
	if err != nil {
		return err
	}
	// Busybox's own shell would run its applets in place of the host's ip and
	// ping whatever PATH says.
	dash, err := exec.LookPath("dash")
	if err != nil {
		return err
	}
	a.symlink("/bin/dash", dash) // no effect where that is its very path
	a.symlink("/bin/sh", dash)
	for name := range strings.FieldsSeq(string(applets)) {
		a.symlink(path.Join("/bin", name), "busybox")
	}
	// The kernel itself calls this path when it looks for a module.
	a.bytes("/sbin/modprobe", 0o755, modprobeScript)
	return nil
}

func addModules(a *archive, k kernel) error {
	dep, err := os.Open(filepath.Join(k.modules(), "modules.dep"))
	if err != nil {
		return err
	}
	defer dep.Close()
	builtin, err := os.ReadFile(filepath.Join(k.modules(), "modules.builtin"))
	if err != nil {
		return err
	}
	mods, err := moduleClosure(dep, strings.Fields(string(builtin)), moduleRoots())
	if err != nil {
		return err
	}
	root := path.Join("/lib/modules", k.release)
	for _, m := range mods {
		a.file(path.Join(root, m), filepath.Join(k.modules(), m))
	}
	// The indexes name modules that are not here, which does no harm: modprobe
	// reads them by name.
	for _, f := range []string{"modules.dep", "modules.alias", "modules.symbols", "modules.builtin", "modules.softdep"} {
		a.file(path.Join(root, f), filepath.Join(k.modules(), f))
	}
	return nil
}
