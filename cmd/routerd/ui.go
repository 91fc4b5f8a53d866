package main

import (
	"context"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/routerd/routerd/control/rpc"
	"github.com/routerd/routerd/control/ui"
	"github.com/routerd/routerd/dataplane/netdev"
)

// newPage makes the page for a browser.
func (d *router) newPage() (*ui.Page, error) {
	return ui.NewPage(ui.PageConfig{
		Config: ui.Config{
			Node: d.name, Operator: rpc.NewOperatorServer(d.operator), Events: rpc.NewEventsServer(d.said),
			Examine: d.operator.Examine, Trace: d.operator.Trace, Hosts: d.operator.Hosts, Wanted: d.wantedSessions, Sessions: d.sessions,
			Counters: netdev.Read,
			Now:      time.Now, Log: d.log.With("component", "ui"),
		},
		Where: d.cfg.UI.Listen, Listen: d.listenPage, Said: d.said, Store: d.store, Hosts: d.hosts,
	})
}

// listenPage opens the socket that ui.listen names.
func (d *router) listenPage(ctx context.Context) (net.Listener, error) {
	network, address, err := d.cfg.UI.Address()
	switch {
	case err != nil:
		return nil, err
	case network == "unix":
		return rpc.Listen(address)
	}
	return new(net.ListenConfig).Listen(ctx, network, address)
}

// wantedSessions lists the sessions of all nodes.
func (d *router) wantedSessions(ctx context.Context) []ui.Session {
	if d.bgp == nil {
		return nil
	}
	all, err := d.bgp.Wanted(ctx)
	if err != nil {
		return nil // not known yet, or the browser has left
	}
	var out []ui.Session
	for _, node := range slices.Sorted(maps.Keys(all)) {
		for _, q := range all[node] {
			s := ui.Session{Node: node, Peer: q.Name, Type: string(q.Type), ASN: q.ASN, Problem: q.Problem}
			if q.Addr.IsValid() {
				s.Addr = q.Addr.String()
			}
			out = append(out, s)
		}
	}
	return out
}

// sessions is this host's sessions and their states.
func (d *router) sessions() string {
	if d.bgp == nil {
		return ""
	}
	var b strings.Builder
	for _, q := range d.bgp.Sessions().Peers {
		fmt.Fprintln(&b, q.Name, q.Addr, q.State, q.Info)
	}
	return b.String()
}
