package store_test

import (
	"slices"
	"testing"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/store"
)

func TestMode(t *testing.T) {
	for _, e := range store.Encapsulations() {
		m := store.NewMode(e, 5000, 4790)
		got, err := store.ParseMode(m.String())
		if err != nil || got != m {
			t.Errorf("ParseMode(%q) = %v, %v; want %v", m, got, err, m)
		}
		if len(m.Encaps()) == 0 || !slices.IsSorted(m.Encaps()) {
			t.Errorf("%s: forms %v", m, m.Encaps())
		}
	}
	for _, s := range []string{"", "vxlan/1/2", "VXLAN", "VXLAN/1", "VXLAN/0/1", "VXLAN/1/0", "VXLAN/1/2/3", "VXLAN/01/2", "VXLAN/16777216/1", "Direct/1/2", "IPIP/"} {
		if m, err := store.ParseMode(s); err == nil {
			t.Errorf("ParseMode(%q) = %v, want an error", s, m)
		}
	}
}

func TestVXLANNumbers(t *testing.T) {
	spec := func(vni, port int) *v3.FelixConfigurationSpec {
		return &v3.FelixConfigurationSpec{VXLANVNI: &vni, VXLANPort: &port}
	}
	for _, tt := range []struct {
		specs []*v3.FelixConfigurationSpec
		vni   uint32
		port  uint16
	}{
		{nil, 4096, 4789},
		{[]*v3.FelixConfigurationSpec{nil, spec(5000, 4790)}, 5000, 4790},
		{[]*v3.FelixConfigurationSpec{spec(5000, 4790), spec(6000, 0)}, 6000, 4790},
		{[]*v3.FelixConfigurationSpec{spec(-1, 1<<16)}, 4096, 4789},
	} {
		if vni, port := store.VXLANNumbers(tt.specs...); vni != tt.vni || port != tt.port {
			t.Errorf("%v: %d, %d; want %d, %d", tt.specs, vni, port, tt.vni, tt.port)
		}
	}
}
