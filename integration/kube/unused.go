package kube

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	"sigs.k8s.io/yaml"
)

// Rights returns the rules of the roles in a file of manifests.
func Rights(file string) (rules []rbacv1.PolicyRule, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	for doc := range bytes.SplitSeq(text, []byte("\n---\n")) {
		var role struct {
			Kind  string              `json:"kind"`
			Rules []rbacv1.PolicyRule `json:"rules"`
		}
		if err := yaml.Unmarshal(doc, &role); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		rules = append(rules, role.Rules...)
	}
	if len(rules) == 0 {
		return nil, fmt.Errorf("%s has no rules", file)
	}
	return rules, nil
}

// Unused returns an error that names each right ("verb resource", and the name where the rule gives
// one) that rules grant, that no daemon has used by what [Server.Audit] says, and that is not among
// excepted, which says why of each; also an exception that is not granted. The API groups of one rule
// are alternatives: daemons use Calico's resources in one.
func Unused(rules []rbacv1.PolicyRule, asked map[Asked]int, excepted map[string]string) error {
	type right struct{ verb, group, resource, name string }
	used := map[right]bool{}
	for a := range asked {
		if !a.Refused() {
			used[right{a.Verb, a.Group, a.Resource, a.Name}], used[right{a.Verb, a.Group, a.Resource, ""}] = true, true
		}
	}
	granted := map[string]bool{} // by what it is called, whether it is used
	for _, r := range rules {
		names := r.ResourceNames
		if len(names) == 0 {
			names = []string{""}
		}
		for _, resource := range r.Resources {
			for _, verb := range r.Verbs {
				for _, name := range names {
					called := strings.TrimSpace(verb + " " + resource + " " + name)
					granted[called] = granted[called] || slices.ContainsFunc(r.APIGroups, func(group string) bool {
						return used[right{verb, group, resource, name}]
					})
				}
			}
		}
	}
	var all []string
	for _, called := range slices.Sorted(maps.Keys(granted)) {
		if !granted[called] && excepted[called] == "" {
			all = append(all, called+": granted, and no daemon did it: take it out, have a test make it, or except it with the reason")
		}
	}
	for _, called := range slices.Sorted(maps.Keys(excepted)) {
		if _, is := granted[called]; !is {
			all = append(all, called+": excepted, and not granted")
		}
	}
	if len(all) == 0 {
		return nil
	}
	return fmt.Errorf("rights of the daemon:\n  %s", strings.Join(all, "\n  "))
}
