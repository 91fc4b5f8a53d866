package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane/survey"
	"github.com/routerd/routerd/store/manifest"
)

func (a nodeCommands) nodeChecksystemCommand() *cobra.Command {
	var output, config string
	c := &cobra.Command{
		Use:     "checksystem",
		Aliases: []string{"check-system"},
		Short:   "Check whether this host's kernel has the features that routerd needs",
		Long: `Check the kernel's version and each feature that routerd needs, from the modules that
are loaded, loadable or built in, and from the kernel's configuration. The check needs
neither a daemon nor root, and loads nothing.

Each feature is OK, WARNING (part of routerd does not work, or the feature cannot be
determined), or FAIL (nothing works), with its purpose and the remedy. The exit code
is 1 if any feature is FAIL. Whether the kernel then does what a pool needs, node
status shows.`,
		Example: "  routerctl node checksystem\n  routerctl node checksystem -o json",
		Args:    noArgs,
	}
	outputFlag(c, &output)
	c.Flags().StringVarP(&config, "kernel-config", "f", "", "kernel configuration file (default /proc/config.gz, /boot/config-VERSION or beside the kernel sources)")
	c.RunE = func(*cobra.Command, []string) error {
		if err := checkOutput(output); err != nil {
			return err
		}
		var u unix.Utsname
		if err := unix.Uname(&u); err != nil {
			return fmt.Errorf("read the kernel's version: %w", err)
		}
		if config != "" {
			abs, err := filepath.Abs(config)
			if err != nil {
				return err
			}
			config = strings.TrimPrefix(abs, "/")
		}
		s, err := survey.ReadSystem(os.DirFS("/"), unix.ByteSliceToString(u.Release[:]), config)
		if err != nil {
			return err
		}
		return a.showSystem(checkSystem(s), output)
	}
	return c
}

// The results of a check.
const (
	checkOK      = "OK"
	checkWarning = "WARNING"
	checkFail    = "FAIL"
)

// systemCheck is what was found of a feature.
type systemCheck struct {
	Feature string `json:"feature"`
	Result  string `json:"result"`
	Found   string `json:"found"`
	For     string `json:"for"`
	Cure    string `json:"cure,omitempty"`
}

// checkSystem compares a kernel with what routerd needs.
func checkSystem(s survey.System) []systemCheck {
	version := systemCheck{Feature: "kernel " + survey.MinRelease + " or later", Result: checkOK, Found: s.Release, For: "routerd"}
	if !survey.AtLeast(s.Release, survey.MinRelease) {
		version.Result, version.Cure = checkFail, "install a newer kernel"
	}
	out := []systemCheck{version}
	for _, f := range survey.Features() {
		c := systemCheck{Feature: f.Name, Result: checkOK, Found: s.Find(f), For: f.For}
		if f.Module != "" {
			c.Feature += " (" + f.Module + ")"
		}
		switch c.Found {
		case survey.NotFound:
			c.Result, c.Cure = checkFail, cureOf(f)
			if !f.Needed {
				c.Result = checkWarning
			}
		case survey.NotKnown:
			c.Result, c.Cure = checkWarning, "name the kernel's configuration with --kernel-config: it has "+f.Config
		}
		out = append(out, c)
	}
	return out
}

func cureOf(f survey.Feature) string {
	var parts []string
	if f.Module != "" {
		parts = append(parts, "install the distribution's extra kernel modules, or a full kernel, with "+f.Config+"; then modprobe "+f.Module)
	} else {
		parts = append(parts, "a kernel with "+f.Config)
	}
	if f.Else != "" {
		parts = append(parts, f.Else)
	}
	return strings.Join(parts, "; or ")
}

// showSystem prints checks. The error carries the exit code.
func (a nodeCommands) showSystem(checks []systemCheck, output string) error {
	failed := 0
	var rows [][]string
	for _, c := range checks {
		what := c.For
		if c.Cure != "" {
			what += "; cure: " + c.Cure
		}
		rows = append(rows, []string{c.Feature, c.Result, c.Found, what})
		if c.Result == checkFail {
			failed++
		}
	}
	if output == "table" {
		if err := printTable(a.stdout, []string{"FEATURE", "RESULT", "FOUND", "FOR"}, rows); err != nil {
			return err
		}
		if failed == 0 {
			fmt.Fprintln(a.stdout, "\nThis host's kernel has what routerd needs.")
		} else {
			fmt.Fprintf(a.stdout, "\nThis host's kernel lacks %d of what routerd needs.\n", failed)
		}
	} else if err := a.printValue(checks, output); err != nil {
		return err
	}
	if failed > 0 {
		return exitCode(1)
	}
	return nil
}

// printValue prints a value as JSON or YAML.
func (a *app) printValue(v any, output string) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if output == "yaml" {
		b, err = manifest.YAML(b)
	} else {
		b, err = manifest.Indent(b)
	}
	if err != nil {
		return err
	}
	_, err = a.stdout.Write(b)
	return err
}
