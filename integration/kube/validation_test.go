package kube_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/kube/convert"
	"github.com/routerd/routerd/store/storetest"
)

// onlyRouterd lists what the definitions take and routerd refuses, in part or as a
// whole, by the names of [storetest.Resources], with the reason.
func onlyRouterd() map[string]string {
	const (
		grammar = "the grammar of selectors is beyond CEL"
		lenient = "Calico takes it"
		costs   = "the lists have no bound, so that a look at each entry would cost too much"
		regexps = "Go's regular expressions cannot be tried in CEL"
		labels  = "rules see no labels"
		longer  = "Calico of before the limit wrote longer ones"
	)
	return map[string]string{
		"namespaces and tunnels":                      lenient,
		"global()":                                    grammar,
		"long selector":                               longer,
		"policy with what is wrong":                   grammar,
		"prefix of the host's interfaces":             lenient,
		"prefix of an uplink and of a tunnel":         lenient,
		"text that is longer than the kernel takes":   lenient,
		"pool of multicast addresses":                 lenient,
		"reservation of a bare address":               lenient,
		"filter twice":                                lenient,
		"numbers that BIRD would refuse":              lenient,
		"password of nothing":                         lenient,
		"selector that is none":                       grammar,
		"filter of lengths the wrong way round":       lenient,
		"level of BGP's log in lower case":            lenient,
		"community that nobody defined":               costs,
		"numbers of Felix that are 0":                 lenient,
		"regular expression that is none":             regexps,
		"controllers that wait for less than nothing": lenient,
		"templates of host endpoints that are none":   regexps,
		"ICMP that is not, of no protocol":            lenient,
		"all that is not all":                         lenient,
		"nets of both families":                       costs,
		"paths of HTTP":                               costs,
		"port after a name without a protocol":        costs,
		"deletion that says more":                     "a client may write members that say nothing",
	}
}

// TestDefinitionsJudge: the API server says of resources what routerd says, by the
// schema and the rules of the definitions in both groups: never more, and less only
// where there is a reason.
func TestDefinitionsJudge(t *testing.T) {
	reasons := onlyRouterd()
	for _, g := range []convert.Group{convert.V1, convert.V3} {
		for _, tt := range storetest.Resources() {
			if _, ok := convert.Custom(g, tt.Kind); !ok {
				continue
			}
			t.Run(string(g)+"/"+tt.Case, func(t *testing.T) {
				got, said, partly, err := judge(t.Context(), g, tt.Kind, tt.Name, tt.Spec)
				if err != nil {
					t.Fatal(err)
				}
				missing := slices.DeleteFunc(slices.Clone(tt.Refused), func(f string) bool { return refuses(got, f) })
				for _, f := range got {
					if !slices.ContainsFunc(tt.Refused, func(r string) bool { return refuses([]string{f}, r) }) {
						t.Errorf("%s is refused by the API alone: %s", f, said)
					}
				}
				switch reason := reasons[tt.Case]; {
				case reason == "" && len(missing) > 0 && !partly:
					t.Errorf("routerd alone refuses %v; the API says %q", missing, said)
				case reason != "" && len(missing) == 0:
					t.Errorf("the API refuses all of it; the reason %q is out of date", reason)
				}
				if testing.Verbose() && said != "" {
					t.Log(said)
				}
			})
		}
	}
}

// refuses reports whether one of the fields is f, the list with f in it, or an
// entry of a list f: where one of several entries is to blame, the two may differ.
func refuses(fields []string, f string) bool {
	return slices.ContainsFunc(fields, func(g string) bool {
		return g == f || strings.HasPrefix(f, g+"[") || strings.HasPrefix(g, f+"[")
	})
}

