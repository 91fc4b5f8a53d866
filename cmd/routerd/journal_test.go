package main

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/routerd/routerd/control/journal"
)

func TestJournalError(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "journal")
	if err := os.WriteFile(path, []byte("00000000 {\"k\":\"workload/x\",\"v\":1}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	d := &router{}
	if err := d.journalError(); err != nil {
		t.Errorf("without a journal: %v", err)
	}
	var err error
	if d.journal, err = journal.Open(path, slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.journal.Close() })
	if err := d.journalError(); err == nil || !strings.Contains(err.Error(), "1 damaged lines") || !strings.Contains(err.Error(), path+journal.BadSuffix) {
		t.Errorf("with damage: %v", err)
	}
	if got := d.damage().Lines; got != 1 {
		t.Errorf("%d damaged lines", got)
	}
}
