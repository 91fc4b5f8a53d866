package netpolicy

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/control/enforce"
	"github.com/routerd/routerd/control/policy"
	"github.com/routerd/routerd/dataplane/nft"
)

// TestTroubleshootingNamesTheReason: what keeps policy from being ready has a heading for
// the operator to find; control/operator holds the other reasons to it.
func TestTroubleshootingNamesTheReason(t *testing.T) {
	t.Parallel()
	b, err := os.ReadFile("../../docs/operations/troubleshoot.md")
	if err != nil {
		t.Fatal(err)
	}
	if !regexp.MustCompile(`(?m)^#.*` + regexp.QuoteMeta(errRulesToCome.Error())).Match(b) {
		t.Errorf("no heading for %q", errRulesToCome)
	}
}

// TestCondition: of several reasons that which concerns packets most is said.
func TestCondition(t *testing.T) {
	t.Parallel()
	refused, foreign, full := errors.New("the kernel refused"), errors.New("not permitted"), errors.New("the disk is full")
	status := enforce.Status{
		Err: refused, FromDisk: true, CutErr: errors.New("no conntrack"),
		Problems: []policy.Problem{{Reason: "no such action"}, {Reason: "another"}},
	}
	for _, tt := range []struct {
		name                string
		change              func(*enforce.Status) // of the row before; nil: none
		unrepaired, unsaved error
		want                []string // nil: all is well
	}{
		{"another's change of the table", nil, foreign, full, []string{"another program changed", "not permitted"}},
		{"a step that was refused", nil, nil, full, []string{"the kernel refused"}},
		{"no step yet", func(s *enforce.Status) { s.Err = nil }, nil, full, []string{errRulesToCome.Error()}},
		{"rules by the disk", func(s *enforce.Status) { s.InForce = true }, nil, full, []string{"by what was known before"}},
		{"connections not cut", func(s *enforce.Status) { s.FromDisk = false }, nil, full, []string{"not all cut", "no conntrack"}},
		{"not kept on disk", func(s *enforce.Status) { s.CutErr = nil }, nil, full, []string{"after a reboot", "the disk is full"}},
		{"objects that cannot be used", nil, nil, nil, []string{"2 objects", "no such action", "routerctl policy show"}},
		{"nothing", func(s *enforce.Status) { s.Problems = nil }, nil, nil, nil},
	} {
		if tt.change != nil {
			tt.change(&status)
		}
		err := condition(status, tt.unrepaired, tt.unsaved)
		if (err != nil) != (tt.want != nil) {
			t.Errorf("%s: %v", tt.name, err)
		}
		for _, word := range tt.want {
			if err == nil || !strings.Contains(err.Error(), word) {
				t.Errorf("%s: %v, want %q in it", tt.name, err, word)
			}
		}
	}
}

// TestSwitchedOff: where policy is switched off its tables go, the mark of what the kernel
// has goes with them, and nothing is waited for; a table that cannot be deleted ends the start.
func TestSwitchedOff(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	var deleted []string
	var refused error
	open := func(c Config) (*Policy, error) {
		c.RunDir, c.Log = dir, slog.New(slog.DiscardHandler)
		c.DeleteTable = func(name string, look bool) (bool, error) {
			deleted = append(deleted, name)
			return true, refused
		}
		return Open(c)
	}
	if err := os.WriteFile(MarkFile(dir), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	p, err := open(Config{})
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]string{nft.OffloadTable, nft.TableName}, deleted); d != "" {
		t.Errorf("tables deleted (-want +got):\n%s", d)
	}
	if _, err := os.Stat(MarkFile(dir)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the mark: %v", err)
	}
	if p.Rules() != nil || p.Sources() != nil || p.Err() != nil || p.Waiting() != nil || p.Unable() != nil || p.MayFollowDisk() {
		t.Error("something waits for rules")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := p.Run(ctx, nil, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("it ended with %v", err)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	refused = errors.New("not permitted")
	for _, c := range []Config{{}, {Enabled: true}} {
		if _, err := open(c); !errors.Is(err, refused) {
			t.Errorf("enabled %t, and the table cannot be deleted: %v", c.Enabled, err)
		}
	}
	if slices.Contains(deleted[2:], nft.TableName) {
		t.Errorf("after an error it went on: %v", deleted)
	}
}
