package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/routerd/routerd/cmd/routerctl/labcmd"
)

const commandsDoc = "../../docs/commands.md"

// TestCommandReference holds docs/commands.md to what --help says; with
// -update it writes the file.
func TestCommandReference(t *testing.T) {
	a := &app{streams: streams{stdout: io.Discard, stderr: io.Discard}, daemon: &daemon{getenv: func(string) string { return "" }, resolveLab: labcmd.Socket}}
	var b bytes.Buffer
	written, err := os.ReadFile("testdata/calicoctl.md")
	if err != nil {
		t.Fatal(err)
	}
	b.Write(written)
	b.WriteString("\nMade from the commands' own help (`go test ./cmd/routerctl -run TestCommandReference -update`).\n")
	root := a.command()
	writeFlags(&b, "Flags of every command", root.PersistentFlags())
	document(&b, root)
	if *updateScripts {
		if err := os.WriteFile(commandsDoc, b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(commandsDoc)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), b.String()); diff != "" {
		t.Errorf("%s differs from the commands (-file +commands):\n%s", commandsDoc, diff)
	}
}

func document(w io.Writer, c *cobra.Command) {
	for _, sub := range c.Commands() {
		if !sub.IsAvailableCommand() || sub.Name() == "help" || sub.Name() == "completion" {
			continue
		}
		if sub.Runnable() {
			fmt.Fprintf(w, "\n## %s\n\n```\n%s\n```\n\n", sub.CommandPath(), sub.UseLine())
			text := sub.Long
			if text == "" {
				text = sub.Short + "."
			}
			fmt.Fprintf(w, "%s\n", strings.TrimSpace(text))
			if sub.Example != "" {
				fmt.Fprintf(w, "\n```console\n%s\n```\n", strings.TrimRight(sub.Example, "\n"))
			}
			writeFlags(w, "", sub.NonInheritedFlags())
		}
		document(w, sub)
	}
}

func writeFlags(w io.Writer, title string, flags *pflag.FlagSet) {
	if !flags.HasAvailableFlags() {
		return
	}
	if title != "" {
		fmt.Fprintf(w, "\n%s:\n", title)
	}
	fmt.Fprintf(w, "\n```\n%s```\n", flags.FlagUsages())
}
