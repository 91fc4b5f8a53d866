package cni

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/routerd/routerd/control/atomicfile"
)

// ConflistName is the name of the file that [Install] writes unless told
// otherwise.
const ConflistName = "10-routerd.conflist"

// InstallOptions say what [Install] puts where.
type InstallOptions struct {
	Binary  string // path of the plugin to be copied; required
	BinDir  string // default /opt/cni/bin
	ConfDir string // default /etc/cni/net.d

	// ConfName is the name of the configuration's file; default
	// ConflistName. A runtime uses the first by name.
	ConfName string
	Conflist ConflistOptions
}

// Install puts the plugin and its network configuration in place, and the plugin as
// loopback where there is none, each of them
// in one step: a runtime finds the old file or the new one, never a part. The
// configuration comes last, since it is what makes a runtime call the plugin.
// Files that are as they should be are not touched. It returns the paths that
// it changed.
func Install(opts InstallOptions) (changed []string, err error) {
	if opts.Binary == "" {
		return nil, errors.New("install CNI plugin: path of the binary is missing")
	}
	if opts.BinDir == "" {
		opts.BinDir = "/opt/cni/bin"
	}
	if opts.ConfDir == "" {
		opts.ConfDir = "/etc/cni/net.d"
	}
	if opts.ConfName == "" {
		opts.ConfName = ConflistName
	}
	conf, err := Conflist(opts.Conflist)
	if err != nil {
		return nil, fmt.Errorf("install CNI plugin: %w", err)
	}
	binary, err := os.ReadFile(opts.Binary)
	if err != nil {
		return nil, fmt.Errorf("install CNI plugin: %w", err)
	}
	link := filepath.Join(opts.BinDir, LoopbackType)
	conflist := filepath.Join(opts.ConfDir, opts.ConfName)
	plugin := filepath.Join(opts.BinDir, PluginType)
	for _, step := range []struct {
		path string
		do   func() (bool, error)
	}{
		{plugin, func() (bool, error) { return replaceFile(plugin, binary, 0o755) }},
		{link, func() (bool, error) { return linkLoopback(link) }},
		// A configuration can name addresses and sockets, but holds no secret:
		// runtimes that are not root read it.
		{conflist, func() (bool, error) { return replaceFile(conflist, conf, 0o644) }},
	} {
		did, err := step.do()
		if err != nil {
			return changed, fmt.Errorf("install CNI plugin: %w", err)
		}
		if did {
			changed = append(changed, step.path)
		}
	}
	return changed, nil
}

// linkLoopback makes the plugin the loopback's too, unless there is one: that of
// containernetworking-plugins does the same.
func linkLoopback(link string) (bool, error) {
	err := os.Symlink(PluginType, link)
	if errors.Is(err, fs.ErrExist) {
		return false, nil
	}
	return err == nil, err
}

// replaceFile makes a file what it should be, in one step, and reports whether
// it had to.
func replaceFile(path string, content []byte, mode fs.FileMode) (bool, error) {
	if upToDate(path, content, mode) {
		return false, nil
	}
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return false, err
	}
	return true, atomicfile.Write(path, content, mode)
}

func upToDate(path string, content []byte, mode fs.FileMode) bool {
	info, err := os.Lstat(path)
	if err != nil || !info.Mode().IsRegular() || info.Mode().Perm() != mode || info.Size() != int64(len(content)) {
		return false
	}
	have, err := os.ReadFile(path)
	return err == nil && bytes.Equal(have, content)
}

// fill writes, syncs and closes f.
