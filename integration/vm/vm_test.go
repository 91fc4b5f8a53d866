package vm

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func TestArchiveIsReadByCpio(t *testing.T) {
	t.Parallel()
	src, dst := t.TempDir(), t.TempDir()
	write(t, filepath.Join(src, "tool"), "#!/bin/sh\n", 0o755)
	write(t, filepath.Join(src, "tree", "sub", "data"), "five\n", 0o600)
	if err := os.Symlink("sub/data", filepath.Join(src, "tree", "link")); err != nil {
		t.Fatal(err)
	}

	var buf bytes.Buffer
	a := newArchive(&buf)
	a.file("/usr/bin/tool", filepath.Join(src, "tool"))
	a.file("usr/bin/tool", filepath.Join(src, "tree", "sub", "data")) // the first one counts
	a.tree("/opt/tree", filepath.Join(src, "tree"))
	a.bytes("/etc/empty", 0o644, nil)
	a.symlink("/bin/tool", "/usr/bin/tool")
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if buf.Len()%512 != 0 {
		t.Errorf("the archive has %d bytes: another one cannot follow it", buf.Len())
	}

	cmd := exec.Command("busybox", "cpio", "-i", "-d")
	cmd.Dir, cmd.Stdin = dst, &buf
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("cpio: %v: %s", err, out)
	}
	want := map[string]string{
		"bin/tool":          "-> /usr/bin/tool",
		"etc/empty":         "-rw-r--r-- ",
		"opt/tree/link":     "-> sub/data",
		"opt/tree/sub/data": "-rw------- five\n",
		"usr/bin/tool":      "-rwxr-xr-x #!/bin/sh\n",
	}
	if diff := cmp.Diff(want, list(t, dst)); diff != "" {
		t.Errorf("unpacked tree (-want +got):\n%s", diff)
	}
}

func TestArchiveReportsWhatItCannotPack(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for name, c := range map[string]struct{ host, want string }{
		"missing":   {filepath.Join(dir, "none"), "no such file"},
		"a device":  {"/dev/null", "neither a regular file nor a directory"},
		"in a tree": {filepath.Join(dir, "none", "x"), "no such file"},
	} {
		a := newArchive(&bytes.Buffer{})
		a.tree("/x", c.host)
		if err := a.Close(); err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), c.host) {
			t.Errorf("%s: error %v: want one that names %s and says %q", name, err, c.host, c.want)
		}
	}
}

