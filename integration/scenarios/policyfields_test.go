package scenarios

import (
	"reflect"
	"regexp"
	"strings"
	"testing"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/store/manifest"
)

// casesText is all that the policy lab puts in force, with addresses of its own.
func casesText() string {
	text := ""
	for i, c := range append(bySelector(), byRule()...) {
		text += c.text(i, uint16(20000+i))
	}
	for _, s := range hostSteps() {
		text += s.manifest
	}
	return strings.NewReplacer("A4", "192.0.2.1", "A6", "2001:db8::1", "B4", "192.0.2.2",
		"{node1}", "192.0.2.11", "{node2}", "192.0.2.12", "{node2/6}", "2001:db8::12").Replace(text)
}

// set notes the fields that a value sets, in it and in what it holds, by type.
func set(v reflect.Value, seen map[string]bool) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			set(v.Elem(), seen)
		}
	case reflect.Slice:
		for i := range v.Len() {
			set(v.Index(i), seen)
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if f := v.Type().Field(i); f.IsExported() && !v.Field(i).IsZero() {
				seen[v.Type().Name()+"."+f.Name] = true
				set(v.Field(i), seen)
			}
		}
	default:
	}
}

// TestConformanceIsComplete: every field of a policy, of a rule and of its
// sides, every action, every operator of the selector language has a case.
func TestConformanceIsComplete(t *testing.T) {
	beside(t)
	text := casesText()
	docs, err := manifest.Read("cases", strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	seen := make(map[string]bool)
	for _, d := range docs {
		set(reflect.ValueOf(d.Object.Value), seen)
	}
	for _, v := range []any{v3.GlobalNetworkPolicySpec{}, v3.NetworkPolicySpec{}, v3.Rule{}, v3.EntityRule{}, v3.ServiceAccountMatch{}, v3.ServiceMatch{}, v3.ICMPFields{}} {
		typ := reflect.TypeOf(v)
		for f := range typ.Fields() {
			name := typ.Name() + "." + f.Name
			switch name {
			case "NetworkPolicySpec.Order", "NetworkPolicySpec.Egress", "NetworkPolicySpec.ServiceAccountSelector", "NetworkPolicySpec.PerformanceHints":
				continue // one code for both kinds; the global one has the case
			}
			if !seen[name] {
				t.Errorf("no case sets %s", name)
			}
		}
	}
	for what, pattern := range map[string]string{
		"Allow": `action: Allow`, "Deny": `action: Deny`, "Pass": `action: Pass`, "Log": `action: Log`,
		"TCP": `protocol: TCP`, "UDP": `protocol: UDP,`, "UDPLite": `protocol: UDPLite`, "ICMP": `protocol: ICMP,`, "ICMPv6": `protocol: ICMPv6`, "a number": `protocol: \d`,
		"==": ` == '`, "!=": ` != '`, "in": ` in \{`, "not in": ` not in \{`, "has": `[^!]has\(`, "!has": `!has\(`,
		"contains": ` contains '`, "starts with": ` starts with '`, "ends with": ` ends with '`, "&&": ` && `, "||": ` \|\| `, "!": `! `, "!(": `!\(`,
		"all()": `all\(\)`, "global()": `global\(\)`,
	} {
		// In YAML a quote within quotes is written twice.
		if !regexp.MustCompile(pattern).MatchString(strings.ReplaceAll(text, "''", "'")) {
			t.Errorf("no case has %s", what)
		}
	}
}
