package bgp

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/osrg/gobgp/v4/api"
	"github.com/osrg/gobgp/v4/pkg/apiutil"
	"github.com/osrg/gobgp/v4/pkg/server"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/routerd/routerd/integration/await"
)

// envGoBGP is the socket of the API of GoBGP's server in a process of its own: it can be killed
// there, and its own data races are not the tests'.
const envGoBGP = "BGP_TEST_GOBGP"

// goBGP is what that process does until its standard input ends.
func goBGP(socket string) int {
	level := new(slog.LevelVar)
	s := server.NewBgpServer(server.GrpcListenAddress("unix://"+socket), server.LoggerOption(slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level})), level))
	go s.Serve()
	if _, err := io.Copy(io.Discard, os.Stdin); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

type goBGPOther struct {
	*process
	remote
	api    api.GoBgpServiceClient
	family *api.Family
}

func startGoBGPAs(t *testing.T, r remote) other {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "api")
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), envGoBGP+"="+socket)
	g := &goBGPOther{process: start(t, cmd), remote: r, family: &api.Family{Afi: api.Family_AFI_IP, Safi: api.Family_SAFI_UNICAST}}
	if r.peer.Is6() && !r.extended {
		g.family.Afi = api.Family_AFI_IP6
	}
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	})
	g.api = api.NewGoBgpServiceClient(conn)
	ctx, cancel := context.WithTimeout(t.Context(), await.Patience)
	defer cancel()
	_, err = g.api.StartBgp(ctx, &api.StartBgpRequest{Global: &api.Global{
		Asn: r.asn, RouterId: routerIDOf(r.self).String(), ListenPort: DefaultPort, ListenAddresses: []string{r.self.String()},
	}}, grpc.WaitForReady(true))
	if err == nil {
		_, err = g.api.AddPeer(ctx, &api.AddPeerRequest{Peer: g.neighbour()})
	}
	if err != nil {
		t.Fatalf("start GoBGP: %v\n%s", err, g.log)
	}
	g.announce(r.routes...)
	return g
}

// neighbour is this host as GoBGP's peer.
func (g *goBGPOther) neighbour() *api.Peer {
	restart := uint32(120)
	family := &api.AfiSafi{
		Config:            &api.AfiSafiConfig{Family: g.family, Enabled: true},
		MpGracefulRestart: &api.MpGracefulRestart{Config: &api.MpGracefulRestartConfig{Enabled: true}},
	}
	if g.longLived {
		restart = 1
		family.LongLivedGracefulRestart = &api.LongLivedGracefulRestart{Config: &api.LongLivedGracefulRestartConfig{Enabled: true, RestartTime: 300}}
	}
	p := &api.Peer{
		Conf:            &api.PeerConf{NeighborAddress: g.peer.String(), PeerAsn: g.peerASN, AuthPassword: g.password},
		Timers:          &api.Timers{Config: &api.TimersConfig{ConnectRetry: 1, HoldTime: 90, IdleHoldTimeAfterReset: 1}},
		Transport:       &api.Transport{LocalAddress: g.self.String(), RemotePort: DefaultPort, PassiveMode: !g.opens},
		GracefulRestart: &api.GracefulRestart{Enabled: true, RestartTime: restart, LonglivedEnabled: g.longLived},
		RouteReflector:  &api.RouteReflector{RouteReflectorClient: g.client, RouteReflectorClusterId: routerIDOf(g.self).String()},
		AfiSafis:        []*api.AfiSafi{family},
	}
	switch {
	case g.hops > 0:
		p.TtlSecurity = &api.TtlSecurity{Enabled: true, TtlMin: uint32(256 - g.hops)}
	case g.asn != g.peerASN:
		p.EbgpMultihop = &api.EbgpMultihop{Enabled: true, MultihopTtl: 255}
	}
	return p
}

