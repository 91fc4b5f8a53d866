package bgp

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

// TestAdvertisedIsWhatWasTold holds the counts of a reflector with clients,
// another iBGP peer and switches, each with filters or without, against what
// each of them was told.
func TestAdvertisedIsWhatWasTold(t *testing.T) {
	t.Parallel()
	h := hosts(t, 7)
	us := newRun(t, SpeakerOptions{})
	var peers []Peer
	for i, c := range []struct {
		asn     uint32
		client  bool
		filters string
	}{{64512, true, ""}, {64512, true, ""}, {64512, false, ""}, {64997, false, "all"}, {64998, false, "none"}, {64999, false, ""}} {
		p := waiting(tor(h[0], h[i+1], c.asn))
		p.Filters, p.Reflect = c.filters, c.asn == 64512
		if c.client {
			p.ClusterID = netip.MustParseAddr("244.0.0.1")
		}
		peers = append(peers, p)
	}
	c := testConfig(h[0], 64512, []string{"192.168.1.0/26", "172.16.1.0/26"}, peers...)
	c.Hidden = prefixes("172.16.0.0/16")
	c.Filters = map[string]Filter{"all": parse(t, `{"exportV4":[{"action":"Accept"}]}`), "none": parse(t, `{"exportV4":[{"action":"Reject"}]}`)}
	us.apply(c)
	for i, p := range peers {
		said := []string{fmt.Sprintf("192.168.%d.0/26", i+2)}
		if i == 0 {
			said = append(said, "192.168.100.0/26", "192.168.101.0/26")
		}
		newRun(t, SpeakerOptions{}).apply(testConfig(h[i+1], p.ASN, said, tor(h[i+1], h[0], 64512)))
	}
	// Of its own the node tells one prefix, and two where a filter accepts the
	// hidden one. From others there are 3, 1 and 1 by iBGP, of which a client is
	// told all but its own and another iBGP peer those of clients, and 1 from each
	// switch; only a filter passes anything on to or from a switch.
	for i, want := range []int{3, 5, 5, 9, 0, 1} {
		poll(t, func() string { return fmt.Sprintf("peer %d told %d%s", i, want, us.dump()) }, func() bool {
			told := 0
			err := us.Query(t.Context(), Query{Table: TableAdvertised, Peer: h[i+1]}, func(Route) bool { told++; return true })
			st := us.status(h[i+1])
			return err == nil && told == want && st.Advertised == want && len(st.Families) > 0 && st.Families[0].Advertised == want
		})
	}
	c.Filters = map[string]Filter{"all": c.Filters["none"], "none": c.Filters["none"]}
	us.apply(c)
	poll(t, us.dump, func() bool { return us.status(h[4]).Advertised == 0 })
}

// TestTooLargeForPeer: what does not fit into a message of 4,096 bytes is withheld from a peer that takes no larger ones, and
// explain says so.
func TestTooLargeForPeer(t *testing.T) {
	t.Parallel()
	h := hosts(t, 2)
	o := startBIRDAs(t, remote{self: h[1], asn: 64999, peer: h[0], peerASN: 64512})
	r := newRun(t, SpeakerOptions{})
	c := testConfig(h[0], 64512, []string{"192.168.1.0/26", "192.168.2.0/26"}, tor(h[0], h[1], 64999))
	r.apply(c)
	o.waitRoute("192.168.1.0/26")
	var tags strings.Builder
	for i := range 1100 {
		fmt.Fprintf(&tags, "65000:%d ", i)
	}
	c.Tags = map[netip.Prefix]string{c.Announce[0]: tags.String()}
	r.apply(c)
	o.waitNoRoute("192.168.1.0/26")
	o.waitRoute("192.168.2.0/26")
	if st := r.status(h[1]); st.State != StateUp {
		t.Errorf("the session: %+v", st)
	}
	if got := r.explain("192.168.1.0/26"); !strings.Contains(got, "withheld tor-"+h[1].String()+": BGP's own rules") || !strings.Contains(got, "do not fit into a message") {
		t.Errorf("explained as\n%s", got)
	}
}

// TestGroupOutlivesMember: peers to which the same is advertised are judged alike, also when one of them goes or is
// given other filters: by the filters that the others have, and a reflector's clients are sent what others announce.
func TestGroupOutlivesMember(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(peers []Peer) []Peer{
		"goes":                 func(peers []Peer) []Peer { return peers[:2] },
		"waits for its link":   func(peers []Peer) []Peer { peers[2].Waiting = "no link"; return peers },
		"is given other rules": func(peers []Peer) []Peer { peers[2].Filters = "none"; return peers },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := hosts(t, 4)
			us, other := newRun(t, SpeakerOptions{}), newRun(t, SpeakerOptions{})
			var peers []Peer
			for _, a := range h[1:] {
				p := waiting(tor(h[0], a, 64512))
				p.Reflect, p.ClusterID, p.Filters = true, netip.MustParseAddr("244.0.0.1"), "some"
				peers = append(peers, p)
			}
			c := testConfig(h[0], 64512, nil, peers...)
			c.Filters = map[string]Filter{
				"some": parse(t, `{"exportV4":[{"action":"Reject","cidr":"192.168.66.0/26","matchOperator":"Equal"}]}`),
				"none": parse(t, `{"exportV4":[{"action":"Reject"}]}`),
			}
			us.apply(c)
			said := testConfig(h[1], 64512, []string{"192.168.11.0/26"}, tor(h[1], h[0], 64512))
			other.apply(said)
			for _, a := range h[2:] {
				newRun(t, SpeakerOptions{}).apply(testConfig(a, 64512, nil, tor(a, h[0], 64512)))
			}
			advertised := func(want ...string) {
				t.Helper()
				var got []string
				poll(t, func() string { return fmt.Sprintf("advertised are %q, want %q", got, want) }, func() bool {
					got = nil
					err := us.Query(t.Context(), Query{Table: TableAdvertised, Peer: h[2]}, func(r Route) bool { got = append(got, r.Prefix.String()); return true })
					slices.Sort(got)
					return err == nil && slices.Equal(got, want)
				})
			}
			for _, a := range h[1:] {
				us.waitUp(a)
			}
			advertised("192.168.11.0/26")
			next := testConfig(h[0], 64512, []string{"192.168.66.0/26", "192.168.67.0/26"}, change(slices.Clone(peers))...)
			next.Filters = c.Filters
			us.apply(next)
			said.Announce = append(said.Announce, netip.MustParsePrefix("192.168.12.0/26"))
			other.apply(said)
			advertised("192.168.11.0/26", "192.168.12.0/26", "192.168.67.0/26")
		})
	}
}
