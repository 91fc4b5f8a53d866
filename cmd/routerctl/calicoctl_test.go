package main

import (
	"io"
	"os"
	"strings"
	"testing"
)

// calicoctlFlags are the flags of calicoctl's commands, by its source (calicoctl/calicoctl/commands, v3.33; of convert, which that
// version has no more, v3.31). Those of "" every command has.
func calicoctlFlags() map[string]string {
	const resources = "f/filename R/recursive skip-empty c/config n/namespace"
	return map[string]string{
		"":                         "l/log-level context allow-version-mismatch",
		"create":                   resources + " skip-exists",
		"apply":                    resources,
		"replace":                  resources,
		"validate":                 resources,
		"delete":                   resources + " s/skip-not-exists",
		"get":                      resources + " o/output A/all-namespaces export",
		"patch":                    "c/config n/namespace p/patch t/type",
		"label":                    "c/config n/namespace overwrite remove",
		"convert":                  "f/filename o/output ignore-validation",
		"ipam check":               "c/config show-all-ips show-problem-ips o/output kubeconfig",
		"ipam release":             "c/config ip from-report force",
		"ipam show":                "c/config ip show-blocks show-borrowed show-configuration",
		"ipam split":               "c/config cidr name",
		"ipam configure":           "c/config strictaffinity max-blocks-per-host kubevirt-ip-persistence ip-cooldown-seconds",
		"node status":              "",
		"node diags":               "log-dir",
		"node checksystem":         "f/kernel-config",
		"datastore migrate export": "c/config",
		"datastore migrate import": "c/config f/filename",
		"datastore migrate lock":   "c/config",
		"datastore migrate unlock": "c/config",
		"cluster diags":            "c/config focus-nodes max-logs max-parallelism since skip-temp-dir-cleanup",
		"version":                  "c/config poll client",
	}
}

// TestCalicoctlsFlags: each command and flag of calicoctl is one of routerctl, with its letter, or docs/commands.md says why not.
func TestCalicoctlsFlags(t *testing.T) {
	t.Parallel()
	doc, err := os.ReadFile("testdata/calicoctl.md")
	if err != nil {
		t.Fatal(err)
	}
	_, differences, ok := strings.Cut(string(doc), "Deliberate differences:")
	if !ok {
		t.Fatal("calicoctl.md has no differences")
	}
	a := &app{streams: streams{stdout: io.Discard, stderr: io.Discard}, daemon: &daemon{getenv: func(string) string { return "" }}}
	root := a.command()
	for path, flags := range calicoctlFlags() {
		c, rest, err := root.Find(strings.Fields(path))
		if err != nil || len(rest) > 0 || !c.Runnable() && path != "" {
			t.Errorf("there is no command %q: %v", path, err)
			continue
		}
		for flag := range strings.FieldsSeq(flags) {
			letter, name, ok := strings.Cut(flag, "/")
			if !ok {
				letter, name = "", flag
			}
			f := c.Flag(name)
			switch {
			case f == nil && !strings.Contains(differences, "`--"+name+"`"):
				t.Errorf("%s --%s: there is no such flag, and no difference says why", path, name)
			case f != nil && letter != "" && f.Shorthand != letter:
				t.Errorf("%s --%s has the letter %q, want %q", path, name, f.Shorthand, letter)
			}
		}
	}
}
