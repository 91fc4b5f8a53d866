package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/routerd/routerd/control/journal"
)

// openJournal opens the journal of this host's workloads and addresses.
func (d *router) openJournal() error {
	dir := d.cfg.WorkloadDir()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make directory for the journal: %w", err)
	}
	var err error
	d.journal, err = journal.Open(filepath.Join(dir, "journal"), d.log.With("component", "journal"))
	return err
}

// journalError says what the disk refuses of the journal, and what was lost of it,
// until the daemon starts again.
func (d *router) journalError() error {
	if d.journal == nil {
		return nil
	}
	if err := d.journal.Err(); err != nil {
		return fmt.Errorf("workloads cannot be started: %w", err)
	}
	lost := d.damage()
	if lost.Lines == 0 {
		return nil
	}
	kept := "as it was is " + lost.Copy
	if lost.Copy == "" {
		kept = "still has them, for there was no room for a copy"
	}
	return fmt.Errorf("%d damaged lines of the journal were left out: what they said of workloads is lost, compare routerctl ipam check; the file %s, and the disk may be failing", lost.Lines, kept)
}

// damage is what was lost of the journal.
func (d *router) damage() journal.Damage {
	if d.journal == nil {
		return journal.Damage{}
	}
	return d.journal.Damage()
}
