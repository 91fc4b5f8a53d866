package repo

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// What the packages' scripts have systemd do, by the arguments with which dpkg
// (deb-postinst(5) and its like) and rpm (the number of versions that are left)
// call them.
func TestScriptlets(t *testing.T) {
	t.Parallel()
	const reload, restart, disable = "daemon-reload", "try-restart routerd.service", "disable --now routerd.service"
	for _, c := range []struct {
		name, script string
		args         []string
		unbooted     bool // systemd is not the first process
		fails        bool // systemctl does
		want         []string
	}{
		{name: "deb: installed", script: "postinstall", args: []string{"configure", ""}, want: []string{reload, restart}},
		{name: "deb: upgraded", script: "postinstall", args: []string{"configure", "1.0"}, want: []string{reload, restart}},
		{name: "rpm: installed", script: "postinstall", args: []string{"1"}, want: []string{reload, restart}},
		{name: "rpm: upgraded", script: "postinstall", args: []string{"2"}, want: []string{reload, restart}},
		{name: "deb: an upgrade that is undone", script: "postinstall", args: []string{"abort-upgrade", "1.1"}},
		{name: "installed into a tree", script: "postinstall", args: []string{"configure", ""}, unbooted: true},
		{name: "systemd refuses", script: "postinstall", args: []string{"configure", "1.0"}, fails: true, want: []string{reload}},

		{name: "deb: before an upgrade", script: "preremove", args: []string{"upgrade", "1.1"}},
		{name: "deb: an upgrade that goes wrong", script: "preremove", args: []string{"failed-upgrade", "1.0"}},
		{name: "deb: removed", script: "preremove", args: []string{"remove"}, want: []string{disable}},
		{name: "deb: in favour of another", script: "preremove", args: []string{"remove", "in-favour", "other", "1"}, want: []string{disable}},
		{name: "rpm: before an upgrade", script: "preremove", args: []string{"1"}},
		{name: "rpm: removed", script: "preremove", args: []string{"0"}, want: []string{disable}},
		{name: "removed from a tree", script: "preremove", args: []string{"remove"}, unbooted: true, want: []string{"disable routerd.service"}},
		{name: "systemd refuses to stop", script: "preremove", args: []string{"remove"}, fails: true, want: []string{disable}},

		{name: "deb: after a removal", script: "postremove", args: []string{"remove"}, want: []string{reload}},
		{name: "deb: purged", script: "postremove", args: []string{"purge"}, want: []string{reload}},
		{name: "rpm: after an upgrade", script: "postremove", args: []string{"1"}, want: []string{reload}},
		{name: "rpm: after a removal", script: "postremove", args: []string{"0"}, fails: true, want: []string{reload}},
		{name: "gone from a tree", script: "postremove", args: []string{"purge"}, unbooted: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			const booted = "/run/systemd/system"
			text := read(t, filepath.Join("configs", "package", c.script+".sh"))
			if !strings.Contains(text, booted) {
				t.Fatalf("%s.sh does not ask whether systemd runs: %s", c.script, booted)
			}
			dir := t.TempDir()
			calls, bin := filepath.Join(dir, "calls"), filepath.Join(dir, "bin")
			exit := "0"
			if c.fails {
				exit = "1"
			}
			for _, err := range []error{
				os.Mkdir(bin, 0o755),
				os.WriteFile(filepath.Join(bin, "systemctl"), []byte("#!/bin/sh\necho \"$*\" >>"+calls+"\nexit "+exit+"\n"), 0o755),
			} {
				if err != nil {
					t.Fatal(err)
				}
			}
			if c.unbooted {
				text = strings.ReplaceAll(text, booted, filepath.Join(dir, "none"))
			} else {
				text = strings.ReplaceAll(text, booted, dir)
			}
			cmd := exec.CommandContext(t.Context(), "/bin/sh", append([]string{"-s", "--"}, c.args...)...)
			cmd.Stdin = strings.NewReader(text)
			cmd.Env = []string{"PATH=" + bin}
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Errorf("%v: the package stays half installed or half removed: %s", err, out)
			}
			if said := strings.Contains(string(out), "systemctl status routerd"); said != (c.fails && c.script != "postremove") {
				t.Errorf("says %q", out)
			}
			var got []string
			if b, err := os.ReadFile(calls); err == nil {
				got = strings.Split(strings.TrimSpace(string(b)), "\n")
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("calls of systemctl (-want +got):\n%s", diff)
			}
		})
	}
}
