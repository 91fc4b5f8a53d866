package main

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/routerd/routerd/dataplane/survey"
)

func TestCheckSystem(t *testing.T) {
	t.Parallel()
	var all, most strings.Builder
	for _, f := range survey.Features() {
		all.WriteString(f.Config + "=y\n")
		if f.Name != "IPIP" && f.Name != "nftables" {
			most.WriteString(f.Config + "=y\n")
		}
	}
	show := func(release, config string) (string, int) {
		t.Helper()
		s, err := survey.ReadSystem(fstest.MapFS{"proc/config": {Data: []byte(config)}}, release, "proc/config")
		if err != nil {
			t.Fatal(err)
		}
		var b bytes.Buffer
		code := exitCode(0)
		err = nodeCommands{&app{streams: streams{stdout: &b}}}.showSystem(checkSystem(s), "table")
		if err != nil && !errors.As(err, &code) {
			t.Fatal(err)
		}
		return b.String(), int(code)
	}
	for _, tt := range []struct {
		name, release, config string
		code                  int
		want                  []string
	}{
		{"all", "6.1.0", all.String(), 0, []string{"kernel 5.10 or later", "This host's kernel has what routerd needs."}},
		{"old", "5.4.0", all.String(), 1, []string{"FAIL", "cure: install a newer kernel", "lacks 1 of what"}},
		{"without two", "6.1.0", most.String(), 1, []string{
			"IPIP (ipip)                                          WARNING   missing",
			"with CONFIG_NET_IPIP; then modprobe ipip; or VXLAN or no encapsulation",
			"nftables (nf_tables)                                 FAIL      missing",
			"with CONFIG_NF_TABLES; then modprobe nf_tables",
		}},
		{"unknown", "6.1.0", "", 0, []string{"WARNING   unknown", "name the kernel's configuration with --kernel-config: it has CONFIG_VETH"}},
	} {
		got, code := show(tt.release, tt.config)
		if code != tt.code {
			t.Errorf("%s: exit code %d, want %d", tt.name, code, tt.code)
		}
		for _, w := range tt.want {
			if !strings.Contains(got, w) {
				t.Errorf("%s: want %q in\n%s", tt.name, w, got)
			}
		}
	}
}