// judge has the API server judge a resource, and returns the fields that it refuses:
// partly, where some are so wrong that it did not look at others.
func judge(ctx context.Context, g convert.Group, kind store.Kind, name, spec string) (fields []string, said string, partly bool, err error) {
	r, _ := convert.Custom(g, kind)
	body := fmt.Sprintf(`{"apiVersion":%q,"kind":%q,"metadata":{"name":%q},"spec":%s}`, r.APIVersion(), r.APIKind, name, spec)
	_, err = server.Do(ctx, http.MethodPost, r.Path("default")+"?dryRun=All", "application/json", []byte(body))
	if err == nil {
		return nil, "", false, nil
	}
	said = err.Error()
	_, status, _ := strings.Cut(said, ": {")
	var s struct {
		Code    int
		Message string
		Details struct {
			Causes []struct{ Field, Message string }
		}
	}
	if json.Unmarshal([]byte("{"+status), &s) != nil || s.Code != http.StatusUnprocessableEntity {
		return nil, "", false, err
	}
	for _, c := range s.Details.Causes {
		if strings.Contains(c.Message, "some validation rules were not checked") {
			partly = true
			continue
		}
		if c.Field != "<nil>" { // of which another cause says the field
			fields = append(fields, c.Field)
		}
	}
	return fields, s.Message, partly, nil
}

// TestDefinitionsJudgeAny: so it is with any pool and any peer that is put together of
// members that are right or wrong alone or beside each other.
func TestDefinitionsJudgeAny(t *testing.T) {
	spec := func(t *rapid.T, members map[string][]string) string {
		var parts []string
		for _, name := range slices.Sorted(maps.Keys(members)) {
			if v := rapid.SampledFrom(append(members[name], "")).Draw(t, name); v != "" {
				parts = append(parts, fmt.Sprintf("%q:%s", name, v))
			}
		}
		return "{" + strings.Join(parts, ",") + "}"
	}
	modes := []string{`"Never"`, `"Always"`, `"CrossSubnet"`, `""`, `"always"`}
	selectors := []string{`"all()"`, `""`, `"has(rack)"`}
	addresses := []string{`"10.0.0.1"`, `"fd00::1"`, `"10.0.0.1:179"`, `"[fd00::1]:179"`, `"fd00::1:179"`, `"[10.0.0.1]"`, `"10.0.0.1:70000"`, `"10.0.0.01"`, `"::ffff:10.0.0.1"`, `"x"`, `""`}
	for kind, members := range map[store.Kind]map[string][]string{
		store.KindIPPool: {
			"cidr":         {`"10.0.0.0/16"`, `"10.0.0.0/26"`, `"10.0.0.0/30"`, `"10.0.0.1/24"`, `"fd00::/64"`, `"fd00::/123"`, `"FD00::1/64"`, `"10.0.0.1"`, `"x"`, `"169.254.0.0/24"`, `"fe80::/64"`},
			"blockSize":    {"0", "20", "26", "32", "19", "33", "116", "122", "128", "129"},
			"ipipMode":     modes,
			"vxlanMode":    modes,
			"nodeSelector": selectors,
			"disabled":     {"true", "false"},
			"allowedUses":  {`["Workload"]`, `["LoadBalancer"]`, `["LoadBalancer","Tunnel"]`, `[]`, `["Tunnels"]`},
		},
		store.KindBGPPeer: {
			"node": {`"n1"`, `"N1"`, `""`}, "nodeSelector": selectors, "peerSelector": selectors, "localWorkloadSelector": selectors,
			"asNumber": {"64512", "0", `"1.1"`, "4294967295"}, "peerIP": addresses, "reachableBy": addresses,
			"nextHopMode": {`"Auto"`, `"auto"`}, "keepOriginalNextHop": {"true", "false"}, "sourceAddress": {`"None"`, `"eth0"`},
		},
	} {
		t.Run(string(kind), func(t *testing.T) {
			rapid.Check(t, func(rt *rapid.T) {
				spec := spec(rt, members)
				got, said, _, err := judge(t.Context(), convert.V3, kind, "x", spec)
				if err != nil {
					rt.Fatal(err)
				}
				v := store.New(kind)
				if err := json.Unmarshal([]byte(`{"metadata":{"name":"x"},"spec":`+spec+`}`), v); err != nil {
					rt.Fatal(err)
				}
				store.SetDefaults(v)
				var want store.FieldErrors
				errors.As(store.Validate(v), &want)
				if (len(got) > 0) != (len(want) > 0) {
					rt.Fatalf("%s: the API says %q, routerd %v", spec, said, want)
				}
			})
		})
	}
}
