package kube

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/transport"

	"github.com/routerd/routerd/store"
)

const (
	// lookAgain is how long requests go by what the files said, unless a server refuses
	// it.
	lookAgain = 10 * time.Second
	// oldConnections is of how many credentials before the present ones connections
	// are closed as their watches end; those of older ones the idle timeout closes.
	oldConnections = 4
)

// credentials makes requests as the user that the configuration's files say, with the
// certificate authority that they say. When the files change, later requests go by
// what they say then, over connections of their own: a connection shows its
// client certificate when it is made, and never again. Watches stay on the connection that
// they have. A request that a server refuses for its user, or whose server is not believed,
// was not carried out: it is made once more if the files say something else by now.
type credentials struct {
	conf   Config
	dialer *dialer
	base   string // the URL before the paths of requests
	log    *slog.Logger

	mu      sync.Mutex
	now     *identity
	old     []*http.Transport
	looked  time.Time
	unusual [sha256.Size]byte // of what could not be used and was reported
}

// identity is what the files said at one time.
type identity struct {
	http.RoundTripper
	pool      *http.Transport
	files     []string
	sum       [sha256.Size]byte // of what files say
	user      string            // what shows who asks, for people
	authority string            // what the server's certificate is judged by, for people
}

// newCredentials reads the files. An error matches [store.ErrInvalid].
func newCredentials(c Config, d *dialer, log *slog.Logger) (*credentials, error) {
	cr := &credentials{conf: c, dialer: d, log: log}
	id, base, err := c.identity(d)
	if err != nil {
		return nil, fmt.Errorf("open the Kubernetes API: %w: %w", store.ErrInvalid, err)
	}
	cr.now, cr.base, cr.looked = id, base, time.Now()
	return cr, nil
}

// RoundTrip implements [http.RoundTripper].
func (c *credentials) RoundTrip(req *http.Request) (*http.Response, error) {
	id := c.current(lookAgain)
	resp, err := id.RoundTrip(req)
	if !refused(resp, err) || req.Body != nil && req.Body != http.NoBody && req.GetBody == nil {
		return resp, err
	}
	next := c.current(0)
	if next == id {
		return resp, err
	}
	again := req.Clone(req.Context())
	if req.GetBody != nil {
		body, bodyErr := req.GetBody()
		if bodyErr != nil {
			return resp, err
		}
		again.Body = body
	}
	if resp != nil {
		_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, 1<<16)) // so that the connection can be used again
		resp.Body.Close()
	}
	return next.RoundTrip(again)
}

// refused reports whether a request was not carried out because one side does not believe
// the other.
func refused(resp *http.Response, err error) bool {
	if err == nil {
		return resp.StatusCode == http.StatusUnauthorized
	}
	var verification *tls.CertificateVerificationError
	var op *net.OpError
	return errors.As(err, &verification) || errors.As(err, &op) && op.Op == "remote error" // an alert of TLS
}

// CloseIdleConnections is called by [http.Client.CloseIdleConnections].
func (c *credentials) CloseIdleConnections() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, pool := range append(c.old, c.now.pool) {
		pool.CloseIdleConnections()
	}
}

// current returns what the files say, as of no longer ago than age. What cannot be used, as a
// file that is just being written, changes nothing.
func (c *credentials) current(age time.Duration) *identity {
	c.mu.Lock()
	defer c.mu.Unlock()
	if age > 0 && time.Since(c.looked) < age {
		return c.now
	}
	c.looked = time.Now()
	sum := sumOf(c.now.files)
	if sum == c.now.sum {
		return c.now
	}
	id, base, err := c.conf.identity(c.dialer)
	if err == nil && base != c.base {
		err = fmt.Errorf("the server is %s there, and was %s: start routerd again to go there", base, c.base)
	}
	if err != nil {
		if sum != c.unusual {
			c.unusual = sum
			c.log.Warn("the credentials for the Kubernetes API have changed and cannot be used; those from before still are", "files", c.now.files, "error", err)
		}
		return c.now
	}
	c.log.Info("the credentials for the Kubernetes API have changed", "files", id.files)
	c.old = append(c.old, c.now.pool)
	for _, pool := range c.old {
		pool.CloseIdleConnections()
	}
	c.old = slices.Clone(c.old[max(0, len(c.old)-oldConnections):])
	c.now = id
	return id
}

