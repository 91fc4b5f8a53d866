package bgp

import (
	"net/netip"
	"testing"
)

// TestNamed: of the rules that accept a path, that with the CIDR says by which name it
// came in; what a rule's own operations have changed does not count.
func TestNamed(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		spec string
		want int
	}{
		"no rules":                {`{}`, 0},
		"a rule for all":          {`{"importV4":[{"action":"Accept"}]}`, 0},
		"equal":                   {`{"importV4":[{"cidr":"10.9.1.5/32","matchOperator":"Equal","action":"Accept"}]}`, 32},
		"in":                      {`{"importV4":[{"cidr":"10.9.1.0/27","matchOperator":"In","action":"Accept"}]}`, 27},
		"in something else":       {`{"importV4":[{"cidr":"10.9.2.0/27","matchOperator":"In","action":"Accept"}]}`, 0},
		"not in something else":   {`{"importV4":[{"cidr":"10.9.2.0/27","matchOperator":"NotIn","action":"Accept"}]}`, 0},
		"the first one":           {`{"importV4":[{"cidr":"10.9.0.0/16","matchOperator":"In","action":"Accept"},{"cidr":"10.9.1.5/32","matchOperator":"Equal","action":"Accept"}]}`, 16},
		"of another community":    {`{"importV4":[{"cidr":"10.9.1.5/32","matchOperator":"Equal","communities":{"values":["64512:9"]},"action":"Accept"}]}`, 0},
		"of its community":        {`{"importV4":[{"cidr":"10.9.1.5/32","matchOperator":"Equal","communities":{"values":["64512:7"]},"action":"Accept"}]}`, 32},
		"of another type of peer": {`{"importV4":[{"cidr":"10.9.1.5/32","matchOperator":"Equal","peerType":"iBGP","action":"Accept"}]}`, 0},
		"with a changed path": {
			`{"importV4":[{"cidr":"10.9.1.5/32","matchOperator":"Equal","asPathPrefix":[64999],"operations":[{"prependASPath":{"prefix":[64512]}}],"action":"Accept"}]}`, 32,
		},
		"to export":           {`{"exportV4":[{"cidr":"10.9.1.5/32","matchOperator":"Equal","action":"Accept"}]}`, 0},
		"what it rejects":     {`{"importV4":[{"cidr":"10.9.1.5/32","matchOperator":"Equal","action":"Reject"}]}`, 0},
		"of the other family": {`{"importV6":[{"cidr":"fd00::/64","matchOperator":"In","action":"Accept"}]}`, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := netip.MustParseAddr("10.0.0.9")
			p := tor(netip.MustParseAddr("10.0.0.1"), a, 64999)
			p.Filters = "f"
			c := Config{ASN: 64512, Peers: []Peer{p}, Filters: map[string]Filter{"f": parse(t, tt.spec)}}
			r := Route{Prefix: netip.MustParsePrefix("10.9.1.5/32"), path: []uint32{64512, 64999}, Communities: []string{"64512:7"}}
			if got := newPolicy(&c).named(p, r.judged()); got != tt.want {
				t.Errorf("%s: named by %d bits, want %d", tt.spec, got, tt.want)
			}
		})
	}
}

// TestNamedFollowsFilters: by which name a path came in is told with the path, and
// again when the filters change and the path does not.
func TestNamedFollowsFilters(t *testing.T) {
	t.Parallel()
	h := hosts(t, 2)
	there := newRun(t, SpeakerOptions{})
	there.apply(testConfig(h[1], 64999, []string{"172.20.1.0/24", "172.20.2.0/24"}, waiting(tor(h[1], h[0], 64512))))
	config := func(spec string) Config {
		p := tor(h[0], h[1], 64999)
		if spec != "" {
			p.Filters = "f"
		}
		c := testConfig(h[0], 64512, nil, p)
		if spec != "" {
			c.Filters = map[string]Filter{"f": parse(t, spec)}
		}
		return c
	}
	here := newRun(t, SpeakerOptions{})
	want := func(first, second int) {
		t.Helper()
		poll(t, here.dump, func() bool {
			a, okA := here.path("172.20.1.0/24")
			b, okB := here.path("172.20.2.0/24")
			return okA && okB && a.Announced.Value().Named == first && b.Announced.Value().Named == second
		})
	}
	const one, other = `{"importV4":[{"cidr":"172.20.1.0/24","matchOperator":"Equal","action":"Accept"}]}`,
		`{"importV4":[{"cidr":"172.20.0.0/16","matchOperator":"In","action":"Accept"}]}`
	here.apply(config(one))
	want(24, 0)
	here.apply(config(other))
	want(16, 16)
	here.apply(config(""))
	want(0, 0)
	here.apply(config(one))
	want(24, 0)
}
