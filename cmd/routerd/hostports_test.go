package main

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/routerd/routerd/control/config"
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/store/embedded"
)

func TestHostPorts(t *testing.T) {
	t.Parallel()
	tcp := func(port uint16, net string) filter.Failsafe {
		f := filter.Failsafe{Protocol: 6, Port: port}
		if net != "" {
			f.Net = netip.MustParsePrefix(net)
		}
		return f
	}
	normal := []filter.Tunnel{
		{Protocol: 6, Port: 179},
		{Protocol: 17, Port: 3784},
		{Protocol: 17, Port: 4784},
		{Protocol: 17, Port: 7747},
		{Protocol: 6, Port: 7747},
	}
	for _, c := range []struct {
		name      string
		change    func(*config.Config)
		hosts     []filter.Tunnel
		datastore []filter.Failsafe
	}{
		{"as it comes", func(*config.Config) {}, normal, nil},
		{"serves others", func(c *config.Config) { c.Datastore.Embedded.Listen = "[2001:db8::1]:4001" }, append(slices.Clone(normal), filter.Tunnel{Protocol: 6, Port: 4001}, filter.Tunnel{Protocol: 6, Port: 7748}, filter.Tunnel{Protocol: 6, Port: 2380}), nil},
		{"has joined", func(c *config.Config) {
			_, c.Datastore.CertFile, _ = embedded.ClientFiles(c.ClientPKIDir())
			c.Datastore.Endpoints = []string{"https://192.0.2.1:4001"}
		}, append(slices.Clone(normal), filter.Tunnel{Protocol: 6, Port: 4001}, filter.Tunnel{Protocol: 6, Port: 7748}, filter.Tunnel{Protocol: 6, Port: 2380}), []filter.Failsafe{tcp(4001, "192.0.2.1/32")}},
		{"neither BGP nor probes", func(c *config.Config) { c.BGP.Enabled, c.Probe.Enabled = false, false }, nil, nil},
		{"external", func(c *config.Config) {
			c.BGP.Enabled, c.Probe.Enabled = false, false
			c.Datastore.Endpoints = []string{"https://192.0.2.1:2379", "http://[2001:db8::1]:4001", "https://store.example", "unix:///run/etcd.sock"}
		}, nil, []filter.Failsafe{tcp(2379, "192.0.2.1/32"), tcp(4001, "2001:db8::1/128"), tcp(443, "")}},
	} {
		cfg := config.Default()
		cfg.BGP.Enabled = true
		c.change(&cfg)
		if diff := cmp.Diff(c.hosts, hostPorts(cfg)); diff != "" {
			t.Errorf("%s: between hosts (-want +got):\n%s", c.name, diff)
		}
		if diff := cmp.Diff(c.datastore, datastorePorts(cfg.Datastore.Endpoints), cmpopts.EquateComparable(netip.Prefix{})); diff != "" {
			t.Errorf("%s: datastore (-want +got):\n%s", c.name, diff)
		}
	}
}

func TestGuardedPorts(t *testing.T) {
	t.Parallel()
	cfg := config.Default()
	cfg.Probe.Enabled, cfg.Datastore.Embedded.Listen = false, "192.0.2.1:2379"
	want := []filter.Tunnel{{Protocol: 17, Port: 3784}, {Protocol: 17, Port: 4784}, {Protocol: 6, Port: 179}, {Protocol: 17, Port: 7747}, {Protocol: 6, Port: 7747}}
	if diff := cmp.Diff(want, guardedPorts(cfg)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if cfg.Policy.AllowHostPortsFromWorkloads = true; guardedPorts(cfg) != nil {
		t.Errorf("allowed, and guarded: %v", guardedPorts(cfg))
	}
}
