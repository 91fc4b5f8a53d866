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
