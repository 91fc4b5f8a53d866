package store_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/store"
)

func TestParseBMP(t *testing.T) {
	t.Parallel()
	at := netip.MustParseAddrPort
	for _, c := range []struct {
		value string
		want  []store.BMP
		err   string // a part of it
	}{
		{"off", nil, "<nil>"},
		{"10.0.0.5:11019", []store.BMP{{at("10.0.0.5:11019"), true, true, true, time.Minute}}, "<nil>"},
		{"10.0.0.5:11019 loc-rib, [2001:db8::5]:1790 pre-policy post-policy stats=0s", []store.BMP{
			{at("10.0.0.5:11019"), false, false, true, time.Minute}, {at("[2001:db8::5]:1790"), true, true, false, 0},
		}, "<nil>"},
		{"10.0.0.5:11019 stats=5s", []store.BMP{{at("10.0.0.5:11019"), true, true, true, 5 * time.Second}}, "<nil>"},
		{"", nil, "must be \"off\", or collectors"},
		{"10.0.0.5:11019,", nil, "must be \"off\", or collectors"},
		{"10.0.0.5", nil, `"10.0.0.5": must be`},
		{"10.0.0.5:0", nil, `"10.0.0.5:0": must be`},
		{"collector:11019", nil, `"collector:11019": must be`},
		{"10.0.0.5:11019 all", nil, `"all": must be`},
		{"10.0.0.5:11019 stats=soon", nil, `"stats=soon": the time between two reports must be 0 for none, or from 1s to 1h`},
		{"10.0.0.5:11019 stats=10ms", nil, "from 1s to 1h"},
		{"10.0.0.5:1,10.0.0.5:1", nil, "the collector 10.0.0.5:1 is there twice"},
	} {
		got, err := store.ParseBMP(c.value)
		if diff := cmp.Diff(c.want, got, cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); diff != "" || !strings.Contains(fmt.Sprint(err), c.err) {
			t.Errorf("%q: %v (-want +got):\n%s", c.value, err, diff)
		}
	}
	conf := resource(t, store.KindBGPConfiguration, "default", `{}`)
	for value, want := range map[string]string{
		"10.0.0.5:1,10.0.0.5:1": `metadata.annotations[routerd.io/bmp]: "10.0.0.5:1,10.0.0.5:1": the collector 10.0.0.5:1 is there twice`,
		"10.0.0.5:1":            "<nil>",
	} {
		store.Meta(conf).SetAnnotations(map[string]string{store.AnnotationBMP: value})
		if err := store.Validate(conf); fmt.Sprint(err) != want {
			t.Errorf("%q: %v; want %s", value, err, want)
		}
	}
}
