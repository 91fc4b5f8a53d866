package main

import (
	"net/netip"
	"net/url"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/control/bfd"
	"github.com/routerd/routerd/control/config"
	"github.com/routerd/routerd/control/member"
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/store/embedded"
)

// bgpPort is where peers take sessions (RFC 4271, section 8.2.1.3).
const bgpPort = 179

// hostPorts lists what this daemon and those of other hosts send each other, by
// destination port, besides tunnels' packets: host endpoints leave it open.
func hostPorts(c config.Config) []filter.Tunnel {
	var list []filter.Tunnel
	if c.BGP.Enabled {
		list = append(list, filter.Tunnel{Protocol: unix.IPPROTO_TCP, Port: bgpPort})
		list = append(list, bfdPorts()...)
	}
	if c.Probe.Enabled {
		port := uint16(c.Probe.Port) //nolint:gosec // Validate has checked it
		list = append(list, filter.Tunnel{Protocol: unix.IPPROTO_UDP, Port: port}, filter.Tunnel{Protocol: unix.IPPROTO_TCP, Port: port})
	}
	e := c.Datastore.Embedded
	served := uint16(0)
	if at, err := netip.ParseAddrPort(e.Listen); err == nil {
		served = at.Port()
	} else if _, cert, _ := embedded.ClientFiles(c.ClientPKIDir()); c.Datastore.CertFile == cert {
		served = member.ServePort(c.Datastore.Endpoints) // it may become a member while it runs
	}
	if served != 0 {
		list = append(list, filter.Tunnel{Protocol: unix.IPPROTO_TCP, Port: served})
		for _, p := range []int{e.JoinPort, e.PeerPort} {
			list = append(list, filter.Tunnel{Protocol: unix.IPPROTO_TCP, Port: uint16(p)}) //nolint:gosec // Validate has checked it
		}
	}
	return list
}

// bfdPorts are where sessions beside BGP's are served, if peers ask for it.
func bfdPorts() []filter.Tunnel {
	return []filter.Tunnel{{Protocol: unix.IPPROTO_UDP, Port: bfd.Port}, {Protocol: unix.IPPROTO_UDP, Port: bfd.MultihopPort}}
}

// guardedPorts lists which of that workloads do not reach: BGP's, BFD's and the probes'
// ports, of hosts that have BGP while this one has none too.
func guardedPorts(c config.Config) []filter.Tunnel {
	if c.Policy.AllowHostPortsFromWorkloads {
		return nil
	}
	port := uint16(c.Probe.Port) //nolint:gosec // Validate has checked it
	return append(bfdPorts(),
		filter.Tunnel{Protocol: unix.IPPROTO_TCP, Port: bgpPort},
		filter.Tunnel{Protocol: unix.IPPROTO_UDP, Port: port},
		filter.Tunnel{Protocol: unix.IPPROTO_TCP, Port: port},
	)
}

// datastorePorts lists where this host reaches an external datastore. Of one that
// has a name any address will do, for names change theirs.
func datastorePorts(endpoints []string) []filter.Failsafe {
	var list []filter.Failsafe
	for _, e := range endpoints {
		u, err := url.Parse(e)
		if err != nil || u.Scheme == "unix" {
			continue
		}
		text := u.Port()
		if text == "" {
			text = map[string]string{"http": "80", "https": "443"}[u.Scheme]
		}
		port, err := strconv.ParseUint(text, 10, 16)
		if err != nil {
			continue // Validate has refused it
		}
		f := filter.Failsafe{Protocol: unix.IPPROTO_TCP, Port: uint16(port)}
		if a, err := netip.ParseAddr(u.Hostname()); err == nil {
			f.Net = netip.PrefixFrom(a.Unmap(), a.Unmap().BitLen())
		}
		list = append(list, f)
	}
	return list
}