// describe returns in words what shows who asks, and by what the server is judged.
func (c *credentials) describe() (user, authority string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now.user, c.now.authority
}

// sumOf returns a digest of what files hold. One that cannot be read counts as such.
func sumOf(files []string) (sum [sha256.Size]byte) {
	h := sha256.New()
	for _, file := range files {
		text, err := os.ReadFile(file)
		fmt.Fprintf(h, "%s %d %v\n", file, len(text), err != nil)
		h.Write(text)
	}
	return [sha256.Size]byte(h.Sum(nil))
}

// identity reads the files, and returns what they say and the URL before paths.
func (c Config) identity(d *dialer) (*identity, string, error) {
	conf, err := c.restConfig()
	if err != nil {
		return nil, "", err
	}
	id := &identity{}
	for _, file := range append(filepath.SplitList(c.Kubeconfig), conf.BearerTokenFile, conf.CAFile, conf.CertFile, conf.KeyFile) {
		if file != "" && !slices.Contains(id.files, file) {
			id.files = append(id.files, file)
		}
	}
	// What changes while the files are read is seen at the next look.
	id.sum = sumOf(id.files)
	id.user, id.authority = describe(c, conf)
	if conf.BearerTokenFile != "" {
		text, err := os.ReadFile(conf.BearerTokenFile)
		if err != nil {
			return nil, "", fmt.Errorf("token: %w", err)
		}
		if text = bytes.TrimSpace(text); len(text) == 0 {
			return nil, "", fmt.Errorf("token: %s is empty", conf.BearerTokenFile)
		}
		conf.BearerToken, conf.BearerTokenFile = string(text), ""
	}
	if conf.Host == "" {
		return nil, "", fmt.Errorf("%s names no server: set clusters[].cluster.server there", c.Kubeconfig)
	}
	conf.UserAgent = cmp.Or(c.UserAgent, "routerd")
	base, _, err := rest.DefaultServerUrlFor(conf)
	if err != nil {
		return nil, "", fmt.Errorf("server %q: %w", conf.Host, err)
	}
	tc, err := conf.TransportConfig()
	if err != nil {
		return nil, "", err
	}
	trust, err := transport.TLSConfigFor(tc)
	if err != nil {
		return nil, "", fmt.Errorf("%s: %w", strings.Join(id.files, ", "), err)
	}
	if trust == nil {
		trust = &tls.Config{}
	}
	http2 := new(http.Protocols)
	http2.SetHTTP1(true)
	http2.SetHTTP2(true)
	id.pool = &http.Transport{
		Proxy: http.ProxyFromEnvironment,
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			return d.dial(ctx, network, addr, nil)
		},
		DialTLSContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			return d.dialTLS(ctx, network, addr, trust)
		},
		TLSClientConfig:     trust, // of a connection through a proxy
		TLSHandshakeTimeout: greetTimeout,
		Protocols:           http2,
		HTTP2:               &http.HTTP2Config{SendPingTimeout: pingAfter, PingTimeout: pingTimeout},
		MaxIdleConnsPerHost: 16,
		IdleConnTimeout:     90 * time.Second,
	}
	if id.RoundTripper, err = transport.HTTPWrappersForConfig(tc, id.pool); err != nil {
		return nil, "", err
	}
	return id, base.Scheme + "://" + base.Host + trimSlash(base.Path), nil
}

// describe says in words what shows who asks, and by what the server is judged.
func describe(c Config, conf *rest.Config) (user, authority string) {
	switch {
	case conf.BearerTokenFile != "":
		user = "the token in " + conf.BearerTokenFile
	case c.Token != "":
		user = "the token of K8S_API_TOKEN"
	case conf.CertFile != "":
		user = "the client certificate " + conf.CertFile
	case conf.BearerToken != "":
		user = "the token in " + c.Kubeconfig
	case c.Kubeconfig != "":
		user = "the user of " + c.Kubeconfig
	}
	switch {
	case conf.CAFile != "":
		authority = conf.CAFile
	case len(conf.CAData) > 0:
		authority = "clusters[].cluster.certificate-authority-data of " + c.Kubeconfig
	case c.Kubeconfig != "":
		authority = "the system's, for " + c.Kubeconfig + " names none in clusters[].cluster.certificate-authority"
	}
	return user, authority
}
