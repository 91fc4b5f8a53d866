package kube

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/kube/kubetest"
)

// guard is an API server that lets in who shows what it wants, and says who asked.
type guard struct {
	*httptest.Server

	mu       sync.Mutex
	cert     *tls.Certificate
	token    string   // to be shown; empty: a client certificate
	name     string   // of that certificate
	refusals int      // but of watches, which end by time and begin anew
	bodies   []string // of writes that were let in
}

func newGuard(t *testing.T, cert *tls.Certificate) *guard {
	t.Helper()
	g := &guard{cert: cert}
	g.Server = httptest.NewUnstartedServer(g)
	g.EnableHTTP2 = true
	g.TLS = &tls.Config{ClientAuth: tls.RequestClientCert, GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
		g.mu.Lock()
		defer g.mu.Unlock()
		return &tls.Config{ClientAuth: tls.RequestClientCert, Certificates: []tls.Certificate{*g.cert}, NextProtos: []string{"h2"}}, nil
	}}
	g.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, 0)
	g.StartTLS()
	t.Cleanup(g.Close)
	return g
}

// set changes what is shown and wanted.
func (g *guard) set(cert *tls.Certificate, token, name string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if cert != nil {
		g.cert = cert
	}
	g.token, g.name = token, name
}

func (g *guard) refused() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.refusals
}

func (g *guard) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	name := ""
	if len(r.TLS.PeerCertificates) > 0 {
		name = r.TLS.PeerCertificates[0].Subject.CommonName
	}
	body, _ := io.ReadAll(r.Body) // what is lost the test misses
	g.mu.Lock()
	ok := g.token != "" && r.Header.Get("Authorization") == "Bearer "+g.token || g.token == "" && name == g.name
	if !ok {
		if !watching(r) {
			g.refusals++
		}
	} else if r.Method != http.MethodGet {
		g.bodies = append(g.bodies, string(body))
	}
	g.mu.Unlock()
	switch {
	case !ok:
		w.WriteHeader(http.StatusUnauthorized)
		fmt.Fprint(w, refusal(401, "Unauthorized", "Unauthorized"))
	case watching(r):
		fmt.Fprintln(w, bookmark(7, true))
		_ = http.NewResponseController(w).Flush() // the watch ends if it cannot be
		<-r.Context().Done()
	case r.Method == http.MethodPost:
		w.WriteHeader(http.StatusCreated)
		fmt.Fprint(w, pool("a", 5, `"10.0.0.0/16"`))
	default:
		fmt.Fprint(w, pool("p", 5, `"10.0.0.0/16"`))
	}
}

// files are those of a kubeconfig in a directory.
type files struct {
	t   *testing.T
	dir string
}

func (f files) write(name string, text []byte) string {
	f.t.Helper()
	file := filepath.Join(f.dir, name)
	if err := os.WriteFile(file, text, 0o600); err != nil {
		f.t.Fatal(err)
	}
	return file
}

// config writes a kubeconfig with a user as YAML has it.
func (f files) config(server, user string) string {
	f.t.Helper()
	return f.write("config", fmt.Appendf(nil, "apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: %q, certificate-authority: ca.pem}}]\nusers: [{name: u, user: {%s}}]\ncontexts: [{name: x, context: {cluster: c, user: u}}]\ncurrent-context: x\n", server, user))
}

// TestCredentialsChange: what a server refuses from one moment to the next is read again, and
// no request fails: tokens in files and in the kubeconfig, client certificates, also while
// a watch stays on the connection that the old one made, and the certificate authority.
func TestCredentialsChange(t *testing.T) {
	t.Parallel()
	first, second := kubetest.NewAuthority(t, "first"), kubetest.NewAuthority(t, "second")
	certificate := func(f files, name string) {
		cert, key := first.Issue(time.Time{}, name)
		f.write("cert.pem", cert)
		f.write("key.pem", key)
	}
	for _, tt := range []struct {
		name string
		set  func(f files, g *guard, i int) // what is so from the i-th time on
	}{
		{"a token in a file", func(f files, g *guard, i int) {
			token := fmt.Sprint("t", i)
			f.write("token", []byte(token+"\n"))
			f.config(g.URL, "tokenFile: token")
			g.set(nil, token, "")
		}},
		{"a token in the kubeconfig", func(f files, g *guard, i int) {
			token := fmt.Sprint("t", i)
			f.config(g.URL, "token: "+token)
			g.set(nil, token, "")
		}},
		{"a client certificate", func(f files, g *guard, i int) {
			name := fmt.Sprint("u", i)
			certificate(f, name)
			f.config(g.URL, "client-certificate: cert.pem, client-key: key.pem")
			g.set(nil, "", name)
		}},
		{"the authority", func(f files, g *guard, i int) {
			authority := []*kubetest.Authority{first, second}[i%2]
			f.write("ca.pem", authority.PEM)
			f.config(g.URL, "token: t")
			g.set(authority.Server(time.Time{}), "t", "")
			g.CloseClientConnections() // the server was started again
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			f, g := files{t, t.TempDir()}, newGuard(t, first.Server(time.Time{}))
			f.write("ca.pem", first.PEM)
			tt.set(f, g, 0)
			s, err := Open(Config{Kubeconfig: filepath.Join(f.dir, "config"), APIGroup: "projectcalico.org/v3"})
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			ch := s.Watch(ctx, store.KindIPPool)
			if b := <-ch; !b.Synced {
				t.Fatalf("told %q", told([]store.Batch{b}))
			}
			for i := range 2 * oldConnections {
				tt.set(f, g, i+1)
				if _, err := s.Get(t.Context(), store.ResourceKey(store.KindIPPool, "p")); err != nil {
					t.Fatalf("after the change: %v", err)
				}
				o := store.New(store.KindIPPool)
				store.Meta(o).Name = "a"
				if _, err := store.Create(t.Context(), s, o); err != nil {
					t.Fatalf("a write after the change: %v", err)
				}
			}
			for _, body := range g.bodies {
				if !strings.Contains(body, `"name":"a"`) {
					t.Errorf("written is %q", body)
				}
			}
			if n := g.refused(); n > 2*oldConnections {
				t.Errorf("%d requests were refused", n)
			}
			cancel()
			for range ch { //nolint:revive // until it ends
			}
			s.Close()
		})
	}
}

