package etcd

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"

	"github.com/routerd/routerd/store"
)

// Config says where etcd is and how to speak with it.
type Config struct {
	// Endpoints of one cluster, all of one scheme: "https://host:port",
	// "http://host:port", or "unix:///path". Required, unless DiscoverySRV is
	// set.
	Endpoints []string

	// DiscoverySRV is a domain whose SRV records (_etcd-client-ssl._tcp, else
	// _etcd-client._tcp) give the endpoints. They are looked up by [Open].
	DiscoverySRV string

	// For https. Without CAFile the system's authorities are trusted. CertFile
	// and KeyFile go together. All are read again for each connection, so that
	// new ones are used.
	CAFile, CertFile, KeyFile string

	// Username and Password go together. They are never logged.
	Username string
	Password string `json:"-"`

	// DialTimeout bounds one try to connect, KeepaliveTime is how long a silent
	// connection lives before it is probed, and KeepaliveTimeout how long the
	// probe may take. Zero means what Calico's client has: 10 s, 30 s, 10 s.
	DialTimeout, KeepaliveTime, KeepaliveTimeout time.Duration

	// DialOptions are added to the connection's own.
	DialOptions []grpc.DialOption

	// Logger gets changes of the connection's state. Nil: nothing is logged.
	Logger *slog.Logger
}

// LogValue leaves the password out.
func (c Config) LogValue() slog.Value {
	return slog.GroupValue(
		slog.Any("endpoints", c.Endpoints),
		slog.String("discovery_srv", c.DiscoverySRV),
		slog.String("ca_file", c.CAFile),
		slog.String("cert_file", c.CertFile),
		slog.String("key_file", c.KeyFile),
		slog.String("username", c.Username),
	)
}

// String leaves the password out.
func (c Config) String() string { return c.LogValue().String() }

// GoString leaves the password out.
func (c Config) GoString() string { return c.String() }

// ConfigFromEnv reads the variables that Calico's components read:
// ETCD_ENDPOINTS (separated by commas), ETCD_DISCOVERY_SRV, ETCD_CA_CERT_FILE,
// ETCD_CERT_FILE, ETCD_KEY_FILE, ETCD_USERNAME, ETCD_PASSWORD; and
// DATASTORE_TYPE, which must be empty or "etcdv3". getenv is [os.Getenv] or a
// stand-in. It reports false when no variable says where etcd is.
func ConfigFromEnv(getenv func(string) string) (Config, bool, error) {
	if t := getenv("DATASTORE_TYPE"); t != "" && t != "etcdv3" {
		return Config{}, false, fmt.Errorf("%w: DATASTORE_TYPE=%q: want etcdv3 or kubernetes", store.ErrInvalid, t)
	}
	c := Config{
		DiscoverySRV: getenv("ETCD_DISCOVERY_SRV"),
		CAFile:       getenv("ETCD_CA_CERT_FILE"),
		CertFile:     getenv("ETCD_CERT_FILE"),
		KeyFile:      getenv("ETCD_KEY_FILE"),
		Username:     getenv("ETCD_USERNAME"),
		Password:     getenv("ETCD_PASSWORD"),
	}
	for e := range strings.SplitSeq(getenv("ETCD_ENDPOINTS"), ",") {
		if e = strings.TrimSpace(e); e != "" {
			c.Endpoints = append(c.Endpoints, e)
		}
	}
	return c, len(c.Endpoints) > 0 || c.DiscoverySRV != "", nil
}

// validate checks what can be checked without the network and returns the
// scheme of the endpoints.
func (c *Config) validate() (scheme string, err error) {
	for _, e := range c.Endpoints {
		u, err := url.Parse(e)
		if err != nil {
			return "", fmt.Errorf("%w: endpoint %q: %w", store.ErrInvalid, e, errors.Unwrap(err))
		}
		switch {
		case u.User != nil:
			return "", fmt.Errorf("%w: endpoint %q: put user and password into their own settings", store.ErrInvalid, u.Redacted())
		case u.Scheme == "unix" && (u.Host != "" || !strings.HasPrefix(u.Path, "/")):
			return "", fmt.Errorf("%w: endpoint %q: want unix:///path with an absolute path", store.ErrInvalid, e)
		case (u.Scheme == "http" || u.Scheme == "https") && (u.Hostname() == "" || u.Port() == ""):
			return "", fmt.Errorf("%w: endpoint %q: want %s://host:port", store.ErrInvalid, e, u.Scheme)
		case !slices.Contains([]string{"http", "https", "unix"}, u.Scheme):
			return "", fmt.Errorf("%w: endpoint %q: want https://host:port, http://host:port or unix:///path", store.ErrInvalid, e)
		case scheme != "" && scheme != u.Scheme:
			return "", fmt.Errorf("%w: endpoints %s: all must have one scheme", store.ErrInvalid, strings.Join(c.Endpoints, ","))
		}
		scheme = u.Scheme
	}
	switch {
	case len(c.Endpoints) == 0:
		return "", fmt.Errorf("%w: no endpoints: set at least one, such as https://10.0.0.1:2379", store.ErrInvalid)
	case (c.CertFile == "") != (c.KeyFile == ""):
		return "", fmt.Errorf("%w: a client certificate needs both its files: certificate %q, key %q", store.ErrInvalid, c.CertFile, c.KeyFile)
	case (c.Username == "") != (c.Password == ""):
		return "", fmt.Errorf("%w: user name and password go together: one of them is empty", store.ErrInvalid)
	}
	return scheme, nil
}

// discover fills in the endpoints from DNS (RFC 2782).
func (c *Config) discover(ctx context.Context) error {
	if len(c.Endpoints) > 0 || c.DiscoverySRV == "" {
		return nil
	}
	var failures []error
	for _, kind := range []struct{ service, scheme string }{{"etcd-client-ssl", "https"}, {"etcd-client", "http"}} {
		_, records, err := net.DefaultResolver.LookupSRV(ctx, kind.service, "tcp", c.DiscoverySRV)
		if err != nil {
			failures = append(failures, err)
			continue
		}
		for _, r := range records {
			host := net.JoinHostPort(strings.TrimSuffix(r.Target, "."), fmt.Sprint(r.Port))
			c.Endpoints = append(c.Endpoints, kind.scheme+"://"+host)
		}
		if len(c.Endpoints) > 0 {
			return nil
		}
	}
	return fmt.Errorf("%w: discover etcd in %s: %w", store.ErrUnavailable, c.DiscoverySRV, errors.Join(failures...))
}

// tls reads the files that the configuration names.
func (c *Config) tls() (*tls.Config, error) {
	conf := &tls.Config{MinVersion: tls.VersionTLS12}
	if c.CAFile != "" {
		pem, err := c.Authorities()
		if err != nil {
			return nil, err
		}
		conf.RootCAs = x509.NewCertPool()
		if !conf.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%w: CA file %s holds no certificate in PEM form", store.ErrInvalid, c.CAFile)
		}
	}
	if c.CertFile != "" {
		pair, err := c.Pair()
		if err != nil {
			return nil, err
		}
		// Also to a server that names other authorities: its refusal says why.
		conf.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return pair, nil }
	}
	return conf, nil
}
