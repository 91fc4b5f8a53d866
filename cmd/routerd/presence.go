package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/routerd/routerd/control/lock"
	"github.com/routerd/routerd/control/presence"
)

// incarnationFile is what stateDir knows of the machine.
const incarnationFile = "incarnation.json"

// newPresence makes what holds this host's name.
func (d *router) newPresence() error {
	if err := os.MkdirAll(d.cfg.StateDir, 0o700); err != nil {
		return fmt.Errorf("make stateDir: %w", err)
	}
	file := filepath.Join(d.cfg.StateDir, incarnationFile)
	id, err := presence.Load(file)
	if err != nil {
		return err
	}
	self, err := presence.Self(id)
	if err != nil {
		return err
	}
	d.presence = presence.New(presence.Config{
		Node: d.name, Store: d.names(self), File: file, Self: self,
		Disown: d.attach.Disown, Verified: d.attach.Verified, Fence: d.attach.FenceForeign, Outage: d.cluster.SetOutage,
		Doubt: func() {
			d.doubtReserve()
			d.attach.Doubt()
		},
		Log: d.log.With("component", "presence"),
	})
	return nil
}

// doubtReserve says that what the previous run had of the reserve may be another's by now.
func (d *router) doubtReserve() {
	if err := d.ipam.Doubt(); err != nil {
		d.log.Warn("the reserve of the previous run is still in the journal; this run does not use it", "error", err)
	}
}

// mayWrite says why what workloads change must not be written to the datastore; nil:
// it may be.
func (d *router) mayWrite() error {
	if err := d.presence.MayWrite(); err != nil {
		return err
	}
	if d.db.Locked() {
		return lock.ErrLocked
	}
	return nil
}
