package bgp

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
)

// Filter is a BGPFilter: rules per direction and family. The first rule that
// matches decides; without one the next filter is asked, and in the end the
// built-in rules.
type Filter struct {
	Import4, Export4, Import6, Export6 []FilterRule
}

// FilterRule is one rule; its conditions must all hold.
type FilterRule struct {
	CIDR     netip.Prefix // invalid: any prefix of the family
	Not      bool         // NotIn, NotEqual
	Min, Max int          // lengths that match: CIDR's own for Equal

	RemotePeers bool     // only routes learned by BGP
	Interface   string   // glob on the device that leads to the next hop; empty: any
	PeerType    string   // "eBGP", "iBGP"; empty: any
	Priority    uint32   // 0: any
	Community   string   // standard or large; empty: any
	ASPath      []uint32 // the path begins with these

	Accept     bool
	Operations []Operation
}

// Operation changes a route that a rule accepts; exactly one field is set.
type Operation struct {
	AddCommunity string
	PrependAS    []uint32
	SetPriority  uint32
}

// ruleJSON is a rule of either family as it is stored. The API module's types
// lack the newer half of it.
type ruleJSON struct {
	CIDR          string `json:"cidr"`
	MatchOperator string `json:"matchOperator"`
	PrefixLength  *struct{ Min, Max *int }
	Source        string   `json:"source"`
	Interface     string   `json:"interface"`
	PeerType      string   `json:"peerType"`
	Priority      *uint32  `json:"priority"`
	ASPathPrefix  []uint32 `json:"asPathPrefix"`
	Communities   *struct{ Values []string }
	Action        string `json:"action"`
	Operations    []struct {
		AddCommunity  *struct{ Value string }
		PrependASPath *struct{ Prefix []uint32 }
		SetPriority   *struct{ Value uint32 }
	}
}

// parseFilter reads a BGPFilter's stored form.
func parseFilter(raw []byte) (Filter, error) {
	var o struct {
		Spec struct{ ExportV4, ImportV4, ExportV6, ImportV6 []ruleJSON }
	}
	if err := json.Unmarshal(raw, &o); err != nil {
		return Filter{}, fmt.Errorf("spec: %w", err)
	}
	var f Filter
	for _, part := range []struct {
		field string
		from  []ruleJSON
		to    *[]FilterRule
		bits  int
	}{
		{"exportV4", o.Spec.ExportV4, &f.Export4, 32},
		{"importV4", o.Spec.ImportV4, &f.Import4, 32},
		{"exportV6", o.Spec.ExportV6, &f.Export6, 128},
		{"importV6", o.Spec.ImportV6, &f.Import6, 128},
	} {
		for i, r := range part.from {
			rule, err := r.rule(part.bits)
			if err != nil {
				return Filter{}, fmt.Errorf("spec.%s[%d].%w", part.field, i, err)
			}
			*part.to = append(*part.to, rule)
		}
	}
	return f, nil
}

// rule checks and translates one rule of a family with addresses of so many
// bits. Its errors begin with the field.
func (r ruleJSON) rule(bits int) (FilterRule, error) {
	out := FilterRule{RemotePeers: r.Source == "RemotePeers", Interface: r.Interface, PeerType: r.PeerType, ASPath: r.ASPathPrefix, Max: bits}
	switch r.Action {
	case "Accept":
		out.Accept = true
	case "Reject":
	default:
		return out, fmt.Errorf("action %q: want Accept or Reject", r.Action)
	}
	if r.Source != "" && !out.RemotePeers {
		return out, fmt.Errorf("source %q: want RemotePeers, or leave it out", r.Source)
	}
	if !slices.Contains([]string{"", "eBGP", "iBGP"}, r.PeerType) {
		return out, fmt.Errorf("peerType %q: want eBGP or iBGP", r.PeerType)
	}
	if err := r.lengths(&out, bits); err != nil {
		return out, err
	}
	if r.Priority != nil {
		if out.Priority = *r.Priority; out.Priority == 0 || out.Priority > maxPriority {
			return out, fmt.Errorf("priority is %d: want 1 to %d", out.Priority, maxPriority)
		}
	}
	if r.Communities != nil {
		if len(r.Communities.Values) != 1 {
			return out, fmt.Errorf("communities.values has %d entries: want exactly one", len(r.Communities.Values))
		}
		out.Community = r.Communities.Values[0]
		if _, err := parseCommunity(out.Community); err != nil {
			return out, fmt.Errorf("communities.values: %w", err)
		}
	}
	return out, r.operations(&out)
}

