package cnifiles

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/routerd/routerd/cni"
	"github.com/routerd/routerd/integration/await"
)

// The files come when workloads can be attached and not before, and come back, whole,
// whatever becomes of them or of their directories.
func TestKeep(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	program := filepath.Join(dir, "routerd-cni")
	if err := os.WriteFile(program, []byte("the plugin"), 0o755); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	var ready atomic.Bool
	k := Keeper{
		Files: cni.InstallOptions{Binary: program, BinDir: filepath.Join(dir, "bin"), ConfDir: filepath.Join(dir, "net.d"), Conflist: cni.ConflistOptions{Name: "net", Socket: "/run/routerd/cni.sock"}},
		Ready: func() error {
			if !ready.Load() {
				return errors.New("not yet")
			}
			return nil
		},
		Log: slog.New(slog.DiscardHandler),
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- k.Run(ctx) }()
	plugin, conflist := filepath.Join(dir, "bin", cni.PluginType), filepath.Join(dir, "net.d", cni.ConflistName)
	var conf []byte
	there := func() error {
		b, err := os.ReadFile(plugin)
		if err == nil && string(b) != "the plugin" {
			err = fmt.Errorf("%s is %q", plugin, b)
		}
		c, confErr := os.ReadFile(conflist)
		if confErr == nil && (len(c) == 0 || conf != nil && !bytes.Equal(c, conf)) {
			confErr = fmt.Errorf("%s is %q", conflist, c)
		}
		return errors.Join(err, confErr)
	}
	if _, err := os.Stat(conflist); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a host that attaches nothing has a configuration: %v", err)
	}
	ready.Store(true)
	await.Until(t, "the files are there", there)
	conf, _ = os.ReadFile(conflist)
	for _, spoil := range []struct {
		name string
		do   func() error
	}{
		{"the configuration is removed", func() error { return os.Remove(conflist) }},
		{"the configuration is another", func() error { return os.WriteFile(conflist, []byte("{}"), 0o600) }},
		{"the plugin is another", func() error { return os.WriteFile(plugin, []byte("theirs"), 0o600) }},
		// Moved away: what is removed file by file is put back meanwhile.
		{"a directory is gone", func() error { return os.Rename(filepath.Dir(plugin), filepath.Join(dir, "old1")) }},
		{"both are", func() error {
			return errors.Join(os.Rename(filepath.Dir(plugin), filepath.Join(dir, "old2")), os.Rename(filepath.Dir(conflist), filepath.Join(dir, "old3")))
		}},
		{"the mode is another", func() error { return os.Chmod(plugin, 0o600) }},
	} {
		if err := spoil.do(); err != nil {
			t.Fatal(err)
		}
		await.Until(t, spoil.name+": they are back", there)
		await.Until(t, spoil.name+": the plugin can be run", func() error {
			info, err := os.Stat(plugin)
			if err == nil && info.Mode().Perm() != 0o755 {
				err = fmt.Errorf("its mode is %v", info.Mode())
			}
			return err
		})
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if err := there(); err != nil {
		t.Errorf("after the end: %v", err)
	}
}
