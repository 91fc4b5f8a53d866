package engine

import (
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/osrg/gobgp/v4/api"
	"github.com/osrg/gobgp/v4/pkg/apiutil"
	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"
	"github.com/osrg/gobgp/v4/pkg/server"

	"github.com/routerd/routerd/control/bgp/engine/wire"
	"github.com/routerd/routerd/integration/await"
)

// program is BIRD with a configuration.
type program struct {
	socket string
}

// bird starts BIRD.
func bird(t *testing.T, conf string) *program {
	t.Helper()
	path, err := exec.LookPath("bird")
	if err != nil {
		t.Fatal("bird is not installed: apt-get install bird2")
	}
	dir := t.TempDir()
	p := &program{filepath.Join(dir, "ctl")}
	file := filepath.Join(dir, "bird.conf")
	if err := os.WriteFile(file, []byte(conf), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), path, "-f", "-c", file, "-s", p.socket, "-P", filepath.Join(dir, "pid"))
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// The context has ended it: its error says so.
		_ = cmd.Wait()
	})
	return p
}

// ask is birdc's answer.
func (p *program) ask(t *testing.T, command ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "birdc", append([]string{"-s", p.socket}, command...)...).CombinedOutput()
	if err != nil {
		return err.Error()
	}
	return string(out)
}

// says waits until BIRD's answer holds all of a list.
func (p *program) says(t *testing.T, command string, want ...string) {
	t.Helper()
	await.Until(t, command, func() error {
		out := p.ask(t, strings.Fields(command)...)
		for _, w := range want {
			if rest, not := strings.CutPrefix(w, "!"); not == strings.Contains(out, rest) {
				return fmt.Errorf("%q in\n%s", w, out)
			}
		}
		return nil
	})
}

// TestBIRD: BIRD in another AS, and as two clients of a route reflector.
func TestBIRD(t *testing.T) {
	t.Parallel()
	n := newNode(t, "127.0.70.1", 65000, nil)
	of := func(i, as int, extra string) (*program, Peer) {
		theirs := fmt.Sprintf("127.0.70.%d", i)
		b := bird(t, fmt.Sprintf(`router id 10.0.0.%[1]d;
protocol device { }
protocol static { ipv4; route 10.%[1]d.0.0/16 unreachable; }
protocol bgp peer {
	local %[2]s port 17900 as %[3]d; neighbor %[4]s port %[5]d as 65000;
	strict bind yes; multihop; connect delay time 1; connect retry time 1; error wait time 1, 2; graceful restart on;
	ipv4 { next hop address 192.0.70.%[1]d; import all; export filter { if source = RTS_STATIC then accept; reject; }; %[6]s };
}
`, i, theirs, as, n.addr, n.at.Port(), extra))
		p := Peer{
			Addr: netip.MustParseAddr(theirs), Port: 17900, AS: uint32(as), Source: n.addr, HoldTime: 9 * time.Second, ConnectRetry: time.Second,
			RestartTime: 60 * time.Second, Families: [wire.Families]Family{{Enabled: true}},
		}
		if as == 65000 {
			p.ClusterID = n.options.RouterID
		}
		return b, p
	}
	out, p2 := of(2, 65001, "")
	one, p3 := of(3, 65000, "")
	two, p4 := of(4, 65000, "")
	set(t, n, p2, p3, p4)
	n.Announce([]Origin{n.origin("10.1.0.0/26", func(o *Origin) { o.Communities = []uint32{65000<<16 | 9} })})
	n.has(t, map[string]string{
		"10.1.0.0/26": "invalid IP via 192.0.70.1 [] 200 65000:9", "10.2.0.0/16": "127.0.70.2 via 192.0.70.2 [65001] 0",
		"10.3.0.0/16": "127.0.70.3 via 192.0.70.3 [] 100", "10.4.0.0/16": "127.0.70.4 via 192.0.70.4 [] 100",
	})
	out.says(t, "show route protocol peer all", "10.1.0.0/26", "BGP.as_path: 65000", "BGP.next_hop: 192.0.70.1", "(65000,9)", "!BGP.local_pref: 200")
	one.says(t, "show route protocol peer all", "10.1.0.0/26", "BGP.local_pref: 200", "10.2.0.0/16", "BGP.as_path: 65001", "10.4.0.0/16", "BGP.originator_id: 10.0.0.4", "BGP.cluster_list: ", "!10.3.0.0/16")
	two.says(t, "show route protocol peer all", "10.3.0.0/16", "BGP.originator_id: 10.0.0.3", "!10.4.0.0/16")
	// A refresh in each direction, and a session that BIRD restarts.
	one.ask(t, "reload", "in", "peer")
	one.says(t, "show route protocol peer", "10.4.0.0/16", "10.1.0.0/26")
	if err := n.Refresh(p3.Addr, wire.IPv4); err != nil {
		t.Fatal(err)
	}
	two.ask(t, "restart", "peer")
	two.says(t, "show route protocol peer", "10.3.0.0/16")
	n.Announce(nil)
	for _, b := range []*program{out, one, two} {
		b.says(t, "show route protocol peer", "!10.1.0.0/26")
	}
	n.has(t, map[string]string{
		"10.2.0.0/16": "127.0.70.2 via 192.0.70.2 [65001] 0", "10.3.0.0/16": "127.0.70.3 via 192.0.70.3 [] 100", "10.4.0.0/16": "127.0.70.4 via 192.0.70.4 [] 100",
	})
	set(t, n, p2, p4)
	two.says(t, "show route protocol peer", "!10.3.0.0/16")
}

