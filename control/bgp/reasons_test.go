package bgp

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"sync"
	"testing"

	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"
)

// TestFiltered: packets to the peer vanish on the way.
func TestFiltered(t *testing.T) {
	t.Parallel()
	h := hosts(t, 2)
	table := fmt.Sprintf("filtered_%d", h[0].As4()[2])
	nft := exec.Command("nft", "-f", "-")
	nft.Stdin = strings.NewReader(fmt.Sprintf("table ip %s { chain input { type filter hook input priority 0; ip daddr %s tcp dport 179 drop; }; }", table, h[1]))
	if out, err := nft.CombinedOutput(); err != nil {
		t.Fatal(err, string(out))
	}
	t.Cleanup(func() {
		if out, err := exec.Command("nft", "delete", "table", "ip", table).CombinedOutput(); err != nil {
			t.Error(err, string(out))
		}
	})
	r := newRun(t, SpeakerOptions{})
	r.apply(testConfig(h[0], 64512, nil, tor(h[0], h[1], 64999)))
	r.waitInfo(h[1], "connecting")
	r.waitInfo(h[1], "no answer from "+h[1].String()+":179: it is down, or filtered on the way")
}

// TestTTLSecurityOfOneSide: the peer's packets do not say that they come from
// so near, the kernel drops them, and its counter tells.
func TestTTLSecurityOfOneSide(t *testing.T) {
	t.Parallel()
	h := hosts(t, 2)
	startBIRD(t, strings.Replace(birdConf(h[1], 64999, h[0], 64512, ""), "multihop;", "multihop 5;", 1))
	r := newRun(t, SpeakerOptions{})
	p := tor(h[0], h[1], 64999)
	p.TTLSecurity = 1
	r.apply(testConfig(h[0], 64512, nil, p))
	r.waitInfo(h[1], " segments came from further away than 1 hops: does the peer have TTL security too?")
}

// TestNotifications: a peer answers the OPEN with a notification, and the
// status says which.
func TestNotifications(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		code, subcode byte
		says          string
	}{
		"collision":  {packet.BGP_ERROR_CEASE, packet.BGP_ERROR_SUB_CONNECTION_COLLISION_RESOLUTION, "cease, connection collision resolution"},
		"rejected":   {packet.BGP_ERROR_CEASE, packet.BGP_ERROR_SUB_CONNECTION_REJECTED, "cease, connection rejected"},
		"hold time":  {packet.BGP_ERROR_OPEN_MESSAGE_ERROR, packet.BGP_ERROR_SUB_UNACCEPTABLE_HOLD_TIME, "unacceptable hold time"},
		"unknown":    {200, 7, "code 200, subcode 7"},
		"capability": {packet.BGP_ERROR_OPEN_MESSAGE_ERROR, packet.BGP_ERROR_SUB_UNSUPPORTED_CAPABILITY, "unsupported capability"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := hosts(t, 2)
			answerAll(t, h[1], message(packet.BGP_MSG_NOTIFICATION, []byte{c.code, c.subcode}))
			r := newRun(t, SpeakerOptions{})
			r.apply(testConfig(h[0], 64512, nil, tor(h[0], h[1], 64999)))
			r.waitInfo(h[1], "notification received: ")
			r.waitInfo(h[1], c.says)
		})
	}
}

// answerAll opens each connection to BGP's port as a peer of AS 64999 does, and
// answers whatever comes first.
func answerAll(t *testing.T, at netip.Addr, answer []byte) {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp4", netip.AddrPortFrom(at, DefaultPort).String())
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer conn.Close()
				if err := sendOpen(conn, &Config{ASN: 64999, RouterID: at}, Peer{Addr: at, HoldTime: defaultHoldTime}); err != nil {
					return
				}
				if _, err := readMessage(conn); err != nil {
					return
				}
				if _, err := conn.Write(answer); err == nil {
					_, _ = io.Copy(io.Discard, conn) // until the speaker has read it and closes
				}
			})
		}
	})
	t.Cleanup(func() { l.Close(); wg.Wait() })
}

