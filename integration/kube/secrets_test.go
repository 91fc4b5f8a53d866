package kube_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/kube"
	"github.com/routerd/routerd/store"
	kubestore "github.com/routerd/routerd/store/kube"
	"github.com/routerd/routerd/store/kube/convert"
)

// TestFollowSecret: with the rights of the manifests a daemon follows the Secret that they name and no other, until a Role
// names that, made by the commands of the guide; of each the changes are told.
func TestFollowSecret(t *testing.T) {
	open(t, convert.V3)
	create(t, "/api/v1/nodes", `{"apiVersion":"v1","kind":"Node","metadata":{"name":"node1"}}`)
	install(t)
	config, err := server.Kubeconfig("", token(t, "node1"))
	if err != nil {
		t.Fatal(err)
	}
	s := openStore(t, kubestore.Config{Kubeconfig: config, APIGroup: string(convert.V3), UserAgent: kube.Thief}) // it asks for what it may not have
	ctx, cancel := context.WithCancel(t.Context())
	var following sync.WaitGroup
	defer following.Wait()
	defer cancel()
	var mu sync.Mutex
	told := map[string]string{}
	for _, name := range []string{"bgp-secrets", "tor"} {
		following.Go(func() {
			s.FollowSecret(ctx, name, func(data map[string][]byte, err error) {
				mu.Lock()
				defer mu.Unlock()
				switch {
				case errors.Is(err, store.ErrNotFound):
					told[name] = "none"
				case err != nil:
					told[name] = err.Error()
				default:
					told[name] = string(data["password"])
				}
			})
		})
	}
	says := func(name, want string) {
		t.Helper()
		await.Until(t, "the Secret is told", func() error {
			mu.Lock()
			defer mu.Unlock()
			if !strings.Contains(told[name], want) {
				return fmt.Errorf("%s: told %q, want %q", name, told[name], want)
			}
			return nil
		})
	}
	for _, name := range []string{"bgp-secrets", "tor"} {
		t.Cleanup(func() { kubectl(t, "-n", "kube-system", "delete", "--ignore-not-found", "secret", name) })
		kubectl(t, "-n", "kube-system", "create", "secret", "generic", name, "--from-literal=password=a-"+name)
	}
	says("bgp-secrets", "a-bgp-secrets")
	says("tor", "no role of this user names it")
	t.Cleanup(func() { kubectl(t, "-n", "kube-system", "delete", "role,rolebinding", "routerd-bgp-tor") })
	kubectl(t, "-n", "kube-system", "create", "role", "routerd-bgp-tor", "--verb=list,watch", "--resource=secrets", "--resource-name=tor")
	kubectl(t, "-n", "kube-system", "create", "rolebinding", "routerd-bgp-tor", "--role=routerd-bgp-tor", "--serviceaccount=kube-system:routerd")
	says("tor", "a-tor")
	for _, name := range []string{"bgp-secrets", "tor"} {
		kubectl(t, "-n", "kube-system", "patch", "secret", name, "-p", `{"stringData":{"password":"b"}}`)
		says(name, "b")
		kubectl(t, "-n", "kube-system", "delete", "secret", name)
		says(name, "none")
	}
}
