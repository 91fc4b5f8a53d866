package main

import (
	"context"
	"os"
	"regexp"
	"strconv"
	"strings"

	"github.com/rogpeppe/go-internal/testscript"
)

// everydayLines is how many are tried.
const everydayLines = 108

// everydayCommand tries everyday command lines of calicoctl with the name exchanged: "everyday FILE". Each line of the file is
// an exit code, a command line and a regular expression of what calicoctl prints, set apart by " | "; it holds if both are so.
func everydayCommand(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: everyday FILE")
	}
	sh := newShell(ts, ts.Getenv("PATH"))
	text, err := os.ReadFile(ts.MkAbs(args[0]))
	ts.Check(err)
	tried, hold := 0, 0
	for line := range strings.Lines(string(text)) {
		f := strings.SplitN(strings.TrimRight(line, "\n")+" ", " | ", 3)
		if len(f) != 3 {
			ts.Fatalf("%q: want CODE | COMMAND | PATTERN", line)
		}
		code, err := strconv.Atoi(f[0])
		ts.Check(err)
		want, err := regexp.Compile("(?m)" + strings.TrimSpace(f[2]))
		ts.Check(err)
		c := sh.command(context.Background(), "routerctl "+f[1])
		out, _ := c.CombinedOutput() // the exit code says it
		tried++
		if c.ProcessState.ExitCode() == code && want.Match(out) {
			hold++
			continue
		}
		ts.Logf("%s: exit code %d, want %d and %q:\n%s", f[1], c.ProcessState.ExitCode(), code, want, out)
	}
	if tried != everydayLines || hold < everydayLines {
		ts.Fatalf("%d of %d lines do as calicoctl does, want all of %d", hold, tried, everydayLines)
	}
	ts.Logf("%d of %d lines do as calicoctl does", hold, tried)
}
