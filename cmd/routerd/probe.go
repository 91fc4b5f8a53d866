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

// newProber makes the prober, with what the configuration and the kernel have for it. What the
// previous run measured is published to the core at once, before it decides anything.
func newProber(ctx context.Context, d daemon, pc probe.Config) (*probe.Prober, error) {
	log := d.of("probe")
	under := &pc.Underlay
	under.Enabled, under.Interval, under.Addresses = d.Reach.Enabled, d.Reach.Interval, tunnelAddresses(d.TunnelAddress)
	if under.Enabled {
		asker, err := neighbour.Open()
		if err != nil {
			return nil, err
		}
		under.Neighbours = asker
		if ports, err := sourceport.Open(log); err != nil {
			log.Warn("no nftables: peers that let in VXLAN from one port alone are not reached", "error", err)
		} else {
			under.SourcePorts = ports
		}
	}
	rules, err := rule.Open(uint8(d.Dataplane.RouteProtocol))
	if err != nil {
		return nil, err
	}
	pc.Node, pc.Log, pc.File, pc.Former = d.name, log, filepath.Join(d.StateDir, "probes.json"), reachState(d.RunDir)
	pc.Tunnel.Enabled, pc.Tunnel.Rules, pc.Tunnel.Port = d.Probe.Enabled, rules, uint16(d.Probe.Port)
	prober := probe.New(pc)
	return prober, prober.Restore(ctx)
}

// tunnelAddresses reads the configuration's key; nil: auto.
func tunnelAddresses(s string) []netip.Addr {
	if s == config.TunnelAddressAuto {
		return nil
	}
	addrs, _ := store.ParseTunnelAddresses(s) // Validate has parsed it; none gives none
	return append([]netip.Addr{}, addrs...)
}