// TestReasons brings about what keeps a session from coming up, and reads what
// its status says. Wrong AS numbers, passwords, the hold timer, a taken port and
// a peer that takes its leave have tests of their own.
func TestReasons(t *testing.T) {
	t.Parallel()
	ip(t, "route add prohibit 192.0.2.129")
	for name, c := range map[string]struct {
		peer func(self, beside netip.Addr) Peer
		says string
	}{
		"refused": {func(self, beside netip.Addr) Peer { return tor(self, beside, 64999) }, ":179: nothing listens there, or it is filtered"},
		"no route": {func(self, _ netip.Addr) Peer {
			return tor(self, netip.MustParseAddr("192.0.2.1"), 64999)
		}, "no route to 192.0.2.1"},
		"source": {func(self, beside netip.Addr) Peer {
			p := tor(self, beside, 64999)
			p.Source = netip.MustParseAddr("192.0.2.7")
			return p
		}, "this host does not have the address 192.0.2.7 to connect from"},
		"prohibited": {func(self, _ netip.Addr) Peer {
			return tor(self, netip.MustParseAddr("192.0.2.129"), 64999)
		}, "connect: dial tcp "},
		"passive": {func(self, beside netip.Addr) Peer { return waiting(tor(self, beside, 64999)) }, "passive: waiting for the peer to connect"},
		"problem": {func(self, beside netip.Addr) Peer {
			p := tor(self, beside, 64999)
			p.Problem = "spec.asNumber is missing"
			return p
		}, "spec.asNumber is missing"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := hosts(t, 2)
			r := newRun(t, SpeakerOptions{})
			p := c.peer(h[0], h[1])
			r.apply(testConfig(h[0], 64512, nil, p))
			if st := r.waitInfo(p.Addr, c.says); st.State == StateUp {
				t.Errorf("state %+v", st)
			}
		})
	}
}

// TestClosedBeforeOpen: a peer that does not know us closes the connection.
func TestClosedBeforeOpen(t *testing.T) {
	t.Parallel()
	h := hosts(t, 3)
	startBIRD(t, birdConf(h[1], 64999, h[2], 64512, ""))
	r := newRun(t, SpeakerOptions{})
	r.apply(testConfig(h[0], 64512, nil, tor(h[0], h[1], 64999)))
	r.waitInfo(h[1], " closed the connection before it opened a session: is this node's address known to it as a peer?")
}

// TestEnds: what ends a session, of a peer that knows no graceful restart.
func TestEnds(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		last []byte // what the peer sends before it closes the connection
		says string
	}{
		"lost":        {nil, "the connection was lost"},
		"no marker":   {make([]byte, packet.BGP_HEADER_LENGTH), "notification sent: message header error"},
		"takes leave": {message(packet.BGP_MSG_NOTIFICATION, []byte{packet.BGP_ERROR_CEASE, packet.BGP_ERROR_SUB_PEER_DECONFIGURED}), "notification received: cease, peer de-configured"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := hosts(t, 2)
			r := newRun(t, SpeakerOptions{})
			r.apply(testConfig(h[0], 64512, nil, waiting(tor(h[0], h[1], 64999))))
			conn, err := establish(t.Context(), h[1], h[0])
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			r.waitUp(h[1])
			if _, err := conn.Write(c.last); err != nil {
				t.Fatal(err)
			}
			if c.last == nil {
				conn.Close()
			}
			r.waitInfo(h[1], "; the last session ended: "+c.says)
		})
	}
}

// TestDoesNotComeBack: a peer that was to restart is away for longer than it said.
func TestDoesNotComeBack(t *testing.T) {
	t.Parallel()
	for name, restart := range map[string]string{"at once": "1", "while it is tried": "6"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := hosts(t, 2)
			b := startBIRD(t, strings.Replace(birdConf(h[1], 64999, h[0], 64512, "", "203.0.113.0/24"), "graceful restart on;", "graceful restart on; graceful restart time "+restart+";", 1))
			r := newRun(t, SpeakerOptions{})
			r.apply(testConfig(h[0], 64512, nil, tor(h[0], h[1], 64999)))
			r.waitPath("203.0.113.0/24")
			b.kill()
			r.waitInfo(h[1], "the connection was lost; the peer's routes are kept while it restarts")
			r.waitInfo(h[1], "the connection was lost; the peer did not come back within its restart time")
			r.waitNoPath("203.0.113.0/24")
		})
	}
}

// TestMD5OfOneSide: what the kernel drops for a password that one side alone has,
// or has otherwise. Its counters are the host's, so nothing else runs meanwhile.
func TestMD5OfOneSide(t *testing.T) {
	for _, c := range []struct{ theirs, ours, says string }{
		{"", "geheim", " segments came without a signature: does the peer have the password?"},
		{"geheim", "", " segments came with a signature: does the peer have a password that is missing here?"},
		{"geheim", "other", " segments came signed with another password"},
	} {
		h := hosts(t, 2)
		startBIRDAs(t, remote{self: h[1], asn: 64999, peer: h[0], peerASN: 64512, password: c.theirs, opens: true})
		r := newRun(t, SpeakerOptions{})
		p := waiting(tor(h[0], h[1], 64999))
		p.Password = Password{c.ours}
		r.apply(testConfig(h[0], 64512, nil, p))
		r.waitInfo(h[1], c.says)
	}
}
