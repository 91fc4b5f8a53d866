package vm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// suite is a release of Debian that is none of this host's: apt keeps its lists and packages in a directory, takes nothing of the
// host's sources and state, and installs nothing.
type suite struct {
	dir  string
	args []string
}

// openSuite reads the lists of a suite from the mirror that this host has.
func openSuite(ctx context.Context, dir, name string, progress io.Writer) (*suite, error) {
	out, err := output(ctx, "", "apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Label: Debian")
	if err != nil {
		return nil, fmt.Errorf("look up the mirror of Debian: %w", err)
	}
	mirror, _, _ := strings.Cut(string(out), "\n")
	if mirror == "" {
		return nil, errors.New("no package source of this host is Debian's: the test machine needs one (apt-get update, where there is one in /etc/apt)")
	}
	s := &suite{dir: dir, args: []string{
		"-o", "Dir::Etc::SourceList=" + filepath.Join(dir, "sources.list"), "-o", "Dir::Etc::SourceParts=/dev/null",
		"-o", "Dir::State::Lists=" + filepath.Join(dir, "lists"), "-o", "Dir::State::Status=/dev/null", "-o", "Dir::Cache=" + filepath.Join(dir, "cache"),
		"-o", "Acquire::Languages=none", "-o", "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false",
		// As root apt drops to a user that may not write here.
		"-o", "APT::Sandbox::User=root",
	}}
	for _, d := range []string{"lists/partial", "cache/archives/partial"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return nil, err
		}
	}
	source := fmt.Sprintf("deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] %s %s main\n", mirror, name)
	if err := os.WriteFile(filepath.Join(dir, "sources.list"), []byte(source), 0o644); err != nil {
		return nil, err
	}
	fmt.Fprintf(progress, "vm: reading the lists of Debian's %s\n", name)
	if _, err := s.run(ctx, "apt-get", "update"); err != nil {
		return nil, fmt.Errorf("read the lists of Debian's %s: %w", name, err)
	}
	return s, nil
}

func (s *suite) run(ctx context.Context, tool string, args ...string) ([]byte, error) {
	return output(ctx, s.dir, tool, slices.Concat(s.args, args)...)
}

// dependency matches a line of apt-cache depends.
var dependency = regexp.MustCompile(`(?m)^ *(?:Pre)?Depends: ([a-z0-9][a-z0-9.+-]+)$`)

// depends returns what a package needs of those whose names match.
func (s *suite) depends(ctx context.Context, name string, match *regexp.Regexp) ([]string, error) {
	out, err := s.run(ctx, "apt-cache", "depends", name)
	if err != nil {
		return nil, fmt.Errorf("look up %s: %w", name, err)
	}
	return dependenciesIn(out, match), nil
}

func dependenciesIn(out []byte, match *regexp.Regexp) (names []string) {
	for _, m := range dependency.FindAllSubmatch(out, -1) {
		if name := string(m[1]); match.MatchString(name) {
			names = append(names, name)
		}
	}
	return names
}

// unpack downloads packages and unpacks them below root.
func (s *suite) unpack(ctx context.Context, root string, names []string, progress io.Writer) error {
	if err := os.MkdirAll(root, 0o755); err != nil {
		return err
	}
	fmt.Fprintf(progress, "vm: downloading Debian's %s\n", strings.Join(names, ", "))
	if _, err := s.run(ctx, "apt-get", append([]string{"download"}, names...)...); err != nil {
		return fmt.Errorf("download %s: %w", strings.Join(names, ", "), err)
	}
	debs, err := filepath.Glob(filepath.Join(s.dir, "*.deb"))
	if err != nil {
		return err
	}
	for _, deb := range debs {
		if _, err := output(ctx, s.dir, "dpkg-deb", "-x", deb, root); err != nil {
			return fmt.Errorf("unpack %s: %w", filepath.Base(deb), err)
		}
		if err := os.Remove(deb); err != nil {
			return err
		}
	}
	return nil
}

// Backports is the [Config.Kernel] of Debian's newest kernel for its stable release. It has what that one's own
// lacks: TCP-AO above all.
const Backports = "backports"

// backports is the suite that it comes from.
const backports = "trixie-backports"

var (
	cloudKernel = regexp.MustCompile(`^linux-image-[0-9][a-z0-9.+-]*-cloud-amd64$`)
	kernelPart  = regexp.MustCompile(`^linux-(binary|modules|base)-[0-9][a-z0-9.+-]*-cloud-amd64$`)
)