// TestGoBGP: GoBGP's server as a peer in another AS.
func TestGoBGP(t *testing.T) {
	t.Parallel()
	n := newNode(t, "127.0.71.1", 65000, nil)
	at := netip.MustParseAddr("127.0.71.2")
	s := server.NewBgpServer(server.LoggerOption(slog.New(slog.DiscardHandler), new(slog.LevelVar)))
	go s.Serve()
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	check(s.StartBgp(t.Context(), &api.StartBgpRequest{Global: &api.Global{Asn: 65001, RouterId: "10.0.0.9", ListenPort: 17900, ListenAddresses: []string{at.String()}}}))
	check(s.AddPeer(t.Context(), &api.AddPeerRequest{Peer: &api.Peer{
		Conf:            &api.PeerConf{NeighborAddress: n.addr.String(), PeerAsn: 65000},
		Timers:          &api.Timers{Config: &api.TimersConfig{ConnectRetry: 1, HoldTime: 9, IdleHoldTimeAfterReset: 1}},
		Transport:       &api.Transport{RemotePort: uint32(n.at.Port()), LocalAddress: at.String()},
		EbgpMultihop:    &api.EbgpMultihop{Enabled: true, MultihopTtl: 255},
		GracefulRestart: &api.GracefulRestart{Enabled: true, RestartTime: 60},
		AfiSafis: []*api.AfiSafi{{
			Config:            &api.AfiSafiConfig{Family: &api.Family{Afi: api.Family_AFI_IP, Safi: api.Family_SAFI_UNICAST}, Enabled: true},
			MpGracefulRestart: &api.MpGracefulRestart{Config: &api.MpGracefulRestartConfig{Enabled: true}},
		}},
	}}))
	nlri, err := packet.NewIPAddrPrefix(netip.MustParsePrefix("10.9.0.0/16"))
	check(err)
	hop, err := packet.NewPathAttributeNextHop(netip.MustParseAddr("192.0.71.2"))
	check(err)
	_, err = s.AddPath(apiutil.AddPathRequest{Paths: []*apiutil.Path{{
		Family: packet.RF_IPv4_UC, Nlri: nlri, Attrs: []packet.PathAttributeInterface{packet.NewPathAttributeOrigin(packet.BGP_ORIGIN_ATTR_TYPE_IGP), hop},
	}}})
	check(err)
	set(t, n, Peer{
		Addr: at, Port: 17900, AS: 65001, Source: n.addr, HoldTime: 9 * time.Second, ConnectRetry: time.Second, RestartTime: 60 * time.Second,
		Families: [wire.Families]Family{{Enabled: true}},
	})
	n.Announce([]Origin{n.origin("10.1.0.0/26", nil)})
	n.has(t, map[string]string{"10.1.0.0/26": "invalid IP via 192.0.71.1 [] 200", "10.9.0.0/16": "127.0.71.2 via 192.0.71.2 [65001] 0"})
	n.hears(t, "127.0.71.2 end of IPv4")
	received := func(want int) {
		t.Helper()
		await.Until(t, "GoBGP's routes", func() error {
			got := 0
			err := s.ListPath(apiutil.ListPathRequest{TableType: api.TableType_TABLE_TYPE_ADJ_IN, Family: packet.RF_IPv4_UC, Name: n.addr.String()},
				func(packet.NLRI, []*apiutil.Path) { got++ })
			if err != nil || got != want {
				return fmt.Errorf("%d, want %d: %v", got, want, err)
			}
			return nil
		})
	}
	received(1)
	n.Announce(nil)
	received(0)
	check(s.StopBgp(t.Context(), &api.StopBgpRequest{}))
	n.has(t, map[string]string{})
}
