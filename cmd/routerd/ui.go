package main

import (
	"context"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"
	"time"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/bgp"
	"github.com/routerd/routerd/control/config"
	"github.com/routerd/routerd/control/rpc"
	"github.com/routerd/routerd/control/ui"
	"github.com/routerd/routerd/dataplane/netdev"
)

// newPage makes the page for a browser.
func newPage(s services) (*ui.Page, error) {
	sessions := pageSessions{s.bgp}
	return ui.NewPage(ui.PageConfig{
		Config: ui.Config{
			Node: s.name, Operator: rpc.NewOperatorServer(s.op), Events: rpc.NewEventsServer(s.said),
			Examine: func(ctx context.Context) (*apiv1.ExamineResponse, error) {
				return s.op.Examine(ctx, &apiv1.ExamineRequest{Hosts: true})
			},
			Trace: s.op.Trace, Hosts: s.op.Hosts, Wanted: sessions.wanted, Sessions: sessions.states,
			Counters: netdev.Read,
			Now:      time.Now, Log: s.of("ui"),
		},
		Where: s.UI.Listen, Listen: func(ctx context.Context) (net.Listener, error) { return listenPage(ctx, s.UI) }, Said: s.said, Store: s.ds.store, Hosts: s.ds.hosts,
	})
}

// listenPage opens the socket that ui.listen names.
func listenPage(ctx context.Context, c config.UI) (net.Listener, error) {
	network, address, err := c.Address()
	switch {
	case err != nil:
		return nil, err
	case network == "unix":
		return rpc.Listen(address)
	}
	return new(net.ListenConfig).Listen(ctx, network, address)
}

// pageSessions is what the page shows of BGP.
type pageSessions struct{ bgp *bgp.Controller } // nil: not enabled

// wanted lists the sessions of all nodes.
func (p pageSessions) wanted(ctx context.Context) []ui.Session {
	if p.bgp == nil {
		return nil
	}
	all, err := p.bgp.Wanted(ctx)
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

// states is this host's sessions and their states.
func (p pageSessions) states() string {
	if p.bgp == nil {
		return ""
	}
	var b strings.Builder
	for _, q := range p.bgp.Sessions().Peers {
		fmt.Fprintln(&b, q.Name, q.Addr, q.State, q.Info)
	}
	return b.String()
}
