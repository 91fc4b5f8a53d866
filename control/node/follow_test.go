package node

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/dataplane"
)

func TestChoose(t *testing.T) {
	const defaultRoute = "0.0.0.0/0 via 10.1.0.1 dev eth0"
	both := []string{"eth0 10.1.0.11/24", "eth1 10.9.0.5/24"}
	tests := []struct {
		name    string
		addrs   []string
		routes  []string
		method  string
		cur     string
		missing time.Duration
		peers   string
		want    string // address and device
		wait    time.Duration
		err     string // part of the error; empty: none
	}{
		{name: "first start", addrs: both[:1], want: "10.1.0.11/24 on eth0"},
		{name: "first start with a tie", addrs: both, want: "invalid Prefix on ", err: "equally good"},
		{name: "in use, though another would be chosen", addrs: both, routes: []string{defaultRoute}, cur: "10.9.0.5/24", want: "10.9.0.5/24 on eth1"},
		{name: "in use decides a tie", addrs: both, cur: "10.9.0.5/24", want: "10.9.0.5/24 on eth1"},
		{name: "length changed", addrs: both[:1], cur: "10.1.0.11/16", want: "10.1.0.11/24 on eth0"},
		{name: "recorded without length", addrs: both[:1], cur: "10.1.0.11/32", want: "10.1.0.11/24 on eth0"},
		{name: "device renamed", addrs: []string{"ens3 10.1.0.11/24"}, cur: "10.1.0.11/24", want: "10.1.0.11/24 on ens3"},
		{
			name: "device renamed, method names the old one", addrs: []string{"ens3 10.1.0.11/24"}, method: "interface=eth0", cur: "10.1.0.11/24",
			want: "10.1.0.11/24 on ens3", err: `though the method "interface=eth0" does not allow it on ens3`,
		},
		{name: "deprecated", addrs: []string{"eth0 10.1.0.11/24,deprecated", "eth0 10.1.0.99/24,secondary"}, cur: "10.1.0.11/24", want: "10.1.0.99/24 on eth0"},
		{name: "deprecated and nothing else", addrs: []string{"eth0 10.1.0.11/24,deprecated"}, cur: "10.1.0.11/24", want: "10.1.0.11/24 on eth0", err: "it is deprecated"},
		{name: "back again after a move", addrs: []string{"eth0 10.1.0.11/24", "eth0 10.1.0.99/24,secondary"}, cur: "10.1.0.99/24", want: "10.1.0.99/24 on eth0"},
		{name: "method names another", addrs: both, method: "10.9.0.5", cur: "10.1.0.11/24", want: "10.9.0.5/24 on eth1"},
		{name: "method names another device", addrs: both, method: "interface=eth1", cur: "10.1.0.11/24", want: "10.9.0.5/24 on eth1"},
		{name: "virtual address was registered", addrs: []string{"eth0 10.1.0.100/32", "eth0 10.1.0.11/24"}, cur: "10.1.0.100/32", want: "10.1.0.11/24 on eth0"},
		{name: "gone for a moment", addrs: both[1:], cur: "10.1.0.11/24", missing: 3 * time.Second, want: "10.1.0.11/24 on ", wait: 7 * time.Second, err: "10.9.0.5/24 on eth1 takes its place if it does not come back within 10s"},
		{name: "gone for good", addrs: both[1:], cur: "10.1.0.11/24", missing: missingFor, want: "10.9.0.5/24 on eth1"},
		{name: "gone, and the method names the new one", addrs: both[1:], method: "10.9.0.5/24", cur: "10.1.0.11/24", want: "10.9.0.5/24 on eth1"},
		{name: "gone, and nothing is left", cur: "10.1.0.11/24", missing: time.Hour, want: "10.1.0.11/24 on ", err: "which it does not have any more"},
		{name: "gone, and two could take its place", addrs: []string{"eth1 10.9.0.5/24", "eth2 10.8.0.5/24"}, cur: "10.1.0.11/24", missing: time.Hour, want: "10.1.0.11/24 on ", err: "equally good"},
		{name: "gone, the peers tell which", addrs: []string{"eth1 10.9.0.5/24", "eth2 10.8.0.5/24"}, routes: []string{"10.8.0.0/24 dev eth2"}, cur: "10.1.0.11/24", missing: time.Hour, peers: "10.8.0.6", want: "10.8.0.5/24 on eth2"},
		{name: "no route at the moment", addrs: both[:1], method: "can-reach=192.0.2.1", cur: "10.1.0.11/24", want: "10.1.0.11/24 on eth0"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var cur netip.Prefix
			if tt.cur != "" {
				cur = netip.MustParsePrefix(tt.cur)
			}
			var peers []netip.Addr
			if tt.peers != "" {
				peers = append(peers, netip.MustParseAddr(tt.peers))
			}
			got, err := choose(on(t, tt.addrs, tt.routes), tt.method, dataplane.IPv4, cur, tt.missing, peers...)
			if s := got.Prefix.String() + " on " + got.Link; s != tt.want || got.Wait != tt.wait {
				t.Errorf("choose = %s, wait %v; want %s, wait %v", s, got.Wait, tt.want, tt.wait)
			}
			if (err != nil) != (tt.err != "") || err != nil && !strings.Contains(err.Error(), tt.err) {
				t.Errorf("choose: error %v; want one that says %q", err, tt.err)
			}
		})
	}
}

// TestChooseLinkDown: a cable that is pulled is no reason to give an address
// up.
func TestChooseLinkDown(t *testing.T) {
	u := on(t, []string{"eth0 10.1.0.11/24", "eth1 10.9.0.5/24"}, nil)
	u.Links[0].Up = false
	got, err := choose(u, "first-found", dataplane.IPv4, netip.MustParsePrefix("10.1.0.11/24"), 0)
	if err != nil || got.Prefix.String() != "10.1.0.11/24" || got.Missing {
		t.Errorf("choose = %+v, %v; want the address to stay", got, err)
	}
}
