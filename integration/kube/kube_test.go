package kube_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/routerd/routerd/integration/kube"
	"github.com/routerd/routerd/integration/lab/bring"
	"github.com/routerd/routerd/store/kube/convert"
)

// server is what all tests of this package share: it takes seconds to start.
var server *kube.Server

// etcdProgram is for runs by hand of what goes through the datastore alone, as TestConformance.
var etcdProgram = flag.String("etcd", "", "the program of the API server's etcd; empty: routerd's own")

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) (code int) {
	flag.Parse()
	dir, err := os.MkdirTemp("", "kube")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	if err := bring.RemoveOrphans(labPrefix); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	begin := time.Now()
	// Policies of before Kubernetes 1.36 may have ranges that later ones do not take.
	older := []string{"--feature-gates=StrictIPCIDRValidation=false"}
	if server, err = kube.Start(ctx, kube.ServerConfig{Dir: dir, Flags: older, Etcd: *etcdProgram}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer server.Close()
	fmt.Printf("API server ready after %v\n", time.Since(begin).Round(time.Millisecond))
	if err := errors.Join(define(ctx), followLeases(ctx)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if code = m.Run(); code == 0 && whole() {
		if err := unused(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	return code
}

// define installs the custom resources of both groups by the manifests that
// users apply, and waits until they are served.
func define(ctx context.Context) error {
	var refused []error
	for _, g := range []convert.Group{convert.V1, convert.V3} {
		text, err := os.ReadFile(filepath.Join("../../configs/kubernetes/crds", string(g)+".yaml"))
		if err != nil {
			return err
		}
		for doc := range bytes.SplitSeq(text, []byte("---\n")) {
			raw, err := yaml.YAMLToJSON(doc)
			if err != nil {
				return err
			}
			if string(raw) == "null" {
				continue
			}
			_, err = server.Do(ctx, http.MethodPost, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", "application/json", raw)
			refused = append(refused, err)
		}
	}
	if err := errors.Join(refused...); err != nil {
		return err
	}
	for _, g := range []convert.Group{convert.V1, convert.V3} {
		for _, kind := range convert.CustomKinds() {
			r, _ := convert.Custom(g, kind)
			for {
				_, err := server.Do(ctx, http.MethodGet, r.Path("")+"?limit=1", "", nil)
				if err == nil {
					break
				}
				if ctx.Err() != nil {
					return errors.Join(err, ctx.Err())
				}
				select {
				case <-time.After(20 * time.Millisecond):
				case <-ctx.Done():
				}
			}
		}
	}
	return nil
}

// followLeases has the server follow Leases, the parameter of a policy in admission.yaml, for as long
// as it runs. One that has had no such policy for a second never follows them again (Kubernetes 1.37,
// apiserver, pkg/admission/plugin/policy/generic: a shared informer is started once), and goes by a
// holder of before when a test applies the manifests again.
func followLeases(ctx context.Context) error {
	const path = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolic"
	_, err := server.Do(ctx, http.MethodPost, path+"ies", "application/json", []byte(`{"apiVersion":"admissionregistration.k8s.io/v1","kind":"ValidatingAdmissionPolicy","metadata":{"name":"leases"},"spec":{`+
		`"paramKind":{"apiVersion":"coordination.k8s.io/v1","kind":"Lease"},"validations":[{"expression":"true"}],`+
		`"matchConstraints":{"resourceRules":[{"apiGroups":["none.example"],"apiVersions":["*"],"operations":["CREATE"],"resources":["nothing"]}]}}}`))
	if err != nil {
		return err
	}
	_, err = server.Do(ctx, http.MethodPost, path+"ybindings", "application/json", []byte(`{"apiVersion":"admissionregistration.k8s.io/v1","kind":"ValidatingAdmissionPolicyBinding","metadata":{"name":"leases"},"spec":{`+
		`"policyName":"leases","validationActions":["Deny"],"paramRef":{"name":"none","namespace":"kube-system","parameterNotFoundAction":"Allow"}}}`))
	return err
}

// TestDefinitionsAreAccepted: the API server takes every definition as it stands:
// none has a condition that says that its schema is not structural.
func TestDefinitionsAreAccepted(t *testing.T) {
	raw, err := server.Do(t.Context(), http.MethodGet, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", "", nil)
	if err != nil {
		t.Fatal(err)
	}
	var list struct {
		Items []struct {
			Metadata struct{ Name string }
			Status   struct {
				Conditions []struct{ Type, Status, Message string }
			}
		}
	}
	if err := json.Unmarshal(raw, &list); err != nil {
		t.Fatal(err)
	}
	if want := 2 * len(convert.CustomKinds()); len(list.Items) != want {
		t.Errorf("there are %d definitions, not %d", len(list.Items), want)
	}
	for _, item := range list.Items {
		met := map[string]string{}
		for _, c := range item.Status.Conditions {
			met[c.Type] = c.Status + " " + c.Message
		}
		for _, name := range []string{"Established", "NamesAccepted"} {
			if len(met[name]) < 4 || met[name][:4] != "True" {
				t.Errorf("%s: %s is %q", item.Metadata.Name, name, met[name])
			}
		}
		if why, ok := met["NonStructuralSchema"]; ok {
			t.Errorf("%s: not structural: %s", item.Metadata.Name, why)
		}
	}
}

// TestKubectl: what a user applies with kubectl gets the defaults, and keeps
// members of a newer version; blocks can be asked for by their node.
func TestKubectl(t *testing.T) {
	kubectlWith(t, `
apiVersion: projectcalico.org/v3
kind: IPPool
metadata: {name: by-kubectl}
spec: {cidr: 10.77.0.0/16, ofANewerVersion: [1]}
---
apiVersion: projectcalico.org/v3
kind: IPAMBlock
metadata: {name: 10-77-0-0-30}
spec: {cidr: 10.77.0.0/30, affinity: "host:n1", allocations: [null, 0, null, null], unallocated: [0, 2, 3], attributes: [{handle_id: h}]}
---
apiVersion: projectcalico.org/v3
kind: IPAMBlock
metadata: {name: 10-77-0-4-30}
spec: {cidr: 10.77.0.4/30, affinity: "host:n2", allocations: [null, null, null, null], unallocated: [0, 1, 2, 3], attributes: []}
`, "apply", "--validate=false", "-f", "-")
	defer func() {
		kubectl(t, "delete", "--wait", "ippools.projectcalico.org/by-kubectl", "ipamblocks.projectcalico.org/10-77-0-0-30", "ipamblocks.projectcalico.org/10-77-0-4-30")
	}()
	if got, want := kubectl(t, "get", "ippools.projectcalico.org", "by-kubectl", "-o", "jsonpath={.spec.nodeSelector} {.spec.vxlanMode} {.spec.ofANewerVersion}"), "all() Never [1]"; got != want {
		t.Errorf("the pool is %q, want %q", got, want)
	}
	if got, want := kubectl(t, "get", "ipamblocks.projectcalico.org", "--field-selector", "spec.affinity=host:n1", "-o", "jsonpath={range .items[*]}{.metadata.name} {.spec.allocations}{end}"), "10-77-0-0-30 [null,0,null,null]"; got != want {
		t.Errorf("blocks of n1: %q, want %q", got, want)
	}
}
