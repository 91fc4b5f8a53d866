package policy_test

import (
	"maps"
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/routerd/routerd/control/policy"
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/store"
)

// policySelects reports whether a policy's rules are about whom a selector names: what the datastore
// has of other hosts decides about it.
func policySelects(r *filter.Ruleset, p filter.Policy) bool {
	for _, rules := range [][]filter.Rule{p.Ingress, p.Egress} {
		for _, rule := range rules {
			for _, s := range []filter.Side{rule.Source, rule.Destination} {
				for _, id := range []filter.SetID{s.Set, s.NotSet, s.PortSet, s.NotPortSet} {
					if id != "" && r.Sets[id].ID != "" && !ofService(r.Sets[id]) {
						return true
					}
				}
			}
		}
	}
	return false
}

// ofService reports whether a set is of a Service, whose endpoints do not depend on what is told of
// workloads.
func ofService(s filter.Set) bool {
	for _, of := range []string{"service ", "ports of service ", "endpoints of service "} {
		if strings.HasPrefix(s.Origin, of) {
			return true
		}
	}
	return false
}

func endpointSelects(r *filter.Ruleset, e filter.Endpoint) bool {
	for _, id := range e.Policies() {
		if policySelects(r, r.Policies[id]) {
			return true
		}
	}
	return false
}

// TestOthersComeLater makes random worlds in random steps, in which the workloads of the other
// host are told only while they are asked for, and some steps later. As long as they are not all
// told, nothing that depends on them is other than before, a new endpoint that depends on them
// has no rules, and all else is as it is with all of them. When they are, the rules are those that
// a fresh calculator makes of the whole state.
func TestOthersComeLater(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		c, mirror := newMirror(policy.Config{Services: policy.BroughtServices})
		c.SetInterfaces(hostInterfaces())
		state, told := map[store.Key]store.Object{}, map[store.Key]store.Object{}
		other := func(o store.Object) bool {
			w, ok := o.Value.(*store.WorkloadEndpoint)
			return ok && w.Spec.Node != thisNode
		}
		wide := maybe(t, "told from the start")
		wait := 0
		for i := range rapid.IntRange(1, 12).Draw(t, "steps") {
			n := rapid.IntRange(1, 4).Draw(t, "events")
			if i == 0 {
				n += 15
			}
			for range n {
				if len(state) > 0 && pick(t, "delete", 0, 0, 0, 1) == 1 {
					keys := sortedKeys(state)
					delete(state, keys[rapid.IntRange(0, len(keys)-1).Draw(t, "which")])
					continue
				}
				o := drawObject(t)
				if w, ok := o.Value.(*store.WorkloadEndpoint); ok {
					o.Key.Name += w.Spec.Node // a workload does not move
				}
				if len(state) > 0 && maybe(t, "tweak") {
					keys := sortedKeys(state)
					o = tweak(t, state[keys[rapid.IntRange(0, len(keys)-1).Draw(t, "which")]])
				}
				state[o.Key] = o
			}
			switch asks := c.AsksOthers(); {
			case asks && !wide:
				if wait--; wait < 0 {
					wide = true
				}
			case !asks && wide && maybe(t, "nobody asks for long enough"):
				wide, wait = false, rapid.IntRange(0, 2).Draw(t, "how many steps it takes")
			}
			// What is told now: all, but of workloads of the other host nothing new.
			b := store.Batch{Synced: true, OwnOnly: !wide}
			for _, k := range sortedKeys(told) {
				if _, there := state[k]; !there && (wide || !other(told[k])) {
					delete(told, k)
					b.Events = append(b.Events, gone(k))
				}
			}
			for _, k := range sortedKeys(state) {
				if o := state[k]; (wide || !other(o)) && !reflect.DeepEqual(told[k], o) {
					told[k] = o
					b.Events = append(b.Events, event(o))
				}
			}
			before := *mirror
			before.Policies, before.Endpoints, before.Members = map[filter.PolicyID]filter.Policy{}, map[string]filter.Endpoint{}, map[filter.SetID]map[filter.Member]struct{}{}
			maps.Copy(before.Policies, mirror.Policies)
			maps.Copy(before.Endpoints, mirror.Endpoints)
			for k, v := range mirror.Members {
				before.Members[k] = map[filter.Member]struct{}{}
				for m := range v {
					before.Members[k][m] = struct{}{}
				}
			}
			c.Update(b)
			fresh := policy.New(policy.Config{Node: thisNode, Services: policy.BroughtServices})
			fresh.SetInterfaces(hostInterfaces())
			var all []store.Object
			for _, k := range sortedKeys(state) {
				all = append(all, state[k])
			}
			fresh.Update(store.Batch{Events: events(all), Synced: true})
			fresh.Flush()
			want := fresh.Snapshot()

			d, ok := c.Flush()
			if !ok {
				if wide || len(before.Endpoints) > 0 || !c.AsksOthers() || !c.Held() {
					t.Fatalf("no step with wide=%v, asks=%v, held=%v and endpoints %v before", wide, c.AsksOthers(), c.Held(), before.Endpoints)
				}
				continue
			}
			if err := mirror.Apply(&d); err != nil {
				t.Fatalf("the step does not fit: %v", err)
			}
			if err := mirror.Check(); err != nil {
				t.Fatalf("after the step: %v", err)
			}
			if again, _ := c.Flush(); !again.Empty() {
				t.Fatalf("a second flush tells %+v", again)
			}
			if wide {
				if c.Held() {
					t.Fatal("it waits for what it has")
				}
				if !reflect.DeepEqual(want, mirror) {
					t.Fatalf("the steps do not lead where the state is (-fresh +steps):\n%s", diffRulesets(want, mirror))
				}
				continue
			}
			if !c.AsksOthers() && !reflect.DeepEqual(want, mirror) {
				t.Fatalf("nothing is asked for, and the rules are others than with all (-fresh +steps):\n%s", diffRulesets(want, mirror))
			}
			for name, e := range mirror.Endpoints {
				old, had := before.Endpoints[name]
				switch is := want.Endpoints[name]; {
				case reflect.DeepEqual(e, is):
				case had && reflect.DeepEqual(e, old) && endpointSelects(want, is):
					continue
				default:
					t.Fatalf("endpoint %s is %+v, was %+v, and is with all %+v", name, e, old, is)
				}
				if !had && endpointSelects(want, e) {
					t.Fatalf("endpoint %s is new, and depends on workloads of which some are not known: %+v", name, e)
				}
			}
			for name, is := range want.Endpoints {
				if _, has := mirror.Endpoints[name]; !has && !endpointSelects(want, is) {
					t.Fatalf("endpoint %s waits though it does not depend on workloads of others: %+v\npolicies %+v", name, is, want.Policies)
				}
			}
			for id, p := range mirror.Policies {
				if old, had := before.Policies[id]; !reflect.DeepEqual(p, want.Policies[id]) && (!had || !reflect.DeepEqual(p, old)) {
					t.Fatalf("policy %v is %+v, was %+v, and is with all %+v", id, p, old, want.Policies[id])
				}
			}
			for id, members := range mirror.Members {
				switch id {
				case filter.NATSources, filter.NATExempt, filter.TunnelSources:
					continue
				}
				if ofService(mirror.Sets[id]) {
					continue
				}
				if old, had := before.Members[id]; had && !reflect.DeepEqual(members, old) {
					t.Fatalf("set %s is other than before: %v, %v", id, members, old)
				} else if !had {
					t.Fatalf("set %s is new: %v", id, members)
				}
			}
		}
	})
}

