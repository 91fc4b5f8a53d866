package kube_test

import (
	"errors"
	"flag"
	"fmt"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"

	"github.com/routerd/routerd/integration/kube"
)

// TestUnused: a right that was used is not named, and one that nobody used is, in whichever group.
func TestUnused(t *testing.T) {
	asked := map[kube.Asked]int{
		{Verb: "get", Resource: "nodes", Code: http.StatusOK}:                                              1,
		{Verb: "patch", Resource: "nodes", Code: http.StatusForbidden}:                                     1,
		{Verb: "update", Group: "projectcalico.org", Resource: "hostendpoints", Code: http.StatusConflict}: 1,
		{Verb: "get", Resource: "secrets", Name: "a", Code: http.StatusNotFound}:                           1,
		{Verb: "patch", Resource: "pods/status", Code: http.StatusUnprocessableEntity, Unmet: true}:        1,
		{Verb: "patch", Resource: "pods", Code: http.StatusUnprocessableEntity}:                            1,
	}
	calico := []string{"crd.projectcalico.org", "projectcalico.org"}
	for _, tt := range []struct {
		name     string
		rule     rbacv1.PolicyRule
		excepted map[string]string
		want     string // part of the error; empty: none
	}{
		{"used", rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"nodes"}, Verbs: []string{"get"}}, nil, ""},
		{"refused", rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"nodes"}, Verbs: []string{"patch"}}, nil, "patch nodes: granted, and no"},
		{"refused by admission", rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"patch"}}, nil, "patch pods: granted, and no"},
		{"used, on a condition that did not hold", rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"pods/status"}, Verbs: []string{"patch"}}, nil, ""},
		{"of another resource", rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"nodes/status"}, Verbs: []string{"get"}}, nil, "get nodes/status: granted, and no"},
		{"of another group", rbacv1.PolicyRule{APIGroups: []string{"apps"}, Resources: []string{"nodes"}, Verbs: []string{"get"}}, nil, "get nodes: granted, and no"},
		{"by its name", rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"secrets"}, ResourceNames: []string{"a", "b"}, Verbs: []string{"get"}}, nil, "get secrets b: granted, and no"},
		{"of one group of two", rbacv1.PolicyRule{APIGroups: calico, Resources: []string{"hostendpoints"}, Verbs: []string{"update"}}, nil, ""},
		{"excepted", rbacv1.PolicyRule{APIGroups: calico, Resources: []string{"hostendpoints"}, Verbs: []string{"delete"}}, map[string]string{"delete hostendpoints": "a reason"}, ""},
		{"excepted and not granted", rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"nodes"}, Verbs: []string{"get"}}, map[string]string{"delete nodes": "a reason"}, "delete nodes: excepted, and not granted"},
	} {
		err := kube.Unused([]rbacv1.PolicyRule{tt.rule}, asked, tt.excepted)
		if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.want)
		}
	}
}

// usedWith has what daemons asked for with the rights of each directory of manifests.
var usedWith = map[string]map[kube.Asked]int{}

// exceptions are the rights of each directory of manifests that no test of this package has a daemon
// use, and why they are given.
func exceptions() map[string]map[string]string {
	const (
		inV1       = "what crd.projectcalico.org calls ipamconfigurations: integration/kube/cluster -datastore=v1, TestRightsOfGroup"
		likewise   = "what crd.projectcalico.org calls ipamconfigurations, with which the daemons of these manifests do it by the same code"
		unstreamed = "an API server that does not stream the state by a watch, or is asked how far it is: the daemons of the other manifests do it, by the same code"
		event      = "one that cannot be carried out, for the event on it, as on the kinds of TestPolicyEvents"
		notYet     = "one that the watch has not told when its ADD comes: control/attach TestPodAskedFor"
		secrets    = "TestSecretSessions, whose daemons have the rights of the other manifests"
	)
	return map[string]map[string]string{
		"beside-calico": {
			"get pods":                            notYet,
			"get globalnetworksets":               event,
			"get networksets":                     event,
			"get stagedglobalnetworkpolicies":     event,
			"get stagedkubernetesnetworkpolicies": event,
			"get stagednetworkpolicies":           event,
			"get ipamconfigs":                     likewise,
			"list ipamconfigs":                    likewise,
			"watch ipamconfigs":                   inV1,
			"update caliconodestatuses":           "the status is written so where the definition, an older one of Calico, does not keep it apart",
		},
		"etcd": {
			"get clusternetworkpolicies":  "it is asked for as a NetworkPolicy is, for the event on it; no definition of them is here",
			"get pods":                    notYet,
			"list clusternetworkpolicies": unstreamed,
			"list namespaces":             unstreamed,
			"list networkpolicies":        unstreamed,
			"list serviceaccounts":        unstreamed,
			"list servicecidrs":           unstreamed,
			"list services":               unstreamed,
			"list secrets bgp-secrets":    secrets,
			"watch secrets bgp-secrets":   secrets,
		},
	}
}

// unused is an error when the manifests give the daemons a right that none used in all tests.
func unused() error {
	var all []error
	for _, m := range [][2]string{{"beside-calico", "base"}, {"etcd", "etcd"}} {
		dir, file := m[0], m[1]
		rules, err := kube.Rights(filepath.Join("../../configs/kubernetes", file, "account.yaml"))
		if err == nil {
			err = kube.Unused(rules, usedWith[dir], exceptions()[dir])
		}
		if err != nil {
			all = append(all, fmt.Errorf("%s: %w", file, err))
		}
	}
	return errors.Join(all...)
}

// whole reports whether all tests of the package run, as far as the command line says.
func whole() bool {
	given := func(name string) bool { return flag.Lookup(name).Value.String() != flag.Lookup(name).DefValue }
	return !slices.ContainsFunc([]string{"test.run", "test.skip", "test.list", "test.short"}, given)
}
