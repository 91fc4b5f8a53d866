package topology

import (
	"net/netip"

	"github.com/gaissmai/bart"
	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// Pools are the pools of the cluster, and the numbers of FelixConfiguration that
// drivers use for them.
type Pools struct {
	ByName   map[string]*cluster.Pool // to be read; [Pools.Replace] changes it
	Settings Settings                 // likewise, by [Pools.SetFelix]

	byCIDR *bart.Table[string]                   // to the pool's name
	felix  map[string]*v3.FelixConfigurationSpec // by resource name
}

// NewPools returns no pools yet.
func NewPools() *Pools {
	return &Pools{ByName: map[string]*cluster.Pool{}, Settings: newSettings(), byCIDR: new(bart.Table[string]), felix: map[string]*v3.FelixConfigurationSpec{}}
}

// Replace replaces a pool; nil, or one without a valid CIDR: there is none any more.
// It returns what was and is there, and whether they differ in what counts here.
func (t *Pools) Replace(name string, p *cluster.Pool) (old, now *cluster.Pool, changed bool) {
	if p != nil && !p.CIDR.IsValid() {
		p = nil
	}
	old = t.ByName[name]
	if samePool(old, p) {
		return old, p, false
	}
	delete(t.ByName, name)
	if p != nil {
		t.ByName[name] = p
	}
	for _, p := range []*cluster.Pool{old, p} {
		if p != nil {
			t.elect(p.CIDR)
		}
	}
	return old, p, true
}

// elect notes which pool has a CIDR. Validation refuses a second one of
// the same; should the store hold two, all hosts take the same.
func (t *Pools) elect(cidr netip.Prefix) {
	best := ""
	for name, p := range t.ByName {
		if p.CIDR == cidr && (best == "" || name < best) {
			best = name
		}
	}
	if best == "" {
		t.byCIDR.Delete(cidr)
	} else {
		t.byCIDR.Insert(cidr, best)
	}
}

// Of returns the name of the smallest pool that contains a prefix.
func (t *Pools) Of(p netip.Prefix) (string, bool) { return t.byCIDR.LookupPrefix(p) }

// Mode is how a pool is to be carried.
func (t *Pools) Mode(p *cluster.Pool) store.Mode {
	return store.NewMode(p.Encap, t.Settings.VNI, t.Settings.Port)
}

// SetFelix replaces a FelixConfiguration; nil: there is none any more. It reports
// whether the settings of a host changed by that.
func (t *Pools) SetFelix(host, name string, r *v3.FelixConfiguration) bool {
	if r == nil {
		delete(t.felix, name)
	} else {
		t.felix[name] = &r.Spec
	}
	s := newSettings(t.felix["default"], t.felix["node."+host])
	if s == t.Settings {
		return false
	}
	t.Settings = s
	return true
}

// samePool compares what counts of pools here.
func samePool(a, b *cluster.Pool) bool {
	if a == nil || b == nil {
		return a == b
	}
	return a.Name == b.Name && a.CIDR == b.CIDR && a.Encap == b.Encap && a.Forced == b.Forced && a.Nodes == b.Nodes && a.Tunnels == b.Tunnels
}

// Settings are the numbers of FelixConfiguration that drivers use. MTUs are in
// bytes, 0: computed.
type Settings struct {
	VNI  uint32
	Port uint16

	ipipMTU, vxlanMTU, vxlanMTUV6 int
}

// newSettings merges the objects that concern a node, weakest first.
func newSettings(specs ...*v3.FelixConfigurationSpec) Settings {
	var s Settings
	s.VNI, s.Port = store.VXLANNumbers(specs...)
	for _, f := range specs {
		if f == nil {
			continue
		}
		for to, v := range map[*int]*int{&s.ipipMTU: f.IPIPMTU, &s.vxlanMTU: f.VXLANMTU, &s.vxlanMTUV6: f.VXLANMTUV6} {
			if v != nil && SaneMTU(*v) {
				*to = *v
			}
		}
	}
	return s
}

// TunnelMTU returns what the operator set for devices over a family of the
// underlay. Calico has no setting for IPIP over IPv6.
func (s Settings) TunnelMTU(outer dataplane.Family) (ipip, vxlan int) {
	if outer == dataplane.IPv6 {
		return 0, s.vxlanMTUV6
	}
	return s.ipipMTU, s.vxlanMTU
}

// SaneMTU reports whether IPv4 can work with it: from the 68 bytes of RFC 791,
// section 3.2, to what a packet's length can say.
func SaneMTU(v int) bool { return v >= 68 && v <= 65535 }

// Felix returns the FelixConfigurations by their names.
func (t *Pools) Felix() map[string]*v3.FelixConfigurationSpec { return t.felix }
