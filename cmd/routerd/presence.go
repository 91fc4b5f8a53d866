package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/routerd/routerd/control/lock"

	"golang.org/x/sync/errgroup"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/control/presence"
)

// fenceEvery is how often a host that another has the name of looks whose its
// workloads' addresses are: it must not follow the datastore.
const fenceEvery = time.Minute

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
	d.refused = async.NewSignal()
	d.presence = presence.New(presence.Config{
		Node: d.name, Store: d.names(self), File: file, Self: self,
		Disown: d.attach.Disown, Doubt: d.doubt, Verified: d.attach.Verified, Outage: d.cluster.SetOutage,
		Refused: func(context.Context) { d.refused.Set() },
		Log:     d.log.With("component", "presence"),
	})
	return nil
}

// doubt says that what the previous run had been assigned may be another's by now.
func (d *router) doubt() {
	d.doubtReserve()
	d.attach.Doubt()
}

func (d *router) doubtReserve() {
	if err := d.ipam.Doubt(); err != nil {
		d.log.Warn("the reserve of the previous run is still in the journal; this run does not use it", "error", err)
	}
}

// runPresence holds this host's name. It begins when the workloads of the
// previous run are known: they may be in doubt.
func (d *router) runPresence(ctx context.Context) error {
	select {
	case <-d.restored:
	case <-ctx.Done():
		return ctx.Err()
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return d.presence.Run(ctx) })
	g.Go(func() error { d.fenceRefused(ctx); return nil })
	return g.Wait()
}

// fenceRefused takes down the routes of addresses that are others' while this
// host is refused.
func (d *router) fenceRefused(ctx context.Context) {
	select {
	case <-d.refused:
	case <-d.presence.Held():
		return
	case <-ctx.Done():
		return
	}
	tick := time.NewTicker(fenceEvery)
	defer tick.Stop()
	for {
		if err := d.attach.FenceForeign(ctx); err != nil && ctx.Err() == nil {
			d.log.Warn("it is not known whose the addresses of all workloads are; will look again", "error", err)
		}
		select {
		case <-tick.C:
		case <-d.presence.Held():
			return
		case <-ctx.Done():
			return
		}
	}
}

// nameHeld says why this host must not write to the datastore; nil: it holds its
// name.
func (d *router) nameHeld() error {
	select {
	case <-d.presence.Held():
		return nil
	default:
	}
	if err := d.presence.Refused(); err != nil {
		return err
	}
	return errors.New("this host does not hold its name yet")
}

// mayWrite says why what workloads change must not be written to the datastore; nil:
// it may be.
func (d *router) mayWrite() error {
	if err := d.nameHeld(); err != nil {
		return err
	}
	if d.db.Locked() {
		return lock.ErrLocked
	}
	return nil
}