// fetchBackports unpacks the kernel of backports below root, and returns its release. Its packages are several, and it lies beside its modules,
// which are compressed: the machine's modprobe cannot read them so.
func fetchBackports(ctx context.Context, tmp, root string, progress io.Writer) (release string, err error) {
	s, err := openSuite(ctx, tmp, backports, progress)
	if err != nil {
		return "", err
	}
	names, err := s.depends(ctx, metaPackage, cloudKernel)
	if err == nil && len(names) != 1 {
		err = fmt.Errorf("look up %s: depends on %q in %s: want one kernel", metaPackage, names, backports)
	}
	if err != nil {
		return "", err
	}
	parts, err := s.depends(ctx, names[0], kernelPart)
	if err != nil {
		return "", err
	}
	if err := s.unpack(ctx, root, append(parts, names[0]), progress); err != nil {
		return "", err
	}
	if _, err := os.Stat(filepath.Join(root, "lib")); errors.Is(err, os.ErrNotExist) {
		if err := os.Symlink("usr/lib", filepath.Join(root, "lib")); err != nil {
			return "", err
		}
	}
	if _, err := output(ctx, root, "find", ".", "-name", "*.ko.xz", "-exec", "xz", "-d", "{}", "+"); err != nil {
		return "", fmt.Errorf("unpack the modules of %s: %w", names[0], err)
	}
	return strings.TrimPrefix(names[0], "linux-image-"), nil
}

// stable is the release whose programs [Config.Packages] are.
const stable = "trixie"

// library matches packages of shared libraries.
var library = regexp.MustCompile(`^(lib|zlib1g$)`)

// fetchProgram returns the directories of a program of Debian's stable release, with its libraries, and of commands that run it by
// its own loader, from the cache where they are there.
func fetchProgram(ctx context.Context, cache, name string, progress io.Writer) (root, commands string, err error) {
	dir := filepath.Join(cache, name)
	root, commands = filepath.Join(dir, "root"), filepath.Join(dir, "bin")
	if _, err := os.Stat(dir); err == nil || !errors.Is(err, os.ErrNotExist) {
		return root, commands, err
	}
	tmp, err := os.MkdirTemp(cache, "fetch-")
	if err != nil {
		return "", "", err
	}
	defer os.RemoveAll(tmp)
	s, err := openSuite(ctx, tmp, stable, progress)
	if err != nil {
		return "", "", err
	}
	// What else a package depends on is for its installation.
	all := []string{name}
	for i := 0; i < len(all); i++ {
		needs, err := s.depends(ctx, all[i], library)
		if err != nil {
			return "", "", err
		}
		for _, n := range needs {
			if !slices.Contains(all, n) {
				all = append(all, n)
			}
		}
	}
	made := filepath.Join(tmp, "made")
	if err := s.unpack(ctx, filepath.Join(made, "root"), all, progress); err != nil {
		return "", "", err
	}
	if err := writeCommands(made, path.Join(programs, name)); err != nil {
		return "", "", err
	}
	return root, commands, os.Rename(made, dir)
}

// programs is where the machine has those of [Config.Packages].
const programs = "/opt/debian"

// writeCommands leaves of what was unpacked in dir what programs need to run, and writes a command for each. guest is where the
// machine has it.
func writeCommands(dir, guest string) error {
	root := filepath.Join(dir, "root")
	for _, d := range []string{"usr/share", "usr/lib/x86_64-linux-gnu/gconv", "etc", "var"} {
		if err := os.RemoveAll(filepath.Join(root, d)); err != nil {
			return err
		}
	}
	found, err := filepath.Glob(filepath.Join(root, "usr", "sbin", "*"))
	if err != nil {
		return err
	}
	if err := os.Mkdir(filepath.Join(dir, "bin"), 0o755); err != nil {
		return err
	}
	lib := path.Join(guest, "usr/lib/x86_64-linux-gnu")
	for _, f := range found {
		name := filepath.Base(f)
		text := fmt.Sprintf("#!/bin/sh\nexec %s --library-path %s %s \"$@\"\n", path.Join(lib, "ld-linux-x86-64.so.2"), lib, path.Join(guest, "usr/sbin", name))
		if err := os.WriteFile(filepath.Join(dir, "bin", name), []byte(text), 0o755); err != nil {
			return err
		}
	}
	return nil
}
