package etcd

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go.uber.org/goleak"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/embedded/clustertest"
)

func TestMain(m *testing.M) {
	clustertest.Main()
	goleak.VerifyTestMain(m)
}

func TestOpenRefuses(t *testing.T) {
	t.Parallel()
	junk := filepath.Join(t.TempDir(), "junk")
	if err := os.WriteFile(junk, []byte("no PEM"), 0o600); err != nil {
		t.Fatal(err)
	}
	https := []string{"https://10.0.0.1:2379"}
	tests := []struct {
		name string
		conf Config
		want string
	}{
		{"nothing", Config{}, "no endpoints"},
		{"no scheme", Config{Endpoints: []string{"10.0.0.1:2379"}}, `endpoint "10.0.0.1:2379"`},
		{"host only", Config{Endpoints: []string{"etcd.example"}}, "want https://host:port, http://host:port or unix:///path"},
		{"no port", Config{Endpoints: []string{"https://10.0.0.1"}}, "want https://host:port"},
		{"relative socket", Config{Endpoints: []string{"unix://run/s.sock"}}, "want unix:///path"},
		{"mixed", Config{Endpoints: []string{"http://10.0.0.1:2379", "https://10.0.0.2:2379"}}, "one scheme"},
		{"password in the URL", Config{Endpoints: []string{"https://u:secret@10.0.0.1:2379"}}, "own settings"},
		{"key without certificate", Config{Endpoints: https, KeyFile: "k"}, "needs both its files"},
		{"password without user", Config{Endpoints: https, Password: "secret"}, "go together"},
		{"no CA file", Config{Endpoints: https, CAFile: "/nonexistent/ca.crt"}, "open /nonexistent/ca.crt: no such file"},
		{"CA file of something else", Config{Endpoints: https, CAFile: junk}, junk + " holds no certificate"},
		{"certificate of something else", Config{Endpoints: https, CertFile: junk, KeyFile: junk}, "client certificate " + junk},
	}
	for _, tt := range tests {
		_, err := Open(t.Context(), tt.conf)
		if !errors.Is(err, store.ErrInvalid) || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: got %v, want %q", tt.name, err, tt.want)
		} else if strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: the error tells the password: %v", tt.name, err)
		}
	}
}

func TestOpenDiscovery(t *testing.T) {
	t.Parallel()
	_, err := Open(t.Context(), Config{DiscoverySRV: "nothing.invalid"})
	if !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "nothing.invalid") {
		t.Errorf("got %v", err)
	}
}

func TestConfigFromEnv(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name  string
		env   map[string]string
		want  Config
		found bool
		err   string
	}{
		{"nothing", nil, Config{}, false, ""},
		{"all", map[string]string{
			"DATASTORE_TYPE": "etcdv3", "ETCD_ENDPOINTS": "https://a:1, https://b:2,",
			"ETCD_CA_CERT_FILE": "ca", "ETCD_CERT_FILE": "c", "ETCD_KEY_FILE": "k",
			"ETCD_USERNAME": "u", "ETCD_PASSWORD": "p",
		}, Config{Endpoints: []string{"https://a:1", "https://b:2"}, CAFile: "ca", CertFile: "c", KeyFile: "k", Username: "u", Password: "p"}, true, ""},
		{"discovery", map[string]string{"ETCD_DISCOVERY_SRV": "example.org"}, Config{DiscoverySRV: "example.org"}, true, ""},
		{"Kubernetes", map[string]string{"DATASTORE_TYPE": "kubernetes"}, Config{}, false, "want etcdv3 or kubernetes"},
	}
	for _, tt := range tests {
		got, found, err := ConfigFromEnv(func(name string) string { return tt.env[name] })
		if tt.err != "" {
			if !errors.Is(err, store.ErrInvalid) || !strings.Contains(err.Error(), tt.err) {
				t.Errorf("%s: got %v, want %q", tt.name, err, tt.err)
			}
			continue
		}
		if diff := cmp.Diff(tt.want, got, cmpopts.EquateEmpty()); diff != "" || found != tt.found || err != nil {
			t.Errorf("%s: found %v, %v (-want +got):\n%s", tt.name, found, err, diff)
		}
	}
}

func TestConfigHidesPassword(t *testing.T) {
	t.Parallel()
	c := Config{Endpoints: []string{"http://a:1"}, Username: "someone", Password: "secret"}
	var log strings.Builder
	slog.New(slog.NewTextHandler(&log, nil)).Info("x", "config", c)
	asJSON, err := json.Marshal(struct{ Config }{Config: Config{Password: c.Password}})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []string{log.String(), fmt.Sprint(c), fmt.Sprintf("%+v", c), fmt.Sprintf("%#v", c), fmt.Sprintf("%v", &c), string(asJSON)} {
		if strings.Contains(s, "secret") {
			t.Errorf("the password is in %s", s)
		}
	}
	if !strings.Contains(log.String(), "someone") {
		t.Errorf("the user is not in %s", log.String())
	}
}
