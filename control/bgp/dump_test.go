package bgp

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/osrg/gobgp/v4/pkg/packet/mrt"
)

// TestDump reads tables with GoBGP's codec: what was let in and begins here, and what peers
// sent.
func TestDump(t *testing.T) {
	t.Parallel()
	a, b, h := pair(t, []string{"192.168.1.0/26"}, []string{"192.168.2.0/26", "10.0.0.0/8"})
	a.waitPath("192.168.2.0/26")
	b.waitPath("192.168.1.0/26")
	poll(t, a.dump, func() bool { return a.status(h[1]).Received == 2 })
	peers := fmt.Sprintf("%s 0.0.0.0 64512, %s %s 64512", h[0], h[1], h[1])
	for _, c := range []struct {
		received bool
		want     []string
	}{
		{false, []string{"192.168.1.0/26 from 0", "192.168.2.0/26 from 1"}},
		{true, []string{"10.0.0.0/8 from 1", "192.168.2.0/26 from 1"}},
	} {
		var all []byte
		if err := a.Dump(t.Context(), c.received, func(part []byte) error { all = append(all, part...); return nil }); err != nil {
			t.Fatal(err)
		}
		s := bufio.NewScanner(bytes.NewReader(all))
		s.Split(mrt.SplitMrt)
		var got []string
		for s.Scan() {
			head, err := mrt.ParseHeader(s.Bytes()[:mrt.MRT_COMMON_HEADER_LEN])
			if err != nil {
				t.Fatal(err)
			}
			m, err := mrt.ParseBody(s.Bytes()[mrt.MRT_COMMON_HEADER_LEN:], head)
			if err != nil {
				t.Fatal(err)
			}
			switch body := m.Body.(type) {
			case *mrt.PeerIndexTable:
				if text := fmt.Sprintf("%s %s %d, %s %s %d", body.Peers[0].BgpId, body.Peers[0].IpAddress, body.Peers[0].AS, body.Peers[1].BgpId, body.Peers[1].IpAddress, body.Peers[1].AS); text != peers || len(body.Peers) != 2 {
					t.Errorf("peers %s, want %s", text, peers)
				}
			case *mrt.Rib:
				for _, e := range body.Entries {
					got = append(got, fmt.Sprintf("%s from %d", body.Prefix, e.PeerIndex))
					if len(e.PathAttributes) < 4 { // ORIGIN, AS_PATH, NEXT_HOP, LOCAL_PREF
						t.Errorf("%s: attributes %v", body.Prefix, e.PathAttributes)
					}
				}
			}
		}
		if slices.Sort(got); s.Err() != nil || !cmp.Equal(c.want, got) {
			t.Errorf("received %t: %v, want %v (%v)", c.received, got, c.want, s.Err())
		}
	}
	gone := errors.New("nobody reads")
	if err := a.Dump(t.Context(), false, func([]byte) error { return gone }); !errors.Is(err, gone) {
		t.Errorf("error %v, want %v", err, gone)
	}
}
