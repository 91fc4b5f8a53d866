package cni

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/google/go-cmp/cmp"
)

func TestConflistFamilies(t *testing.T) {
	t.Parallel()
	for _, opts := range []ConflistOptions{{}, {IPv6: true, IPv6Pools: []string{"six"}}, {NoIPv4: true, IPv6: true}} {
		b, err := Conflist(opts)
		if err != nil {
			t.Fatal(err)
		}
		var list struct{ Plugins []json.RawMessage }
		if err := json.Unmarshal(b, &list); err != nil {
			t.Fatal(err)
		}
		var named map[string]any
		if err := json.Unmarshal(list.Plugins[0], &named); err != nil {
			t.Fatal(err)
		}
		named["name"] = "net1"
		conf, err := json.Marshal(named)
		if err != nil {
			t.Fatal(err)
		}
		c, err := ParseConfig(conf) // what the plugin makes of it
		if err != nil {
			t.Fatal(err)
		}
		if c.IPAM.AssignIPv4.On(false) == opts.NoIPv4 || c.IPAM.AssignIPv6.On(true) != opts.IPv6 || !slices.Equal(c.IPAM.IPv6Pools, opts.IPv6Pools) {
			t.Errorf("%+v: the plugin reads %+v", opts, c.IPAM)
		}
	}
	if _, err := Conflist(ConflistOptions{NoIPv4: true}); err == nil {
		t.Error("a network without addresses is not refused")
	}
}

func TestConflist(t *testing.T) {
	t.Parallel()
	for _, opts := range []ConflistOptions{
		{},
		{Name: "net1", Socket: "/run/x/cni.sock", MTU: 1400, Version: "1.1.0", IPv4Pools: []string{"pool1"}, LogLevel: "debug"},
	} {
		b, err := Conflist(opts)
		if err != nil {
			t.Fatal(err)
		}
		// The runtime's own library reads it, and the plugin what that hands on.
		list, err := libcni.ConfListFromBytes(b)
		if err != nil {
			t.Fatalf("libcni: %v\n%s", err, b)
		}
		if len(list.Plugins) != 1 || list.Plugins[0].Network.Type != PluginType || !list.Plugins[0].Network.Capabilities["ips"] {
			t.Errorf("plugins: %s", b)
		}
		if want := opts.Name; want != "" && list.Name != want || opts.Version != "" && list.CNIVersion != opts.Version {
			t.Errorf("list %s of version %s", list.Name, list.CNIVersion)
		}
		var m map[string]any
		if err := json.Unmarshal(list.Plugins[0].Bytes, &m); err != nil {
			t.Fatal(err)
		}
		m["name"], m["cniVersion"] = list.Name, list.CNIVersion
		in, err := json.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		c, err := ParseConfig(in)
		if err != nil {
			t.Fatal(err)
		}
		if c.MTU != opts.MTU || opts.Socket != "" && c.Socket != opts.Socket || !cmp.Equal(c.IPAM.IPv4Pools, opts.IPv4Pools) {
			t.Errorf("parsed: %+v", c)
		}
	}
	for says, opts := range map[string]ConflistOptions{
		"network name":  {Name: "a/b"},
		"CNI version":   {Version: "2.0.0"},
		"mtu 20":        {MTU: 20},
		"absolute path": {Socket: "cni.sock"},
	} {
		if _, err := Conflist(opts); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%+v: got %v, want %q", opts, err, says)
		}
	}
}

func TestInstall(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	source := filepath.Join(dir, "plugin")
	write := func(content string) {
		t.Helper()
		if err := os.WriteFile(source, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("one")
	opts := InstallOptions{Binary: source, BinDir: filepath.Join(dir, "bin"), ConfDir: filepath.Join(dir, "net.d")}
	binary, conf := filepath.Join(opts.BinDir, PluginType), filepath.Join(opts.ConfDir, "10-routerd.conflist")
	install := func(want ...string) {
		t.Helper()
		changed, err := Install(opts)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(want, changed); d != "" {
			t.Errorf("changed (-want +got):\n%s", d)
		}
		for path, mode := range map[string]os.FileMode{binary: 0o755, conf: 0o644} {
			info, err := os.Stat(path)
			if err != nil {
				t.Fatal(err)
			}
			if info.Mode() != mode {
				t.Errorf("%s has the mode %s", path, info.Mode())
			}
		}
	}
	install(binary, filepath.Join(opts.BinDir, LoopbackType), conf)
	install()
	write("two")
	install(binary)
	opts.Conflist.MTU = 1400
	install(conf)
	if err := os.Chmod(binary, 0o600); err != nil {
		t.Fatal(err)
	}
	install(binary)
	// A running plugin keeps its file: the new one is another file.
	running, err := os.Open(binary)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = running.Close() }()
	write("three")
	install(binary)
	b := make([]byte, 16)
	if n, _ := running.Read(b); string(b[:n]) != "two" {
		t.Errorf("the running plugin's file holds %q", b[:n])
	}
	for d, n := range map[string]int{opts.BinDir: 2, opts.ConfDir: 1} {
		if entries, err := os.ReadDir(d); err != nil || len(entries) != n {
			t.Errorf("%s: %v %v", d, entries, err)
		}
	}
}

func TestInstallRefuses(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	conf := filepath.Join(dir, "net.d")
	for says, opts := range map[string]InstallOptions{
		"path of the binary is missing": {},
		"no such file":                  {Binary: filepath.Join(dir, "gone"), BinDir: dir, ConfDir: conf},
		"not a directory":               {Binary: file, BinDir: filepath.Join(file, "bin"), ConfDir: conf},
		"network name":                  {Binary: file, BinDir: dir, ConfDir: conf, Conflist: ConflistOptions{Name: "a/b"}},
	} {
		if _, err := Install(opts); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%+v: got %v, want %q", opts, err, says)
		}
	}
	if _, err := os.Stat(conf); err == nil {
		t.Error("the configuration was put in place without the plugin")
	}
}
