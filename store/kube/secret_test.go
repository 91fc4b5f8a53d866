package kube

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/kube/kubetest"
)

// TestFollowSecret: what becomes of one Secret is told, and nothing of another; also after the API was away.
func TestFollowSecret(t *testing.T) {
	t.Parallel()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	api, kubeconfig := kubetest.New(t, listener), filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(kubeconfig, []byte(api.Kubeconfig()), 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := Open(Config{Kubeconfig: kubeconfig, APIGroup: "projectcalico.org"})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	ctx, cancel := context.WithCancel(t.Context())
	var following sync.WaitGroup
	defer following.Wait()
	defer cancel()
	told := make(chan string, 100)
	following.Go(func() {
		s.FollowSecret(ctx, "tor", func(data map[string][]byte, err error) {
			switch {
			case errors.Is(err, store.ErrNotFound):
				told <- "none"
			case err != nil:
				told <- "away"
			default:
				told <- string(data["password"])
			}
		})
	})
	says := func(want string) {
		t.Helper()
		await.Until(t, "the Secret is told", func() error {
			select {
			case got := <-told:
				if got == want {
					return nil
				}
				return fmt.Errorf("told %q, want %q", got, want)
			default:
				return fmt.Errorf("nothing told, want %q", want)
			}
		})
	}
	const path = "/api/v1/namespaces/kube-system/secrets/"
	put := func(name, password string) {
		t.Helper()
		if err := api.Create(path+name, fmt.Sprintf(`{"kind":"Secret","apiVersion":"v1","data":{"password":%q}}`, password)); err != nil {
			t.Fatal(err)
		}
	}
	says("none")
	put("other", "eA==")
	put("tor", "YQ==")
	says("a")
	put("tor", "Yg==")
	says("b")
	api.SetAway(true)
	says("away")
	put("tor", "Yw==")
	api.SetAway(false)
	says("c")
	api.Delete(path + "tor")
	says("none")
	put("tor", "ZA==")
	says("d")

	s.FollowSecret(ctx, "tor,metadata.name!=tor", func(data map[string][]byte, err error) {
		if data != nil || !errors.Is(err, store.ErrInvalid) {
			t.Errorf("a name that is none: %v, %v", data, err)
		}
	})
}
