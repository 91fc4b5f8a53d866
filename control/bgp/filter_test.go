package bgp

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseFilter(t *testing.T) {
	t.Parallel()
	f := parse(t, `{"exportV4":[{"cidr":"10.0.0.0/8","prefixLength":{"min":16,"max":24},"source":"RemotePeers","interface":"eth*","matchOperator":"In","peerType":"eBGP",
		"communities":{"values":["65000:1"]},"asPathPrefix":[65000],"priority":1024,"action":"Accept",
		"operations":[{"addCommunity":{"value":"65000:2"}},{"prependASPath":{"prefix":[65000,65001]}},{"setPriority":{"value":512}}]},{"action":"Reject"}],
		"importV6":[{"cidr":"fd00::1/8","matchOperator":"NotIn","action":"Reject"}]}`)
	want := Filter{
		Export4: []FilterRule{{
			CIDR: netip.MustParsePrefix("10.0.0.0/8"), Min: 16, Max: 24, RemotePeers: true, Interface: "eth*", PeerType: "eBGP", Priority: 1024,
			Community: "65000:1", ASPath: []uint32{65000}, Accept: true,
			Operations: []Operation{{AddCommunity: "65000:2"}, {PrependAS: []uint32{65000, 65001}}, {SetPriority: 512}},
		}, {Max: 32}},
		Import6: []FilterRule{{CIDR: netip.MustParsePrefix("fd00::/8"), Not: true, Min: 8, Max: 128}},
	}
	if diff := cmp.Diff(want, f, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	for rule, says := range map[string]string{
		`{"action":"Drop"}`:                                                                               `spec.importV4[0].action "Drop": want Accept or Reject`,
		`{"action":"Accept","source":"Static"}`:                                                           "source",
		`{"action":"Accept","peerType":"both"}`:                                                           "peerType",
		`{"action":"Accept","cidr":"fd00::/8","matchOperator":"In"}`:                                      "cidr",
		`{"action":"Accept","cidr":"10.0.0.0/8"}`:                                                         "matchOperator",
		`{"action":"Accept","cidr":"10.0.0.0/8","matchOperator":"In","prefixLength":{"max":33}}`:          "prefixLength",
		`{"action":"Accept","cidr":"10.0.0.0/8","matchOperator":"In","prefixLength":{"min":30,"max":20}}`: "prefixLength",
		`{"action":"Accept","priority":0}`:                                                                "priority",
		`{"action":"Accept","communities":{"values":["1:2","3:4"]}}`:                                      "communities.values",
		`{"action":"Accept","communities":{"values":["1:70000"]}}`:                                        "communities.values",
		`{"action":"Reject","operations":[{"setPriority":{"value":1}}]}`:                                  "operations",
		`{"action":"Accept","operations":[{}]}`:                                                           "operations[0]",
		`{"action":"Accept","operations":[{"prependASPath":{"prefix":[]}}]}`:                              "operations[0].prependASPath",
		`{"action":"Accept","operations":[{"addCommunity":{"value":"x"}}]}`:                               "operations[0].addCommunity",
		`{"action":"Accept","operations":[{"setPriority":{"value":0}}]}`:                                  "operations[0].setPriority",
		`{"action":7}`: "spec",
	} {
		if _, err := parseFilter([]byte(`{"spec":{"importV4":[` + rule + `]}}`)); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: error %v, want one that says %q", rule, err, says)
		}
	}
}

func FuzzParseFilter(f *testing.F) {
	f.Add([]byte(`{"spec":{"importV4":[{"cidr":"10.0.0.0/8","matchOperator":"In","action":"Accept"}]}}`))
	f.Add([]byte(`{"spec":{"exportV6":[{"communities":{"values":["1:2:3"]},"action":"Reject","prefixLength":{"min":0}}]}}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		filter, err := parseFilter(raw)
		if err != nil {
			return
		}
		// What is taken can be judged by.
		c := &Config{ASN: 1, Filters: map[string]Filter{"f": filter}, Peers: []Peer{{Addr: netip.MustParseAddr("10.0.0.1"), ASN: 2, Filters: "f"}}}
		p := newPolicy(c)
		for _, prefix := range prefixes("0.0.0.0/0", "10.1.2.0/24", "::/0", "2001:db8::/32") {
			r := Route{Prefix: prefix, Hop: Hop{NextHop: netip.MustParseAddr("10.0.0.9")}, path: []uint32{2}}
			for _, judge := range []func(*judged) verdict{p.importsOf(c.Peers[0]), p.exportsOf(c.Peers[0])} {
				if v := judge(r.judged()); v.rule != nil && v.accept != v.rule.Accept {
					t.Errorf("%s: %+v", prefix, v)
				}
			}
		}
	})
}
