package mrt

import (
	"bufio"
	"bytes"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"
	"github.com/osrg/gobgp/v4/pkg/packet/mrt"
)

// TestDump holds the records to GoBGP's codec.
func TestDump(t *testing.T) {
	t.Parallel()
	d := NewDump(time.Unix(1700000000, 0))
	b, err := d.Peers(nil, 0x0a000001, "", []Peer{
		{ID: 0x0a000001, Addr: netip.IPv4Unspecified(), AS: 64512},
		{ID: 0x0a010001, Addr: netip.MustParseAddr("10.1.0.1"), AS: 4200000000},
		{Addr: netip.MustParseAddr("fe80::1"), AS: 65001},
	})
	if err != nil {
		t.Fatal(err)
	}
	attributes := []byte{0x40, 1, 1, 0, 0x40, 2, 6, 2, 1, 0xfa, 0x56, 0xea, 0x00} // IGP, 4200000000
	six := netip.MustParseAddr("2001:db8::1").AsSlice()
	b = d.Prefix(b, netip.MustParsePrefix("192.168.1.64/26"), []Entry{
		{Peer: 0, Originated: time.Unix(1600000000, 0), NextHop: []byte{10, 0, 0, 1}, Attributes: []byte{0x40, 1, 1, 0, 0x40, 2, 0}},
		{Peer: 1, Originated: time.Unix(1600000001, 0), NextHop: []byte{10, 1, 0, 1}, Attributes: attributes},
	})
	b = d.Prefix(b, netip.MustParsePrefix("0.0.0.0/0"), []Entry{{Peer: 2, Originated: time.Unix(7, 0), NextHop: six, Attributes: attributes}})
	b = d.Prefix(b, netip.MustParsePrefix("2001:db8:1::/48"), []Entry{
		{Peer: 2, Originated: time.Unix(8, 0), NextHop: append(six, netip.MustParseAddr("fe80::1").AsSlice()...), Attributes: attributes},
	})
	want := []string{
		"peers of 10.0.0.1: 0.0.0.0 10.0.0.1 64512, 10.1.0.1 10.1.0.1 4200000000, fe80::1 0.0.0.0 65001",
		"0 192.168.1.64/26: 0 at 1600000000 via 10.0.0.1 [], 1 at 1600000001 via 10.1.0.1 [4200000000]",
		"1 0.0.0.0/0: 2 at 7 via 2001:db8::1 [4200000000]",
		"2 2001:db8:1::/48: 2 at 8 via 2001:db8::1 [4200000000]",
	}
	if diff := cmp.Diff(want, read(t, b)); diff != "" {
		t.Errorf("records (-want +got):\n%s", diff)
	}
	if _, err := d.Peers(nil, 0, "", make([]Peer, 65536)); err == nil {
		t.Error("65,536 peers were written")
	}
}

func read(t *testing.T, dump []byte) (out []string) {
	t.Helper()
	s := bufio.NewScanner(bytes.NewReader(dump))
	s.Split(mrt.SplitMrt)
	for s.Scan() {
		h, err := mrt.ParseHeader(s.Bytes()[:mrt.MRT_COMMON_HEADER_LEN])
		if err != nil {
			t.Fatal(err)
		}
		m, err := mrt.ParseBody(s.Bytes()[mrt.MRT_COMMON_HEADER_LEN:], h)
		if err != nil {
			t.Fatal(err)
		}
		if h.GetTime().Unix() != 1700000000 {
			t.Errorf("a record of %v", h.GetTime())
		}
		text := ""
		switch body := m.Body.(type) {
		case *mrt.PeerIndexTable:
			text = fmt.Sprintf("peers of %s:", body.CollectorBgpId)
			for _, p := range body.Peers {
				text += fmt.Sprintf(" %s %s %d,", p.IpAddress, p.BgpId, p.AS)
			}
		case *mrt.Rib:
			text = fmt.Sprintf("%d %s:", body.SequenceNumber, body.Prefix)
			for _, e := range body.Entries {
				text += fmt.Sprintf(" %d at %d via %s,", e.PeerIndex, e.OriginatedTime, attributes(e.PathAttributes))
			}
		}
		out = append(out, text[:len(text)-1])
	}
	if err := s.Err(); err != nil {
		t.Fatal(err)
	}
	return out
}

func attributes(list []packet.PathAttributeInterface) string {
	hop, path := "", []uint32{}
	for _, a := range list {
		switch a := a.(type) {
		case *packet.PathAttributeNextHop:
			hop = a.Value.String()
		case *packet.PathAttributeMpReachNLRI:
			hop = a.Nexthop.String()
		case *packet.PathAttributeAsPath:
			for _, s := range a.Value {
				path = append(path, s.GetAS()...)
			}
		}
	}
	return fmt.Sprintf("%s %v", hop, path)
}
