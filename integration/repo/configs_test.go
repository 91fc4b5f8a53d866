package repo

import (
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/routerd/routerd/cni"
	"github.com/routerd/routerd/control/config"
)

const sample = "configs/routerd.yaml"

func TestSampleConfigurationIsAccepted(t *testing.T) {
	t.Parallel()
	got, err := config.Load(filepath.Join(root, sample))
	if err != nil {
		t.Fatal(err)
	}
	// The comments promise that each value is the default. Empty lists differ
	// from absent ones in nothing that anybody could see.
	want := config.Default()
	if len(got.Datastore.Endpoints) == 0 {
		got.Datastore.Endpoints = want.Datastore.Endpoints
	}
	if len(got.Datastore.Embedded.Hosts) == 0 {
		got.Datastore.Embedded.Hosts = want.Datastore.Embedded.Hosts
	}
	if len(got.Datastore.Kubernetes.Servers) == 0 {
		got.Datastore.Kubernetes.Servers = want.Datastore.Kubernetes.Servers
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%s differs from the defaults (-default +sample):\n%s", sample, diff)
	}
}

func TestSampleConfigurationHasEveryKey(t *testing.T) {
	t.Parallel()
	var tree map[string]any
	if err := yaml.Unmarshal([]byte(read(t, sample)), &tree); err != nil {
		t.Fatal(err)
	}
	got := keys(tree, "")
	slices.Sort(got)
	if diff := cmp.Diff(config.Keys(), got); diff != "" {
		t.Errorf("keys of %s (-known +sample):\n%s", sample, diff)
	}
}

// keys returns the dotted names of a tree's leaves.
func keys(tree map[string]any, prefix string) []string {
	var names []string
	for k, v := range tree {
		if sub, ok := v.(map[string]any); ok {
			names = append(names, keys(sub, prefix+k+".")...)
			continue
		}
		names = append(names, prefix+k)
	}
	return names
}

// Each key of the sample has a comment of its own or in front of its group.
func TestSampleConfigurationExplainsItself(t *testing.T) {
	t.Parallel()
	lines := strings.Split(read(t, sample), "\n")
	commented := false
	for i, line := range lines {
		text := strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(text, "#"):
			commented = true
		case text == "" || strings.HasSuffix(text, ":"):
			commented = false
		default:
			// Keys that follow one another share a comment.
			if !commented && i > 0 && (strings.TrimSpace(lines[i-1]) == "" || strings.HasSuffix(strings.TrimSpace(lines[i-1]), ":")) {
				t.Errorf("%s:%d: %q has no comment", sample, i+1, text)
			}
		}
	}
}

func TestRouteProtocolHasItsName(t *testing.T) {
	t.Parallel()
	want := config.Default().Dataplane.RouteProtocol
	m := regexp.MustCompile(`(?m)^(\d+)\s+routerd$`).FindStringSubmatch(read(t, "configs/iproute2/rt_protos.d/routerd.conf"))
	if m == nil || m[1] != "77" || want != 77 {
		t.Errorf("rt_protos.d says %v, the default is %d: want 77 in both", m, want)
	}
}

// What routerd install-cni writes on a host without configuration.
func TestSampleConflist(t *testing.T) {
	t.Parallel()
	c := config.Default()
	want, err := cni.Conflist(cni.ConflistOptions{Name: c.CNI.NetworkName, Socket: c.CNISocket(), MTU: c.CNI.MTU})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), read(t, "configs/cni/10-routerd.conflist")); diff != "" {
		t.Errorf("configs/cni/10-routerd.conflist (-want +got):\n%s", diff)
	}
}

const unit = "configs/systemd/routerd.service"

func TestUnit(t *testing.T) {
	t.Parallel()
	settings := map[string]string{}
	section := ""
	for line := range strings.Lines(read(t, unit)) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		if strings.HasPrefix(line, "[") {
			section = line
			continue
		}
		key, value, ok := strings.Cut(line, "=")
		if !ok {
			t.Errorf("%s: %q is not a setting", unit, line)
		}
		if _, twice := settings[section+key]; twice {
			t.Errorf("%s: %s%s stands twice", unit, section, key)
		}
		settings[section+key] = value
	}
	for key, want := range map[string]string{
		"[Service]Type":                     "notify",
		"[Service]WatchdogSec":              "30",
		"[Service]Restart":                  "always",
		"[Service]ExecStart":                "/usr/local/bin/routerd run",
		"[Service]Environment":              "ROUTERD_UNIT=%n",
		"[Service]StateDirectory":           filepath.Base(config.Default().StateDir),
		"[Service]RuntimeDirectory":         filepath.Base(config.Default().RunDir),
		"[Service]RuntimeDirectoryPreserve": "yes",
		"[Service]ProtectSystem":            "strict",
		"[Service]MountFlags":               "slave",
	} {
		if settings[key] != want {
			t.Errorf("%s: %s is %q, want %q", unit, key, settings[key], want)
		}
	}
	for _, never := range []string{"ExecStop", "ExecStopPost", "ProtectKernelTunables", "ProtectProc", "ProcSubset", "PrivateNetwork", "PrivateUsers"} {
		if v, ok := settings["[Service]"+never]; ok {
			t.Errorf("%s: %s=%s: the unit's comments say why it must not", unit, never, v)
		}
	}
}

// systemd itself knows best which settings exist. A unit whose program is not
// installed is refused, so the copy that is verified runs a program that is.
func TestUnitIsAcceptedBySystemd(t *testing.T) {
	t.Parallel()
	tool, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Log("systemd-analyze is not on this host: TestUnit alone checks the unit")
		return
	}
	dir := t.TempDir()
	text := strings.Replace(read(t, unit), "/usr/local/bin/routerd run", "/bin/true", 1)
	write(t, filepath.Join(dir, "routerd.service"), text)
	out, err := exec.Command(tool, "verify", "--man=no", filepath.Join(dir, "routerd.service")).CombinedOutput()
	if err != nil || strings.Contains(string(out), "routerd.service:") {
		t.Errorf("systemd-analyze verify: %v\n%s", err, out)
	}
}

// TestPrivileges: docs/security.md names the capabilities that the unit leaves the daemon.
func TestPrivileges(t *testing.T) {
	t.Parallel()
	capabilities := func(text string) []string {
		list := regexp.MustCompile(`CAP_[A-Z_]+`).FindAllString(text, -1)
		slices.Sort(list)
		return slices.Compact(list)
	}
	_, bounds, _ := strings.Cut(read(t, unit), "\nCapabilityBoundingSet=")
	bounds, _, _ = strings.Cut(bounds, "\n")
	_, page, _ := strings.Cut(read(t, "docs/security.md"), "\n## Privileges\n")
	page, _, _ = strings.Cut(page, "\n## ")
	if diff := cmp.Diff(capabilities(bounds), capabilities(page)); diff != "" || bounds == "" {
		t.Errorf("capabilities of the unit and of docs/security.md (-unit +page):\n%s", diff)
	}
}
