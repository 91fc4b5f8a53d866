package rule

import (
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
)

// TestTakes: a rule matters to a range if it names addresses of it and leads elsewhere.
func TestTakes(t *testing.T) {
	t.Parallel()
	pool := netip.MustParsePrefix("192.168.0.0/16")
	base := Rule{Family: dataplane.IPv4, From: netip.MustParsePrefix("192.168.1.0/24"), Action: "lookup", Table: 100}
	for name, tt := range map[string]struct {
		change func(*Rule)
		want   bool
	}{
		"from":          {func(*Rule) {}, true},
		"to":            {func(r *Rule) { r.From, r.To = netip.Prefix{}, pool }, true},
		"drops":         {func(r *Rule) { r.Action = "blackhole" }, true},
		"all packets":   {func(r *Rule) { r.From = netip.Prefix{} }, false},
		"others":        {func(r *Rule) { r.From = netip.MustParsePrefix("10.0.0.0/8") }, false},
		"main table":    {func(r *Rule) { r.Table = unix.RT_TABLE_MAIN }, false},
		"marked":        {func(r *Rule) { r.Mark = 1 }, false},
		"a port":        {func(r *Rule) { r.Narrow = true }, false},
		"not from":      {func(r *Rule) { r.Not = true }, false},
		"other family":  {func(r *Rule) { r.Family = dataplane.IPv6 }, false},
		"goes on later": {func(r *Rule) { r.Action = "goto" }, false},
	} {
		r := base
		tt.change(&r)
		if got := r.Takes(pool); got != tt.want {
			t.Errorf("%s: %t, want %t", name, got, tt.want)
		}
	}
}