func TestModuleClosure(t *testing.T) {
	t.Parallel()
	const dep = `kernel/net/ipv4/ipip.ko: kernel/net/ipv4/ip_tunnel.ko kernel/net/ipv4/tunnel4.ko
kernel/net/ipv4/ip_tunnel.ko:
kernel/net/ipv4/tunnel4.ko:
kernel/net/ipv4/ipip_other.ko:
kernel/net/netfilter/nft_ct.ko.zst: kernel/lib/libcrc32c.ko
kernel/net/netfilter/xt_set.ko:
kernel/net/sched/sch_netem.ko:
kernel/lib/libcrc32c.ko:
`
	for name, c := range map[string]struct {
		roots   []string
		want    []string
		wantErr string
	}{
		"one and what it needs": {
			roots: []string{"net/ipv4/ipip"},
			want:  []string{"kernel/net/ipv4/ip_tunnel.ko", "kernel/net/ipv4/ipip.ko", "kernel/net/ipv4/tunnel4.ko"},
		},
		"a family, compressed": {
			roots: []string{"net/netfilter/nft_"},
			want:  []string{"kernel/lib/libcrc32c.ko", "kernel/net/netfilter/nft_ct.ko.zst"},
		},
		"a directory": {roots: []string{"net/sched/"}, want: []string{"kernel/net/sched/sch_netem.ko"}},
		"built in":    {roots: []string{"net/builtin", "net/sched/"}, want: []string{"kernel/net/sched/sch_netem.ko"}},
		"missing":     {roots: []string{"net/ipv4/ipip", "drivers/net/vrf"}, wantErr: "no module drivers/net/vrf"},
	} {
		got, err := moduleClosure(strings.NewReader(dep), []string{"kernel/net/builtin.ko"}, c.roots)
		if c.wantErr != "" {
			if err == nil || !strings.Contains(err.Error(), c.wantErr) {
				t.Errorf("%s: error %v, want %q", name, err, c.wantErr)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	if _, err := moduleClosure(strings.NewReader("no colon\n"), nil, nil); err == nil {
		t.Error("a line without a colon was taken")
	}
}

// TestDependencies: what apt-cache says of a package, as its releases print it.
func TestDependencies(t *testing.T) {
	t.Parallel()
	const out = "bird2\n  PreDepends: zlib1g\n  Depends: adduser\n |Depends: libold\n  Depends: <libvirtual>\n  Depends: libc6\n  Depends: linux-binary-7.3.4+deb13-cloud-amd64\n  Recommends: libfoo\n"
	for match, want := range map[*regexp.Regexp][]string{
		library:    {"zlib1g", "libc6"},
		kernelPart: {"linux-binary-7.3.4+deb13-cloud-amd64"},
	} {
		if diff := cmp.Diff(want, dependenciesIn([]byte(out), match)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", match, diff)
		}
	}
}

func TestKernelPackageName(t *testing.T) {
	t.Parallel()
	for out, want := range map[string]string{
		"linux-image-cloud-amd64\n  Depends: linux-image-6.1.0-56-cloud-amd64\n":                                "linux-image-6.1.0-56-cloud-amd64",
		"linux-image-cloud-amd64\n  Depends: linux-image-6.12.9+deb13-cloud-amd64\n  Suggests: linux-doc\n":     "linux-image-6.12.9+deb13-cloud-amd64",
		"linux-image-cloud-amd64\n  Depends: <linux-image-6.1.0-99-cloud-amd64>\n  Breaks: linux-image-amd64\n": "",
	} {
		got := ""
		if m := kernelPackage.FindStringSubmatch(out); m != nil {
			got = m[1]
		}
		if got != want {
			t.Errorf("in %q found %q, want %q", out, got, want)
		}
	}
}

func TestParseLdd(t *testing.T) {
	t.Parallel()
	got, err := parseLdd([]byte("\tlinux-vdso.so.1 (0x00007ffd)\n" +
		"\tlibbpf.so.1 => /lib/x86_64-linux-gnu/libbpf.so.1 (0x00007f01)\n" +
		"\t/lib64/ld-linux-x86-64.so.2 (0x00007f02)\n"))
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"/lib/x86_64-linux-gnu/libbpf.so.1", "/lib64/ld-linux-x86-64.so.2"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("libraries (-want +got):\n%s", diff)
	}
	if _, err := parseLdd([]byte("\tlibgone.so.1 => not found\n")); err == nil || !strings.Contains(err.Error(), "libgone.so.1") {
		t.Errorf("error %v: want one that names libgone.so.1", err)
	}
}

// The command passes through a shell in the machine; here the same script runs
// in a shell of this host.
func TestCommandScriptKeepsArguments(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	text := rapid.StringOf(rapid.RuneFrom([]rune("ab '\"$`\\\n\t*?;&|<>(){}[]#~!é")))
	rapid.Check(t, func(rt *rapid.T) {
		arg, env := text.Draw(rt, "arg"), text.Draw(rt, "env")
		script := commandScript(Config{
			Dir: dir, Env: []string{"X=" + env},
			Command: []string{"sh", "-c", `printf '%s|%s|%s' "$1" "$X" "$PWD"`, "sh", arg},
		})
		out, err := exec.Command("sh", "-c", string(script)).CombinedOutput()
		if err != nil {
			rt.Fatalf("%v: %s", err, out)
		}
		if want := arg + "|" + env + "|" + dir; string(out) != want {
			rt.Fatalf("the command saw %q, want %q", out, want)
		}
	})
}

func write(t *testing.T, name, content string, mode os.FileMode) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(content), mode); err != nil {
		t.Fatal(err)
	}
}

// list returns what each file and link below dir is and holds.
func list(t *testing.T, dir string) map[string]string {
	t.Helper()
	got := map[string]string{}
	err := filepath.WalkDir(dir, func(p string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		rel, err := filepath.Rel(dir, p)
		if err != nil {
			return err
		}
		if d.Type()&os.ModeSymlink != 0 {
			target, err := os.Readlink(p)
			got[rel] = "-> " + target
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		b, err := os.ReadFile(p)
		got[rel] = info.Mode().String() + " " + string(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return got
}