func (r ruleJSON) lengths(out *FilterRule, bits int) error {
	if r.CIDR == "" {
		return r.limits(out, 0, bits)
	}
	p, err := netip.ParsePrefix(r.CIDR)
	if err != nil || p.Addr().BitLen() != bits {
		return fmt.Errorf("cidr %q: want a prefix of the rule's family", r.CIDR)
	}
	out.CIDR = p.Masked()
	switch r.MatchOperator {
	case "NotEqual", "Equal":
		out.Not = r.MatchOperator == "NotEqual"
		out.Min, out.Max = p.Bits(), p.Bits()
		return nil
	case "NotIn", "In":
		out.Not = r.MatchOperator == "NotIn"
		return r.limits(out, p.Bits(), bits)
	}
	return fmt.Errorf("matchOperator %q: want Equal, NotEqual, In or NotIn", r.MatchOperator)
}

func (r ruleJSON) limits(out *FilterRule, low, high int) error {
	out.Min, out.Max = low, high
	if l := r.PrefixLength; l != nil {
		if l.Min != nil {
			out.Min = *l.Min
		}
		if l.Max != nil {
			out.Max = *l.Max
		}
	}
	if out.Min < 0 || out.Max > high || out.Min > out.Max {
		return fmt.Errorf("prefixLength %d to %d: want lengths between %d and %d", out.Min, out.Max, low, high)
	}
	return nil
}

func (r ruleJSON) operations(out *FilterRule) error {
	if len(r.Operations) > 0 && !out.Accept {
		return fmt.Errorf("operations: only a rule with action Accept can have them")
	}
	for i, o := range r.Operations {
		var op Operation
		n := 0
		if o.AddCommunity != nil {
			n++
			op.AddCommunity = o.AddCommunity.Value
			if _, err := parseCommunity(op.AddCommunity); err != nil {
				return fmt.Errorf("operations[%d].addCommunity: %w", i, err)
			}
		}
		if o.PrependASPath != nil {
			n++
			if op.PrependAS = o.PrependASPath.Prefix; len(op.PrependAS) == 0 || len(op.PrependAS) > 10 || slices.Contains(op.PrependAS, 0) {
				return fmt.Errorf("operations[%d].prependASPath.prefix: want 1 to 10 AS numbers", i)
			}
		}
		if o.SetPriority != nil {
			n++
			if op.SetPriority = o.SetPriority.Value; op.SetPriority == 0 || op.SetPriority > maxPriority {
				return fmt.Errorf("operations[%d].setPriority is %d: want 1 to %d", i, op.SetPriority, maxPriority)
			}
		}
		if n != 1 {
			return fmt.Errorf("operations[%d]: want exactly one of addCommunity, prependASPath and setPriority", i)
		}
		out.Operations = append(out.Operations, op)
	}
	return nil
}

// maxPriority is the highest metric that Calico's LOCAL_PREF can carry.
const maxPriority = 2147483646

// localPref is how Calico's speakers carry a route's metric in LOCAL_PREF.
func localPref(priority uint32) uint32 { return 1<<31 - 1 - priority }

// rules returns a filter's rules for a direction and family.
func (f Filter) rules(export, six bool) []FilterRule {
	switch {
	case export && six:
		return f.Export6
	case export:
		return f.Export4
	case six:
		return f.Import6
	}
	return f.Import4
}

// asksLinks reports whether a rule has an interface.
func (f Filter) asksLinks() bool {
	for _, r := range slices.Concat(f.Import4, f.Export4, f.Import6, f.Export6) {
		if r.Interface != "" {
			return true
		}
	}
	return false
}
