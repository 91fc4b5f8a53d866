package main

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/rogpeppe/go-internal/testscript"
	"github.com/spf13/cobra"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/routerd/routerd/cmd/routerctl/labcmd"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

type exampleOf struct {
	command string
	lines   []string
}

// examples returns the command lines of the examples of every command but those of the laboratory, in the commands'
// order.
func examples() (list []exampleOf) {
	a := &app{streams: streams{stdout: io.Discard, stderr: io.Discard}, daemon: &daemon{getenv: func(string) string { return "" }, resolveLab: labcmd.Socket}}
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
	for name, script := range map[string]string{"systemctl": "exit 0", "routerd": "exit 0", "zstd": "exec cat", "kubectl": "exec cat", "ssh": "exec cat"} {
		ts.Check(os.MkdirAll(bin, 0o755))
		ts.Check(os.WriteFile(filepath.Join(bin, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755)) //nolint:gosec // it is to be run
	}
	sh := newShell(ts, bin+":"+ts.Getenv("PATH"))
	etcdCommand(ts, false, []string{"put", store.ResourceKey(store.KindClusterInformation, store.DefaultName).Path(), "info.json"})
	sh.run("routerctl apply -f " + args[0])
	client := ts.Value("etcd").(*clientv3.Client)
	prepared, err := client.Get(context.Background(), store.RootPath, clientv3.WithPrefix())
	ts.Check(err)
	for _, e := range examples() {
		_, err := client.Delete(context.Background(), store.RootPath, clientv3.WithPrefix())
		ts.Check(err)
		if !strings.HasSuffix(e.command, " import") { // which is for an empty one
			for _, kv := range prepared.Kvs {
				_, err := client.Put(context.Background(), string(kv.Key), string(kv.Value))
				ts.Check(err)
			}
		}
		if e.command == "replace" {
			sh.run("routerctl apply -f pools.yaml")
		}
		for _, line := range e.lines {
			// Files that examples name lie below the test's directory.
			line = strings.NewReplacer(" /etc/", " etc/", " /var/", " var/", " /tmp/", " tmp/").Replace(line)
			switch {
			case strings.Contains(line, "--lab "): // labs have tests of their own
			case strings.HasSuffix(line, " --watch"):
				sh.watch(line)
			case e.command == "top" && !strings.Contains(line, "--once"):
				sh.run(line + "; test $? = 2") // there is no terminal; top.txtar has one
			case e.command == "diff":
				sh.run(line + "; test $? = 1") // there is a difference
			default:
				sh.run(line)
			}
		}
	}
}

// shell runs command lines in a script's directory.
type shell struct {
	ts  *testscript.TestScript
	env []string
}

func newShell(ts *testscript.TestScript, path string) shell {
	return shell{ts, []string{"PATH=" + path, "ROUTERD_SOCKET=" + ts.Getenv("ROUTERD_SOCKET"), "TZ=UTC", sshConnection + "=", exitAtOnce}}
}

func (s shell) command(ctx context.Context, line string) *exec.Cmd {
	c := exec.CommandContext(ctx, "sh", "-c", line)
	c.Dir, c.Env = s.ts.MkAbs("."), s.env
	return c
}

func (s shell) run(line string) {
	if out, err := s.command(context.Background(), line).CombinedOutput(); err != nil {
		s.ts.Fatalf("%s\n%s%v", line, out, err)
	}
}

// watch runs a command that ends when it is interrupted, which it is once it has said something.
func (s shell) watch(line string) {
	ctx, cancel := context.WithTimeout(context.Background(), await.Patience)
	defer cancel()
	c := s.command(ctx, "exec "+line)
	out, err := c.StdoutPipe()
	s.ts.Check(err)
	s.ts.Check(c.Start())
	said := make([]byte, 1)
	_, err = io.ReadFull(out, said)
	s.ts.Check(errors.Join(err, c.Process.Signal(os.Interrupt)))
	_, err = io.Copy(io.Discard, out)
	if err = errors.Join(err, c.Wait()); err != nil {
		s.ts.Fatalf("%s: interrupted: %v", line, err)
	}
}
