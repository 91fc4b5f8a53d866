package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/routerd/routerd/control/presence"
	"github.com/routerd/routerd/store"
)

// fenceEvery is how often a host that another has the name of looks whose its
// workloads' addresses are: it must not follow the datastore.
const fenceEvery = time.Minute

// newPresence makes what holds this host's name.
func (d *router) newPresence() error {
	if err := os.MkdirAll(d.cfg.StateDir, 0o700); err != nil {
		return fmt.Errorf("make stateDir: %w", err)
	}
	file := filepath.Join(d.cfg.StateDir, "incarnation.json")
	id, err := presence.Load(file)
	if err != nil {
		return err
	}
	self, err := presence.Self(id)
	if err != nil {
		return err
	}
	d.refused = make(chan struct{}, 1)
	d.presence = presence.New(presence.Config{
		Node: d.name, Store: d.store, File: file, Self: self,
		Disown: d.attach.Disown, Doubt: d.attach.Doubt, Verified: d.attach.Verified, Outage: d.outage,
		Refused: func(context.Context) {
			select {
			case d.refused <- struct{}{}:
			default:
			}
		},
		Log: d.log.With("component", "presence"),
	})
	return nil
}

// runPresence holds this host's name. It begins when the workloads of an
// earlier life are known: they may be in doubt.
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

// outage hands to all parts, before they follow the datastore, that it cannot
// be reached, or with nil that it answers again. What was not handed on yet is
// told no more. One goroutine calls it.
func (d *router) outage(err error) {
	select {
	case <-d.away:
	default:
	}
	d.away <- store.Batch{Err: err}
}

// awaitName waits until this host holds its name, and hands to all parts that
// the datastore is away.
func (d *router) awaitName(ctx context.Context) error {
	for {
		select {
		case <-d.presence.Held():
			return nil
		case b := <-d.away:
			if err := d.hand(ctx, b); err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
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

// lostAddresses names the workloads without a route, for their addresses are
// somebody else's.
func (d *router) lostAddresses() error {
	var names []string
	for _, e := range d.endpoints() {
		if e.Lost != "" {
			names = append(names, fmt.Sprintf("%s (%s): %s", workloadName(e), e.ID.ContainerID, e.Lost))
		}
	}
	if len(names) == 0 {
		return nil
	}
	more := ""
	const most = 5
	if n := len(names) - most; n > 0 {
		names, more = names[:most], fmt.Sprintf("; and %d more", n)
	}
	return errors.New("workloads whose addresses are somebody else's have no route; start them anew: " + strings.Join(names, "; ") + more)
}

// presenceCollector shows the epoch of this host, and how many workloads have
// lost their addresses.
type presenceCollector struct {
	d           *router
	epoch, lost *prometheus.Desc
}

func newPresenceCollector(d *router) *presenceCollector {
	return &presenceCollector{
		d:     d,
		epoch: prometheus.NewDesc("routerd_node_epoch", "Epoch of this host: how often it booted, or its Node was made anew; 0: it does not hold its name.", nil, nil),
		lost:  prometheus.NewDesc("routerd_workloads_fenced", "Workloads without a route, for their addresses are somebody else's.", nil, nil),
	}
}

// Describe implements [prometheus.Collector].
func (c *presenceCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- c.epoch
	ch <- c.lost
}

// Collect implements [prometheus.Collector].
func (c *presenceCollector) Collect(ch chan<- prometheus.Metric) {
	lost := 0
	for _, e := range c.d.endpoints() {
		if e.Lost != "" {
			lost++
		}
	}
	ch <- prometheus.MustNewConstMetric(c.epoch, prometheus.GaugeValue, float64(c.d.presence.Epoch()))
	ch <- prometheus.MustNewConstMetric(c.lost, prometheus.GaugeValue, float64(lost))
}
