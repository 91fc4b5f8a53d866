package nft

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/dataplane/filter"
)

// The kernel calls only what has something to say, and a workload's interface
// without a prefix is looked for only where there is one.
func TestBasesOfNeed(t *testing.T) {
	t.Parallel()
	always := []string{forwardFrom, forwardTo, inputFrom, inputTo, rawIn}
	workload := func(name string) filter.Endpoint {
		return filter.Endpoint{Interface: name, Sources: prefixes("10.1.0.2/32")}
	}
	w := newDesired(Config{})
	for _, step := range []struct {
		name  string
		delta filter.Delta
		bases []string // beside those that there always are
		odd   bool
	}{
		{"nothing", filter.Delta{Settings: &filter.Settings{WorkloadPrefixes: []string{"cali"}}}, nil, false},
		{"a workload", filter.Delta{PutEndpoints: []filter.Endpoint{workload("cali1")}}, nil, false},
		{"one with another name", filter.Delta{PutEndpoints: []filter.Endpoint{workload("tap1")}}, nil, true},
		{"its name is usual", filter.Delta{Settings: &filter.Settings{WorkloadPrefixes: []string{"cali", "tap"}}}, nil, false},
		{"and not any more", filter.Delta{Settings: &filter.Settings{WorkloadPrefixes: []string{"cali"}}}, nil, true},
		{"it goes", filter.Delta{DelEndpoints: []string{"tap1"}}, nil, false},
		{"IPVS", filter.Delta{Settings: &filter.Settings{WorkloadPrefixes: []string{"cali"}, Virtual: true}}, []string{virtualTo}, false},
		{"and not any more", filter.Delta{Settings: &filter.Settings{WorkloadPrefixes: []string{"cali"}}}, nil, false},
		{"half of what translation takes", filter.Delta{PutSets: []filter.Set{{ID: filter.NATSources}}}, nil, false},
		{"translation", filter.Delta{PutSets: []filter.Set{{ID: filter.NATExempt}}}, []string{snatOut}, false},
		{"none any more", filter.Delta{DelSets: []filter.SetID{filter.NATSources}}, nil, false},
		{"a host endpoint that denies", filter.Delta{PutEndpoints: []filter.Endpoint{{Interface: "eth0", Host: true}}}, []string{outputTo, preDNATIn, rawOut}, false},
	} {
		if err := w.apply(&step.delta); err != nil {
			t.Fatalf("%s: %v", step.name, err)
		}
		var got []string
		odd := false
		for name, c := range w.chains {
			if c.hook != nil {
				got = append(got, name)
			}
			odd = odd || slices.ContainsFunc(c.rules, func(r rule) bool { return strings.Contains(string(r.exprs), otherSet) })
		}
		slices.Sort(got)
		want := slices.Sorted(slices.Values(append(slices.Clone(always), step.bases...)))
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s: base chains (-want +got):\n%s", step.name, diff)
		}
		if odd != step.odd {
			t.Errorf("%s: rules look for odd names: %t, want %t", step.name, odd, step.odd)
		}
	}
}

// ICMP errors about connections of a workload's prefixes are let through as soon as
// there is a workload that has some, and looked for no longer than that.
func TestErrorsOfPrefixes(t *testing.T) {
	t.Parallel()
	w := newDesired(Config{})
	for _, step := range []struct {
		name  string
		delta filter.Delta
		want  bool
	}{
		{"a workload", filter.Delta{
			Settings:     &filter.Settings{WorkloadPrefixes: []string{"cali"}},
			PutEndpoints: []filter.Endpoint{{Interface: "cali1", Sources: prefixes("10.1.0.2/32")}},
		}, false},
		{"one with a prefix", filter.Delta{PutEndpoints: []filter.Endpoint{{Interface: "cali2", Sources: prefixes("10.2.0.0/24")}}}, true},
		{"it goes", filter.Delta{DelEndpoints: []string{"cali2"}}, false},
	} {
		if err := w.apply(&step.delta); err != nil {
			t.Fatalf("%s: %v", step.name, err)
		}
		for _, chain := range []string{"icmp-error-4", "icmp-error-6"} {
			got := slices.ContainsFunc(w.chains[chain].rules, func(r rule) bool { return strings.Contains(string(r.exprs), errorsMap) })
			if got != step.want {
				t.Errorf("%s: %s looks for prefixes: %t, want %t", step.name, chain, got, step.want)
			}
		}
	}
}

// What comes by other interfaces passes the rules about workloads only where rules of a
// host endpoint come behind them.
func TestElsewhereEndsEarly(t *testing.T) {
	t.Parallel()
	early := new(chainWriter)
	w := newDesired(Config{})
	early.w = w
	for _, step := range []struct {
		name  string
		delta filter.Delta
		want  bool
	}{
		{"no endpoints", filter.Delta{Settings: &filter.Settings{WorkloadPrefixes: []string{"cali"}}}, true},
		{"a host endpoint", filter.Delta{PutEndpoints: []filter.Endpoint{{Interface: "eth0", Host: true}}}, false},
		{"it goes", filter.Delta{DelEndpoints: []string{"eth0"}}, true},
	} {
		if err := w.apply(&step.delta); err != nil {
			t.Fatalf("%s: %v", step.name, err)
		}
		early.out = nil
		early.elsewhere()
		for _, chain := range []string{forwardFrom, inputFrom} {
			got := slices.ContainsFunc(w.chains[chain].rules, func(r rule) bool { return r.hash == early.out[0].hash })
			if got != step.want {
				t.Errorf("%s: %s ends early for other interfaces: %t, want %t", step.name, chain, got, step.want)
			}
		}
	}
}
