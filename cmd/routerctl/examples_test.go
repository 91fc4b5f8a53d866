package main

import (
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/rogpeppe/go-internal/testscript"
	"github.com/spf13/cobra"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/routerd/routerd/cmd/routerctl/labcmd"
	"github.com/routerd/routerd/store"
)

type exampleOf struct {
	command string
	lines   []string
}

// examples returns the command lines of the examples of every command but those of the laboratory, in the commands'
// order.
func examples() (list []exampleOf) {
	a := &app{stdout: io.Discard, stderr: io.Discard, getenv: func(string) string { return "" }, resolveLab: labcmd.Socket}
	var collect func(c *cobra.Command)
	collect = func(c *cobra.Command) {
		if c.Name() == "lab" {
			return
		}
		of := exampleOf{command: strings.TrimPrefix(c.CommandPath(), "routerctl ")}
		for line := range strings.Lines(c.Example) {
			of.lines = append(of.lines, strings.TrimSpace(line))
		}
		list = append(list, of)
		for _, sub := range c.Commands() {
			collect(sub)
		}
	}
	collect(a.command())
	return list
}

// examplesCommand runs the examples of every command as a shell would, each command's on a datastore that has what
// examples speak of: "examples MANIFESTS" with the manifests that are applied before.
func examplesCommand(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: examples MANIFESTS")
	}
	bin := ts.MkAbs("bin")
	// What other programs do in examples is not their matter.
	for name, script := range map[string]string{"systemctl": "exit 0", "routerd": "exit 0", "zstd": "exec cat", "kubectl": "exec cat"} {
		ts.Check(os.MkdirAll(bin, 0o755))
		ts.Check(os.WriteFile(filepath.Join(bin, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755)) //nolint:gosec // it is to be run
	}
	shell := func(line string) {
		c := exec.Command("sh", "-c", line)
		c.Dir = ts.MkAbs(".")
		c.Env = []string{"PATH=" + bin + ":" + ts.Getenv("PATH"), "ROUTERD_SOCKET=" + ts.Getenv("ROUTERD_SOCKET"), "TZ=UTC"}
		out, err := c.CombinedOutput()
		if err != nil {
			ts.Fatalf("%s\n%s%v", line, out, err)
		}
	}
	for _, e := range examples() {
		_, err := ts.Value("etcd").(*clientv3.Client).Delete(context.Background(), "/calico/", clientv3.WithPrefix())
		ts.Check(err)
		if !strings.HasSuffix(e.command, " import") { // which is for an empty one
			etcdCommand(ts, false, []string{"put", store.ResourceKey(store.KindClusterInformation, store.DefaultName).Path(), "info.json"})
			shell("routerctl apply -f " + args[0])
		}
		if e.command == "replace" {
			shell("routerctl apply -f pools.yaml")
		}
		for _, line := range e.lines {
			if strings.Contains(line, "--lab ") {
				continue // labs have tests of their own
			}
			// Files that examples name lie below the test's directory.
			line = strings.NewReplacer(" /etc/", " etc/", " /var/", " var/", " /tmp/", " tmp/").Replace(line)
			if strings.HasSuffix(line, "watch") {
				line = "timeout --preserve-status --signal INT 0.5 " + line
			}
			if e.command == "diff" {
				line += "; test $? = 1" // there is a difference
			}
			shell(line)
		}
	}
}
