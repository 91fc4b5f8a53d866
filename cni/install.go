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

// Install puts the plugin and its network configuration in place, each of them
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
	for _, f := range []struct {
		path    string
		content []byte
		mode    fs.FileMode
	}{
		{filepath.Join(opts.BinDir, PluginType), binary, 0o755},
		// A configuration can name addresses and sockets, but holds no secret:
		// runtimes that are not root read it.
		{filepath.Join(opts.ConfDir, opts.ConfName), conf, 0o644},
	} {
		did, err := replaceFile(f.path, f.content, f.mode)
		if err != nil {
			return changed, fmt.Errorf("install CNI plugin: %w", err)
		}
		if did {
			changed = append(changed, f.path)
		}
	}
	return changed, nil
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