// path is a route that GoBGP announces.
func (g *goBGPOther) path(prefix string) (*api.Path, error) {
	p, err := netip.ParsePrefix(prefix)
	if err != nil {
		return nil, err
	}
	nlri := &api.NLRI{Nlri: &api.NLRI_Prefix{Prefix: &api.IPAddressPrefix{Prefix: p.Addr().String(), PrefixLen: uint32(p.Bits())}}}
	list := []*api.Attribute{{Attr: &api.Attribute_Origin{Origin: &api.OriginAttribute{}}}}
	if g.self.Is6() {
		list = append(list, &api.Attribute{Attr: &api.Attribute_MpReach{MpReach: &api.MpReachNLRIAttribute{Family: g.family, NextHops: []string{g.self.String()}, Nlris: []*api.NLRI{nlri}}}})
	} else {
		list = append(list, &api.Attribute{Attr: &api.Attribute_NextHop{NextHop: &api.NextHopAttribute{NextHop: g.self.String()}}})
	}
	var communities []uint32
	var large []*api.LargeCommunity
	for c := range strings.FieldsSeq(g.communities) {
		var n []uint32
		for part := range strings.SplitSeq(c, ":") {
			v, err := strconv.ParseUint(part, 10, 32)
			if err != nil {
				return nil, fmt.Errorf("community %s: %w", c, err)
			}
			n = append(n, uint32(v))
		}
		if isLarge(c) {
			large = append(large, &api.LargeCommunity{GlobalAdmin: n[0], LocalData1: n[1], LocalData2: n[2]})
		} else {
			communities = append(communities, n[0]<<16|n[1])
		}
	}
	if communities != nil {
		list = append(list, &api.Attribute{Attr: &api.Attribute_Communities{Communities: &api.CommunitiesAttribute{Communities: communities}}})
	}
	if large != nil {
		list = append(list, &api.Attribute{Attr: &api.Attribute_LargeCommunities{LargeCommunities: &api.LargeCommunitiesAttribute{Communities: large}}})
	}
	return &api.Path{Nlri: nlri, Pattrs: list, Family: g.family}, nil
}

func (g *goBGPOther) announce(prefixes ...string) {
	g.t.Helper()
	ctx, cancel := context.WithTimeout(g.t.Context(), await.Patience)
	defer cancel()
	for _, change := range []struct {
		list []string
		make func(*api.Path) error
	}{
		{g.routes, func(p *api.Path) error {
			_, err := g.api.DeletePath(ctx, &api.DeletePathRequest{TableType: api.TableType_TABLE_TYPE_GLOBAL, Family: g.family, Path: p})
			return err
		}},
		{prefixes, func(p *api.Path) error {
			_, err := g.api.AddPath(ctx, &api.AddPathRequest{TableType: api.TableType_TABLE_TYPE_GLOBAL, Path: p})
			return err
		}},
	} {
		for _, prefix := range change.list {
			p, err := g.path(prefix)
			if err == nil {
				err = change.make(p)
			}
			if err != nil {
				g.t.Fatalf("GoBGP's %s: %v\n%s", prefix, err, g.log)
			}
		}
	}
	g.routes = prefixes
}

// table is what GoBGP has of its peer, a line for each route.
func (g *goBGPOther) table() string {
	g.t.Helper()
	ctx, cancel := context.WithTimeout(g.t.Context(), await.Patience)
	defer cancel()
	list, err := g.api.ListPath(ctx, &api.ListPathRequest{TableType: api.TableType_TABLE_TYPE_GLOBAL, Family: g.family})
	if err != nil {
		g.t.Fatalf("GoBGP's table: %v\n%s", err, g.log)
	}
	var b strings.Builder
	for {
		d, err := list.Recv()
		if err == io.EOF {
			return b.String()
		}
		if err != nil {
			g.t.Fatalf("GoBGP's table: %v\n%s", err, g.log)
		}
		for _, p := range d.Destination.Paths {
			if p.NeighborIp != g.peer.String() {
				continue
			}
			fmt.Fprintf(&b, "%s stale %t", d.Destination.Prefix, p.Stale)
			for _, a := range p.Pattrs {
				native, err := apiutil.UnmarshalAttribute(a)
				if err != nil {
					g.t.Fatalf("GoBGP's %s has %v: %v", d.Destination.Prefix, a, err)
				}
				fmt.Fprintf(&b, " %s", native)
			}
			b.WriteByte('\n')
		}
	}
}

// route is the table's line of a prefix.
func (g *goBGPOther) route(prefix string) string {
	g.t.Helper()
	for line := range strings.Lines(g.table()) {
		if strings.HasPrefix(line, prefix+" ") {
			return line
		}
	}
	return ""
}

func (g *goBGPOther) waitRoute(prefix string, says ...string) {
	g.t.Helper()
	poll(g.t, func() string {
		return fmt.Sprintf("GoBGP's route to %s saying %q; it has\n%s\n%s", prefix, says, g.table(), g.log)
	}, func() bool {
		route := g.route(prefix)
		for _, s := range says {
			if !strings.Contains(route, s) {
				return false
			}
		}
		return route != ""
	})
}

func (g *goBGPOther) waitRouteWithOneOf(prefix string, says ...string) {
	g.t.Helper()
	poll(g.t, func() string {
		return fmt.Sprintf("GoBGP's route to %s saying one of %q; it has\n%s\n%s", prefix, says, g.table(), g.log)
	}, func() bool { return containsOne(g.route(prefix), says) })
}

func (g *goBGPOther) waitNoRoute(prefix string) {
	g.t.Helper()
	poll(g.t, func() string { return fmt.Sprintf("GoBGP without %s; it has\n%s\n%s", prefix, g.table(), g.log) },
		func() bool { return g.route(prefix) == "" })
}

func (g *goBGPOther) uptime() string {
	g.t.Helper()
	return connection(g.t, g.remote)
}
