package kube

import (
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

// kubeconfig writes one for a server, with a certificate authority if ca is not
// nil.
func kubeconfig(t *testing.T, server string, ca []byte) string {
	t.Helper()
	authority := ""
	if ca != nil {
		file := filepath.Join(t.TempDir(), "ca.pem")
		if err := os.WriteFile(file, ca, 0o600); err != nil {
			t.Fatal(err)
		}
		authority = fmt.Sprintf(", certificate-authority: %q", file)
	}
	file := filepath.Join(t.TempDir(), "config")
	text := fmt.Sprintf("apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: %q%s}}]\nusers: [{name: u, user: {token: t}}]\ncontexts: [{name: x, context: {cluster: c, user: u}}]\ncurrent-context: x\n", server, authority)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

func TestConfigRefusals(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	broken := filepath.Join(t.TempDir(), "broken")
	if err := os.WriteFile(broken, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		c    Config
		want string
	}{
		"not in a pod":                        {Config{}, "name a kubeconfig"},
		"no such file":                        {Config{Kubeconfig: "/nonexistent/config"}, "/nonexistent/config"},
		"no YAML":                             {Config{Kubeconfig: broken}, broken},
		"no server":                           {Config{Kubeconfig: kubeconfig(t, "", nil)}, "no server"},
		"no such context":                     {Config{Kubeconfig: kubeconfig(t, "https://127.0.0.1:1", nil), Context: "other"}, `"other" does not exist`},
		"an authority that is no certificate": {Config{Kubeconfig: kubeconfig(t, "https://127.0.0.1:1", []byte("no PEM"))}, "root certificates"},
	} {
		if _, err := Open(tt.c); !errors.Is(err, store.ErrInvalid) || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// apiServer answers as an empty API does, and shows the token that it got.
func apiServer(t *testing.T) (s *httptest.Server, ca []byte) {
	t.Helper()
	s = httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusNotFound)
		fmt.Fprint(w, refusal(404, "NotFound", "asked with "+r.Header.Get("Authorization")))
	}))
	t.Cleanup(s.Close)
	return s, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
}

// TestOtherServers: where the configured server cannot be reached, another one is
// asked, whose certificate has to be for the configured name.
func TestOtherServers(t *testing.T) {
	t.Parallel()
	api, ca := apiServer(t)
	dead, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	dead.Close()
	s, err := Open(Config{Kubeconfig: kubeconfig(t, "https://"+dead.Addr().String(), ca), Servers: []string{api.Listener.Addr().String()}, APIGroup: "projectcalico.org/v3"})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if _, err := s.Get(t.Context(), store.ResourceKey(store.KindIPPool, "p")); !errors.Is(err, store.ErrNotFound) || !strings.Contains(err.Error(), "asked with Bearer t") {
		t.Errorf("got %v", err)
	}
}

// TestServersOnDisk: where the API servers are is known from the run before, although
// the configured address, a service's, leads nowhere yet.
func TestServersOnDisk(t *testing.T) {
	t.Parallel()
	var api *httptest.Server
	api = httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !strings.Contains(r.URL.Path, "endpointslices") {
			w.WriteHeader(http.StatusNotFound)
			fmt.Fprint(w, refusal(404, "NotFound", "asked"))
			return
		}
		host, port, _ := net.SplitHostPort(api.Listener.Addr().String())
		fmt.Fprintf(w, `{"endpoints":[{"addresses":[%q]}],"ports":[{"name":"https","port":%s}]}`, host, port)
	}))
	t.Cleanup(api.Close)
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: api.Certificate().Raw})
	file := filepath.Join(t.TempDir(), "servers")
	open := func(url string) *Store {
		s, err := Open(Config{Kubeconfig: kubeconfig(t, url, ca), ServersFile: file, APIGroup: "projectcalico.org/v3"})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	first := open(api.URL)
	await.Until(t, "the servers are on disk", func() error { _, err := os.Stat(file); return err })
	first.Close()

	second := open("https://127.0.0.1:1")
	defer second.Close()
	if _, err := second.Get(t.Context(), store.ResourceKey(store.KindIPPool, "p")); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("got %v", err)
	}

	// What is damaged there is no reason not to start.
	if err := os.WriteFile(file, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	third := open(api.URL)
	defer third.Close()
	if _, err := third.Get(t.Context(), store.ResourceKey(store.KindIPPool, "p")); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("with a damaged file: %v", err)
	}
}

// TestUnreachable: what is wrong with a connection is said in words.
func TestUnreachable(t *testing.T) {
	t.Parallel()
	api, _ := apiServer(t)
	dead, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	dead.Close()
	for name, tt := range map[string]struct{ file, want string }{
		"nothing listens":      {kubeconfig(t, "https://"+dead.Addr().String(), nil), "is the API server running there?"},
		"of another authority": {kubeconfig(t, api.URL, nil), "unknown authority"},
	} {
		s, err := Open(Config{Kubeconfig: tt.file, APIGroup: "projectcalico.org/v3"})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		if _, err := s.Get(t.Context(), store.ResourceKey(store.KindIPPool, "p")); !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
