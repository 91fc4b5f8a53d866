package bgp

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/netip"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
)

// confFacts is a BGPConfiguration with what the API module's type lacks.
type confFacts struct {
	*v3.BGPConfiguration
	newer newerConf
}

type newerConf struct {
	Priority4     *int64 `json:"ipv4NormalRoutePriority"`
	Priority6     *int64 `json:"ipv6NormalRoutePriority"`
	ClusterRoutes string `json:"programClusterRoutes"`
}

func confOf(c *v3.BGPConfiguration, raw []byte) (confFacts, error) {
	var o struct {
		Spec newerConf `json:"spec"`
	}
	if len(raw) > 0 {
		if err := json.Unmarshal(raw, &o); err != nil {
			return confFacts{}, fmt.Errorf("spec.ipv4NormalRoutePriority, ipv6NormalRoutePriority: want a number from 1 to %d; programClusterRoutes: a word: %w", maxPriority, err)
		}
	}
	return confFacts{c, o.Spec}, nil
}

// preferenceOf is the LOCAL_PREF that a priority asks for; 0: that of the default.
func preferenceOf(priority *int64) uint32 {
	if priority == nil || *priority < 1 || *priority > maxPriority {
		return 0
	}
	return localPref(uint32(*priority))
}

// unused says what a BGPConfiguration of this name asks for in vain.
func (n newerConf) unused(name string) []string {
	var l []string
	for _, f := range []struct {
		field string
		val   *int64
	}{{"ipv4NormalRoutePriority", n.Priority4}, {"ipv6NormalRoutePriority", n.Priority6}} {
		switch {
		case f.val == nil:
		case name != "default":
			l = append(l, fmt.Sprintf("BGPConfiguration %s: %s has an effect only in the one named default", name, f.field))
		case preferenceOf(f.val) == 0:
			l = append(l, fmt.Sprintf("BGPConfiguration %s: %s is %d: want 1 to %d; it is taken as 1024", name, f.field, *f.val, maxPriority))
		}
	}
	// Calico's default says that its speaker routes to pools without
	// encapsulation and its agent to the others: here one daemon does both.
	if n.ClusterRoutes != "" && n.ClusterRoutes != "EnabledNoEncapOnly" {
		l = append(l, fmt.Sprintf("BGPConfiguration %s: programClusterRoutes %s is not supported by this version", name, n.ClusterRoutes))
	}
	return l
}

// localPrefOf returns the LOCAL_PREF of what the node originates.
func (c *Config) localPrefOf(p netip.Prefix) uint32 {
	if i := c.Injected[p]; i.LocalPref != 0 && c.Drain == "" {
		return i.LocalPref
	}
	if c.Leaving[p] {
		return drainPreference
	}
	if p.Addr().Is6() {
		return cmp.Or(c.LocalPref6, LocalPref)
	}
	return cmp.Or(c.LocalPref, LocalPref)
}
