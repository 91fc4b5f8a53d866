package kube

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/transport"

	"github.com/routerd/routerd/store"
)

// Config says which API to use, and as whom.
type Config struct {
	// Kubeconfig is a file as kubectl's. Empty: this is a pod, and its service
	// account is used. Files that it names are read again when they change.
	Kubeconfig string

	// Context is the context of Kubeconfig; empty: its current one.
	Context string

	// Servers are further addresses (host:port) of the same cluster's API servers,
	// tried where the configured one cannot be reached. Their certificates have to
	// be for the configured one's name.
	Servers []string

	// APIGroup is the group of Calico's custom resources, as CALICO_API_GROUP.
	// Empty: what the cluster has.
	APIGroup string

	// UserAgent names the program to the API server.
	UserAgent string

	// Logger gets what is noticed. Nil: nothing is logged.
	Logger *slog.Logger
}

const (
	dialTimeout = 3 * time.Second // of one address: another may answer
	// A connection that says nothing is asked for a sign of life after the first,
	// and given up after the second: the host of an API server may vanish without
	// a word.
	pingAfter   = 5 * time.Second
	pingTimeout = 5 * time.Second
)

// transportOf returns how requests reach the API, and the URL before their paths.
func (c Config) transportOf() (http.RoundTripper, string, error) {
	conf, err := c.restConfig()
	if err != nil {
		return nil, "", fmt.Errorf("open the Kubernetes API: %w: %w", store.ErrInvalid, err)
	}
	if conf.Host == "" {
		return nil, "", fmt.Errorf("open the Kubernetes API: %w: %s names no server", store.ErrInvalid, c.Kubeconfig)
	}
	conf.UserAgent = cmp.Or(c.UserAgent, "routerd")
	base, _, err := rest.DefaultServerUrlFor(conf)
	if err != nil {
		return nil, "", fmt.Errorf("open the Kubernetes API: %w: server %q: %w", store.ErrInvalid, conf.Host, err)
	}
	tc, err := conf.TransportConfig()
	if err != nil {
		return nil, "", fmt.Errorf("open the Kubernetes API: %w: %w", store.ErrInvalid, err)
	}
	tc.TLS.ReloadTLSFiles = tc.TLS.CertFile != "" && len(tc.TLS.CertData) == 0
	tls, err := transport.TLSConfigFor(tc)
	if err != nil {
		return nil, "", fmt.Errorf("open the Kubernetes API: %w: %w", store.ErrInvalid, err)
	}
	dialer := &dialer{others: c.Servers}
	http2 := new(http.Protocols)
	http2.SetHTTP1(true)
	http2.SetHTTP2(true)
	rt, err := transport.HTTPWrappersForConfig(tc, &http.Transport{
		Proxy:               http.ProxyFromEnvironment,
		DialContext:         dialer.dial,
		TLSClientConfig:     tls,
		TLSHandshakeTimeout: 2 * dialTimeout,
		Protocols:           http2,
		HTTP2:               &http.HTTP2Config{SendPingTimeout: pingAfter, PingTimeout: pingTimeout},
		MaxIdleConnsPerHost: 16,
		IdleConnTimeout:     90 * time.Second,
	})
	if err != nil {
		return nil, "", fmt.Errorf("open the Kubernetes API: %w: %w", store.ErrInvalid, err)
	}
	return rt, base.Scheme + "://" + base.Host + trimSlash(base.Path), nil
}

func trimSlash(path string) string {
	for len(path) > 0 && path[len(path)-1] == '/' {
		path = path[:len(path)-1]
	}
	return path
}

func (c Config) restConfig() (*rest.Config, error) {
	if c.Kubeconfig == "" {
		conf, err := rest.InClusterConfig()
		if err != nil {
			return nil, fmt.Errorf("this is no pod with a service account (%w): name a kubeconfig", err)
		}
		return conf, nil
	}
	return clientcmd.NewNonInteractiveDeferredLoadingClientConfig(
		&clientcmd.ClientConfigLoadingRules{ExplicitPath: c.Kubeconfig},
		&clientcmd.ConfigOverrides{CurrentContext: c.Context},
	).ClientConfig()
}

// dialer connects to one of several servers: to the one that answered last, if it
// still does.
type dialer struct {
	net.Dialer
	others []string

	mu   sync.Mutex
	last string
}

func (d *dialer) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	d.mu.Lock()
	candidates := append([]string{addr}, d.others...)
	if d.last != "" && d.last != addr {
		candidates = append([]string{d.last}, candidates...)
	}
	d.mu.Unlock()
	var first error
	for _, candidate := range candidates {
		try, cancel := context.WithTimeout(ctx, dialTimeout)
		conn, err := d.DialContext(try, network, candidate)
		cancel()
		if err == nil {
			d.mu.Lock()
			d.last = candidate
			d.mu.Unlock()
			return conn, nil
		}
		if first == nil {
			first = err
		}
		if ctx.Err() != nil {
			break
		}
	}
	return nil, first
}
