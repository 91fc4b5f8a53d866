package lab

import (
	"encoding/hex"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func frame(t *testing.T, parts ...string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.ReplaceAll(strings.Join(parts, ""), " ", ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// The frames are put together by hand from RFC 791, 2003, 768 and 7348.
const (
	ether = "020000000002 020000000001 0800"
	icmp  = "0800 0000 0001 0001"
	inner = "4500001c 00004000 3e010000 c0a80001 c0a80041" // 192.168.0.1 > 192.168.0.65, DF, TTL 62
)

const ether6 = "020000000002 020000000001 86dd"

// header6 is an IPv6 header (RFC 8200): length of what follows, next header and
// hop limit, from fd00:1::11 to fd00:2::11.
func header6(length, next, hops string) string {
	return "60000000" + length + next + hops + "fd000001000000000000000000000011" + "fd000002000000000000000000000011"
}

func TestParseFrame(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, frame, want string
	}{
		{
			"plain ICMP", ether + "4500001c 00000000 40010000 0a01000b 0a02000b" + icmp,
			"10.1.0.11 > 10.2.0.11 proto 1 ttl 64 length 28",
		},
		{
			"IPIP", ether + "45000030 00000000 40040000 0a01000b 0a02000b" + inner + icmp,
			"10.1.0.11 > 10.2.0.11 proto 4 ttl 64 length 48 [192.168.0.1 > 192.168.0.65 proto 1 ttl 62 length 28 DF]",
		},
		{
			"VXLAN", ether + "4500004e 00000000 40110000 0a01000b 0a02000b" + "d000 12b5 0000 0000" + "08000000 00100000" + ether + inner + icmp,
			"10.1.0.11 > 10.2.0.11 proto 17 ttl 64 length 78 port 53248 > 4789 vni 4096 [192.168.0.1 > 192.168.0.65 proto 1 ttl 62 length 28 DF]",
		},
		{
			"TCP", ether + "45000028 00000000 40060000 0a01000b 0a02000b" + "c000 00b3 00000000",
			"10.1.0.11 > 10.2.0.11 proto 6 ttl 64 length 40 port 49152 > 179",
		},
		{
			"a later fragment", ether + "4500001c 00000010 40110000 0a01000b 0a02000b" + "c000 12b5 00000000",
			"10.1.0.11 > 10.2.0.11 proto 17 ttl 64 length 28 fragment",
		},
		{
			"options before the payload", ether + "46000020 00000000 40040000 0a01000b 0a02000b 01010101" + inner,
			"10.1.0.11 > 10.2.0.11 proto 4 ttl 64 length 32 [192.168.0.1 > 192.168.0.65 proto 1 ttl 62 length 28 DF]",
		},
		{
			"plain ICMPv6", ether6 + header6("0008", "3a", "40") + "8000 0000 0001 0001",
			"fd00:1::11 > fd00:2::11 proto 58 ttl 64 length 48 DF",
		},
		{
			"IPv6 in IPv6", ether6 + header6("0030", "29", "40") + header6("0008", "3a", "3e") + "8000 0000 0001 0001",
			"fd00:1::11 > fd00:2::11 proto 41 ttl 64 length 88 DF [fd00:1::11 > fd00:2::11 proto 58 ttl 62 length 48 DF]",
		},
		{
			"IPv4 in IPv6", ether6 + header6("001c", "04", "40") + inner + icmp,
			"fd00:1::11 > fd00:2::11 proto 4 ttl 64 length 68 DF [192.168.0.1 > 192.168.0.65 proto 1 ttl 62 length 28 DF]",
		},
		{
			"VXLAN of IPv6 over IPv6", ether6 + header6("004e", "11", "40") + "d000 12b5 0000 0000" + "08000000 00100000" + ether6 + header6("0008", "3a", "3e") + "8000 0000 0001 0001",
			"fd00:1::11 > fd00:2::11 proto 17 ttl 64 length 118 DF port 53248 > 4789 vni 4096 [fd00:1::11 > fd00:2::11 proto 58 ttl 62 length 48 DF]",
		},
		{
			"a later IPv6 fragment", ether6 + header6("0010", "2c", "40") + "11000010 00000001 d00012b5 00000000",
			"fd00:1::11 > fd00:2::11 proto 17 ttl 64 length 56 fragment",
		},
		{
			"VXLAN without a VNI", ether + "45000024 00000000 40110000 0a01000b 0a02000b" + "d000 12b5 0000 0000" + "00000000 00100000",
			"10.1.0.11 > 10.2.0.11 proto 17 ttl 64 length 36 port 53248 > 4789",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			p, ok := parseFrame(frame(t, tt.frame))
			if !ok {
				t.Fatal("not read as IPv4")
			}
			if got := p.String(); got != tt.want {
				t.Errorf("got  %s\nwant %s", got, tt.want)
			}
		})
	}
}

func TestParseFrameRefuses(t *testing.T) {
	t.Parallel()
	for name, f := range map[string]string{
		"empty":    "",
		"ARP":      "ffffffffffff 020000000001 0806 0001",
		"IPv6":     "020000000002 020000000001 86dd 60000000",
		"cut off":  ether + "4500",
		"IHL of 4": ether + "4400001c 00000000 40010000 0a01000b 0a02000b",
	} {
		if p, ok := parseFrame(frame(t, f)); ok {
			t.Errorf("%s: read as %s", name, p)
		}
	}
}

// Whatever is on the wire, it is read without a panic, and what is cut off is
// never read as a tunnel's packet that is not there.
func TestParseFrameAnything(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		b := rapid.SliceOfN(rapid.Byte(), 0, 200).Draw(t, "frame")
		if len(b) > 24 {
			copy(b[12:], []byte{0x08, 0x00, 0x45})
			b[23] = rapid.SampledFrom([]byte{ProtoIPIP, ProtoUDP, ProtoTCP, ProtoICMP}).Draw(t, "proto")
		}
		p, ok := parseFrame(b)
		if ok && p.Tunnelled() && len(b) < etherHeaderLen+40 {
			t.Fatalf("%d bytes read as %s", len(b), p)
		}
	})
}