// TestOthersAskedFor: what asks for the workloads of other hosts is a rule with a selector that is
// for an endpoint of this host.
func TestOthersAskedFor(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		policy store.Object
		asks   bool
	}{
		"a namespace alone":                 {np("prod/p", `{selector: all(), ingress: [{action: Allow}]}`), false},
		"addresses":                         {np("prod/p", `{selector: all(), ingress: [{action: Allow, source: {nets: [10.0.0.0/8]}}]}`), false},
		"a service":                         {np("prod/p", `{selector: all(), types: [Egress], egress: [{action: Allow, destination: {services: {name: s}}}]}`), false},
		"a selector":                        {np("prod/p", `{selector: all(), ingress: [{action: Allow, source: {selector: app == 'web'}}]}`), true},
		"a selector of whom it is not":      {np("prod/p", `{selector: all(), ingress: [{action: Deny, source: {notSelector: app == 'web'}}]}`), true},
		"namespaces":                        {np("prod/p", `{selector: all(), ingress: [{action: Allow, source: {namespaceSelector: env == 'live'}}]}`), true},
		"service accounts":                  {np("prod/p", `{selector: all(), ingress: [{action: Allow, source: {serviceAccounts: {names: [robot]}}}]}`), true},
		"a port by its name":                {np("prod/p", `{selector: all(), types: [Egress], egress: [{action: Allow, protocol: TCP, destination: {ports: [http]}}]}`), true},
		"a selector, for none of this host": {np("prod/p", `{selector: app == 'nobody', ingress: [{action: Allow, source: {selector: app == 'web'}}]}`), false},
		"a staged one":                      {obj(store.KindStagedNetworkPolicy, "prod/p", "", `{selector: all(), ingress: [{action: Deny, source: {selector: app == 'web'}}]}`), true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c, mirror := newMirror(policy.Config{})
			c.SetInterfaces(map[string][]netip.Addr{})
			c.Update(store.Batch{Events: events(base()), Synced: true, OwnOnly: true})
			step(t, c, mirror)
			if c.AsksOthers() {
				t.Error("it asks before there is a policy")
			}
			c.Update(store.Batch{Events: events([]store.Object{tc.policy}), OwnOnly: true})
			c.Flush()
			if got := c.AsksOthers(); got != tc.asks {
				t.Errorf("asks: %v, want %v", got, tc.asks)
			}
			c.Update(store.Batch{})
			c.Flush()
			if got := c.AsksOthers(); got != tc.asks || c.Held() {
				t.Errorf("with all of them: asks %v, want %v; held: %v", got, tc.asks, c.Held())
			}
			c.Update(store.Batch{Events: []store.Event{gone(tc.policy.Key)}})
			if c.Flush(); c.AsksOthers() {
				t.Error("it asks when the policy is gone")
			}
		})
	}
}
