package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/transport"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/config"
	"github.com/routerd/routerd/integration/await"
)

// endShown waits until the metric of the first certificate's end says a time.
func (h *host) endShown(want time.Time) {
	h.t.Helper()
	const name = "routerd_datastore_certificate_expiry_timestamp_seconds "
	await.Until(h.t, "the metric of the certificates' end", func() error {
		code, body, err := h.get("/metrics")
		if err != nil || code != http.StatusOK {
			return fmt.Errorf("%d, %w", code, err)
		}
		for line := range strings.Lines(body) {
			text, is := strings.CutPrefix(line, name)
			if !is {
				continue
			}
			at, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
			if err == nil && int64(at) != want.Unix() {
				err = fmt.Errorf("it says %s, which is %s from now; want %s", text, time.Until(time.Unix(int64(at), 0)), want)
			}
			return err
		}
		return errors.New("there is none")
	})
}

// endOf returns when the certificate in a file ends.
func endOf(t *testing.T, file string) time.Time {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(text)
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	return cert.NotAfter
}

// site is an authority that is none of routerd's.
type site struct {
	t    *testing.T
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newSite(t *testing.T) *site {
	t.Helper()
	s := &site{t: t, dir: t.TempDir()}
	s.cert, s.key = s.issue("ca", 20*365*24*time.Hour)
	return s
}

func (s *site) file(name string) string { return filepath.Join(s.dir, name) }

// issue writes NAME.crt, which ends after a time, and NAME.key.
func (s *site) issue(name string, left time.Duration) (*x509.Certificate, *ecdsa.PrivateKey) {
	s.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		s.t.Fatal(err)
	}
	c := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: "site's " + name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(left),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
	}
	by, byKey := s.cert, s.key
	if by == nil {
		c.IsCA, c.BasicConstraintsValid, c.KeyUsage, c.ExtKeyUsage = true, true, x509.KeyUsageCertSign, nil
		by, byKey = c, key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, by, key.Public(), byKey)
	if err == nil {
		c, err = x509.ParseCertificate(der)
	}
	secret, kerr := x509.MarshalPKCS8PrivateKey(key)
	err = errors.Join(err, kerr,
		os.WriteFile(s.file(name+".crt"), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600),
		os.WriteFile(s.file(name+".key"), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret}), 0o600))
	if err != nil {
		s.t.Fatal(err)
	}
	return c, key
}

// serve starts an etcd on a host, for who has a certificate of the site.
func (s *site) serve(h *host) (endpoint string) {
	s.t.Helper()
	s.issue("server", 365*24*time.Hour)
	c := embed.NewConfig()
	c.Dir, c.ZapLoggerBuilder = s.t.TempDir(), embed.NewZapLoggerBuilder(zap.NewNop())
	client, peer := url.URL{Scheme: "https", Host: "127.0.0.1:23791"}, url.URL{Scheme: "http", Host: "127.0.0.1:23792"}
	c.ListenClientUrls, c.AdvertiseClientUrls = []url.URL{client}, []url.URL{client}
	c.ListenPeerUrls, c.AdvertisePeerUrls = []url.URL{peer}, []url.URL{peer}
	c.InitialCluster = "default=" + peer.String()
	c.ClientTLSInfo = transport.TLSInfo{CertFile: s.file("server.crt"), KeyFile: s.file("server.key"), TrustedCAFile: s.file("ca.crt"), ClientCertAuth: true}
	var e *embed.Etcd
	if err := h.ns.Do(func() (err error) { e, err = embed.StartEtcd(c); return err }); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(e.Close)
	return client.String()
}

// examined waits until what the host's doctor says first is what a check found, with its cure.
func (r *running) examined(check string) {
	r.t.Helper()
	start := time.Now()
	await.Until(r.t, "the doctor", func() error {
		resp, err := apiv1.NewDoctorClient(r.dial(config.OperatorSocketName)).Examine(await.Context(r.t), &apiv1.ExamineRequest{})
		if err != nil {
			return err
		}
		if f := resp.GetFindings(); len(f) == 0 || f[0].GetCheck() != check || f[0].GetCure() == "" {
			return fmt.Errorf("it says %v", f)
		}
		return nil
	})
	r.t.Logf("%s named after %.1f s", check, time.Since(start).Seconds())
}

// TestCertificatesEnd: of the certificates by which a host reaches the datastore the metric
// has the end of the first, and from 90 days before it on there is a condition; of a host
// that serves its own datastore to others they are that one's.
func TestCertificatesEnd(t *testing.T) {
	t.Parallel()
	const day = 24 * time.Hour
	t.Run("external", func(t *testing.T) {
		t.Parallel()
		h := newHost(t, "10.1.0.11/24")
		site := newSite(t)
		h.config["health"] = map[string]any{"listen": "127.0.0.1:9099"}
		h.config["datastore"] = map[string]any{
			"endpoints": []string{site.serve(h)}, "caFile": site.file("ca.crt"), "certFile": site.file("client.crt"), "keyFile": site.file("client.key"),
		}
		for _, left := range []time.Duration{91 * day, 90*day - time.Minute, 3 * day} {
			cert, _ := site.issue("client", left)
			r := h.start()
			r.ready()
			r.when(fmt.Sprint("what the host says with ", left, " left"), func(n *apiv1.NodeResponse) error {
				c := conditionOf(n, "Certificates")
				if c.GetOk() != (left > 90*day) {
					return fmt.Errorf("ok %t: %s", c.GetOk(), c.GetReason())
				}
				if c.GetOk() {
					return nil
				}
				return mentions(c.GetReason(), "client.crt ends on "+cert.NotAfter.Local().Format(time.DateOnly), fmt.Sprintf("in %d days", int((left-time.Minute).Hours()/24)), "put a new one in its place")
			})
			h.endShown(cert.NotAfter)
			if left < 90*day {
				r.examined("condition-certificates")
			}
			r.kill(syscall.SIGTERM)
		}
	})
	t.Run("embedded", func(t *testing.T) {
		t.Parallel()
		h := newHost(t, "10.1.0.11/24")
		h.config["health"] = map[string]any{"listen": "127.0.0.1:9099"}
		h.config["datastore"] = map[string]any{"embedded": map[string]any{"listen": "10.1.0.11:2379"}}
		r := h.start()
		r.ready()
		h.endShown(endOf(t, filepath.Join(h.dir, "state", "etcd", "pki", "server.crt")))
	})
}
