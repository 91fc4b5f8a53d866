package main

import (
	"context"
	"net/netip"
	"path/filepath"

	"github.com/routerd/routerd/control/config"
	"github.com/routerd/routerd/control/probe"
	"github.com/routerd/routerd/dataplane/neighbour"
	"github.com/routerd/routerd/dataplane/rule"
	"github.com/routerd/routerd/dataplane/sourceport"
	"github.com/routerd/routerd/store"
)

// reachState is where earlier versions kept what was measured of the underlay.
func reachState(runDir string) string { return filepath.Join(runDir, "reach.json") }

// newProbe makes the prober. What the previous run measured is published to the
// core at once, before it decides anything.
func (d *router) newProbe(ctx context.Context) error {
	log := d.log.With("component", "probe")
	under := probe.UnderlayConfig{Enabled: d.cfg.Reach.Enabled, Interval: d.cfg.Reach.Interval, Addresses: tunnelAddresses(d.cfg.TunnelAddress), Sources: d.policy.Sources()}
	if under.Enabled {
		asker, err := neighbour.Open()
		if err != nil {
			return err
		}
		under.Neighbours = asker
		if ports, err := sourceport.Open(log); err != nil {
			log.Warn("no nftables: peers that let in VXLAN from one port alone are not reached", "error", err)
		} else {
			under.SourcePorts = ports
		}
	}
	rules, err := rule.Open(uint8(d.cfg.Dataplane.RouteProtocol))
	if err != nil {
		return err
	}
	d.probe = probe.New(probe.Config{
		Node: d.name, Store: d.db, Core: d.core, Log: log,
		File: filepath.Join(d.cfg.StateDir, "probes.json"), Former: reachState(d.cfg.RunDir),
		Underlay: under,
		Tunnel:   probe.TunnelConfig{Enabled: d.cfg.Probe.Enabled, Sink: d.kernel, Rules: rules, Port: uint16(d.cfg.Probe.Port)},
	})
	return d.probe.Restore(ctx)
}

// tunnelAddresses reads the configuration's key; nil: auto.
func tunnelAddresses(s string) []netip.Addr {
	if s == config.TunnelAddressAuto {
		return nil
	}
	addrs, _ := store.ParseTunnelAddresses(s) // Validate has parsed it; none gives none
	return append([]netip.Addr{}, addrs...)
}