// TestWriteIsRefusedFirst: a write that is the first request after a change is made again whole.
func TestWriteIsRefusedFirst(t *testing.T) {
	t.Parallel()
	ca := kubetest.NewAuthority(t, "ca")
	f, g := files{t, t.TempDir()}, newGuard(t, ca.Server(time.Time{}))
	f.write("ca.pem", ca.PEM)
	f.write("token", []byte("old"))
	s, err := Open(Config{Kubeconfig: f.config(g.URL, "tokenFile: token"), APIGroup: "projectcalico.org/v3"})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	f.write("token", []byte("new"))
	g.set(nil, "new", "")
	o := store.New(store.KindIPPool)
	store.Meta(o).Name = "a"
	if _, err := store.Create(t.Context(), s, o); err != nil {
		t.Fatal(err)
	}
	if len(g.bodies) != 1 || !strings.Contains(g.bodies[0], `"name":"a"`) || g.refused() != 1 {
		t.Errorf("written is %q, after %d refusals", g.bodies, g.refused())
	}
}

// TestCredentialsRefused: where the files say nothing else, a request is made once, and the
// error names the file. Files that cannot be used, as those that are just being written,
// change nothing, and are reported once.
func TestCredentialsRefused(t *testing.T) {
	t.Parallel()
	ca, other := kubetest.NewAuthority(t, "ca"), kubetest.NewAuthority(t, "other")
	f, g := files{t, t.TempDir()}, newGuard(t, ca.Server(time.Time{}))
	f.write("ca.pem", ca.PEM)
	token := f.write("token", []byte("expired"))
	var log bytes.Buffer
	s, err := Open(Config{Kubeconfig: f.config(g.URL, "tokenFile: token"), APIGroup: "projectcalico.org/v3", Logger: slog.New(slog.NewTextHandler(&log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	get := func(want string) {
		t.Helper()
		_, err := s.Get(t.Context(), store.ResourceKey(store.KindIPPool, "p"))
		if want == "" && err == nil {
			return
		}
		if !errors.Is(err, store.ErrUnavailable) || want == "" || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
	g.set(nil, "valid", "")
	get("the token in " + token + " is refused: it may have expired")
	if n := g.refused(); n != 1 {
		t.Errorf("asked %d times", n)
	}
	ctx, cancel := context.WithCancel(t.Context())
	s.identified = true // so that the watches are what is refused
	ch := s.Watch(ctx, store.KindIPPool, store.KindTier)
	<-ch // it says that there is an outage, after the log does
	cancel()
	for range ch { //nolint:revive // until it ends
	}
	if said := log.String(); strings.Count(said, "datastore unavailable\"") != 1 || !strings.Contains(said, "the token in "+token+" is refused") {
		t.Errorf("of an outage is said: %s", said)
	}
	f.write("token", []byte("valid"))
	get("")
	f.write("token", nil)
	g.set(nil, "renewed", "")
	for range 3 {
		get("is refused")
	}
	if n := strings.Count(log.String(), "cannot be used"); n != 1 || !strings.Contains(log.String(), token+" is empty") {
		t.Errorf("reported %d times: %s", n, log.String())
	}
	f.write("token", []byte("renewed"))
	get("")
	g.set(other.Server(time.Time{}), "renewed", "")
	g.CloseClientConnections()
	get("signed by an unknown authority: the one that counts is " + filepath.Join(f.dir, "ca.pem"))
	f.config("https://127.0.0.1:1", "tokenFile: token")
	get("unknown authority")
	if !strings.Contains(log.String(), "start routerd again") {
		t.Errorf("of another server is said: %s", log.String())
	}
}

// TestClock: a clock that is an hour off shows in the server's certificate, which is said.
func TestClock(t *testing.T) {
	t.Parallel()
	ca := kubetest.NewAuthority(t, "ca")
	for name, from := range map[string]time.Time{"slow": time.Now().Add(30 * time.Minute), "fast": time.Now().Add(-90 * time.Minute)} {
		f, g := files{t, t.TempDir()}, newGuard(t, ca.Server(from))
		f.write("ca.pem", ca.PEM)
		s, err := Open(Config{Kubeconfig: f.config(g.URL, "token: t"), APIGroup: "projectcalico.org/v3"})
		if err != nil {
			t.Fatal(err)
		}
		_, err = s.Get(t.Context(), store.ResourceKey(store.KindIPPool, "p"))
		if !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "renew it, or mend this host's clock") {
			t.Errorf("with a %s clock: %v", name, err)
		}
		s.Close()
	}
}
