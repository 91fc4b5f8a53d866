package history_test

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/routerd/routerd/control/bgp/engine/history"
	"github.com/routerd/routerd/control/bgp/engine/wire"
)

var (
	ten    = wire.FromNetip(netip.MustParsePrefix("10.0.0.0/8"))
	eleven = wire.FromNetip(netip.MustParsePrefix("11.0.0.0/8"))
)

func internal() history.Peer {
	p := history.Peer{AS: 65000, ID: 7, AS4: true}
	p.Session.Family[wire.IPv4].Enabled = true
	return p
}

// announce is an UPDATE with these attributes beside ORIGIN.
func announce(t *testing.T, attributes []byte, list ...wire.Prefix) []byte {
	t.Helper()
	var p wire.Packer
	if err := p.Announce(wire.IPv4, []byte{192, 0, 2, 1}, append([]byte{0x40, 1, 1, 0}, attributes...)); err != nil {
		t.Fatal(err)
	}
	for _, prefix := range list {
		p.Add(prefix)
	}
	return slices.Clone(p.Bytes())
}

func withdraw(list ...wire.Prefix) []byte {
	var p wire.Packer
	p.Withdraw(wire.IPv4)
	for _, prefix := range list {
		p.Add(prefix)
	}
	return slices.Clone(p.Bytes())
}

func endOfRIB() []byte {
	var p wire.Packer
	p.EndOfRIB(wire.IPv4)
	return slices.Clone(p.Bytes())
}

func demarcation(subtype byte) []byte {
	return wire.AppendMessage(nil, wire.RouteRefresh, []byte{0, 1, subtype, 1})
}

var (
	pathOf = func(as byte) []byte { return []byte{0x40, 2, 6, 2, 1, 0, 0, 0xfd, as} } // 64768 + as
	pref   = []byte{0x40, 5, 4, 0, 0, 0, 100}
	path   = append(pathOf(1), pref...)
)

// TestFold: what the peer has is what came last of each prefix, and after a refresh what came
// in it.
func TestFold(t *testing.T) {
	t.Parallel()
	h := history.New(internal())
	has := func(want ...wire.Prefix) {
		t.Helper()
		var got []wire.Prefix
		for p := range h.All() {
			got = append(got, p)
		}
		slices.SortFunc(got, func(a, b wire.Prefix) int { return a.Netip().Addr().Compare(b.Netip().Addr()) })
		if !slices.Equal(got, want) || h.Len() != len(want) {
			t.Errorf("the peer has %v; want %v", got, want)
		}
	}
	for _, step := range []struct {
		b    []byte
		want []wire.Prefix
	}{
		{announce(t, path, ten, eleven), []wire.Prefix{ten, eleven}},
		{endOfRIB(), []wire.Prefix{ten, eleven}},
		{withdraw(ten), []wire.Prefix{eleven}},
		{announce(t, path, ten), []wire.Prefix{ten, eleven}},
		{demarcation(1), []wire.Prefix{ten, eleven}},
		{slices.Concat(announce(t, path, eleven), demarcation(2)), []wire.Prefix{eleven}},
		{withdraw(ten), []wire.Prefix{eleven}},
	} {
		if err := h.Bytes(step.b); err != nil {
			t.Fatal(err)
		}
		has(step.want...)
	}
	if !h.Ended(wire.IPv4) || h.Ended(wire.IPv6) || h.Needless != 1 {
		t.Errorf("End-of-RIB %t and %t, %d withdrawals of what was not there", h.Ended(wire.IPv4), h.Ended(wire.IPv6), h.Needless)
	}
	for p, v := range h.All() {
		if v.PathText() != "64769" {
			t.Errorf("%s has AS_PATH %s", p.Netip(), v.PathText())
		}
	}
}

// TestRules: a history that breaks a rule is told by the message that does.
func TestRules(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name     string
		external bool
		messages [][]byte
		want     string
	}{
		{"half a message", false, [][]byte{withdraw(ten)[:20]}, "no whole message"},
		{"an OPEN", false, [][]byte{wire.AppendMessage(nil, wire.Open, make([]byte, 10))}, "type 1"},
		{"its own AS", false, [][]byte{announce(t, append([]byte{0x40, 2, 6, 2, 1, 0, 0, 0xfd, 0xe8}, pref...), ten)}, "the peer's AS 65000"},
		{"its own path", false, [][]byte{announce(t, append(slices.Clone(path), 0x80, 9, 4, 0, 0, 0, 7), ten)}, "ORIGINATOR_ID"},
		{"LOCAL_PREF to another AS", true, [][]byte{announce(t, path, ten)}, "attributes"},
		{"no AS_PATH", false, [][]byte{announce(t, pref, ten)}, "attributes"},
		{"a second End-of-RIB", false, [][]byte{endOfRIB(), endOfRIB()}, "second End-of-RIB"},
		{"a refresh that ends", false, [][]byte{demarcation(2)}, "did not begin"},
		{"a refresh in a refresh", false, [][]byte{demarcation(1), demarcation(1)}, "begins in another"},
		{"a refresh of another kind", false, [][]byte{demarcation(9)}, "subtype 9"},
		{"a short ROUTE-REFRESH", false, [][]byte{wire.AppendMessage(nil, wire.RouteRefresh, []byte{0, 1, 0, 1, 0})}, "5 bytes"},
		{"a refresh of nothing known", false, [][]byte{wire.AppendMessage(nil, wire.RouteRefresh, []byte{0, 9, 0, 1})}, "AFI 9"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			p := internal()
			p.External = tt.external
			h := history.New(p)
			for i, b := range tt.messages {
				err := h.Bytes(b)
				if last := i == len(tt.messages)-1; last != (err != nil) || last && !strings.Contains(err.Error(), tt.want) {
					t.Fatalf("message %d: %v, want %q", i, err, tt.want)
				}
			}
		})
	}
}

// TestRefreshBeforeEnd: to a peer that waits for End-of-RIB no refresh is marked before (RFC 7313 section 4).
func TestRefreshBeforeEnd(t *testing.T) {
	t.Parallel()
	p := internal()
	p.Ends = true
	h := history.New(p)
	if err := h.Bytes(demarcation(1)); err == nil || !strings.Contains(err.Error(), "before End-of-RIB") {
		t.Errorf("marked before: %v", err)
	}
	if err := h.Bytes(slices.Concat(endOfRIB(), demarcation(1), demarcation(2))); err != nil {
		t.Error(err)
	}
}
