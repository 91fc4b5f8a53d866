package embedded

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

var today = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

func at(t time.Time) func() time.Time { return func() time.Time { return t } }

func files(t *testing.T, dir string) map[string]string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	content := make(map[string]string)
	for _, e := range entries {
		text, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		content[e.Name()] = string(text)
	}
	return content
}

// changed returns which files of before are different in after.
func changed(before, after map[string]string) []string {
	var names []string
	for name, text := range after {
		if before[name] != text {
			names = append(names, name)
		}
	}
	return names
}

func sorted() cmp.Option { return cmpopts.SortSlices(func(a, b string) bool { return a < b }) }

func TestPKI(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "pki")
	here := names{dns: []string{"localhost"}, ips: []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")}}
	if err := (pki{dir, at(today)}).ensure(here); err != nil {
		t.Fatal(err)
	}
	made := files(t, dir)
	if diff := cmp.Diff([]string{"ca.crt", "ca.key", "client.crt", "client.key", "peer.crt", "peer.key", "server.crt", "server.key"}, changed(nil, made), sorted()); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
	for name := range made {
		info, err := os.Stat(filepath.Join(dir, name))
		if err != nil || strings.HasSuffix(name, ".key") && info.Mode() != 0o600 {
			t.Errorf("%s is %v, %v", name, info.Mode(), err)
		}
	}
	server, err := tls.LoadX509KeyPair(filepath.Join(dir, "server.crt"), filepath.Join(dir, "server.key"))
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM([]byte(made["ca.crt"]))
	for _, name := range []string{"localhost", "10.0.0.1", "fd00::1"} {
		if _, err := server.Leaf.Verify(x509.VerifyOptions{DNSName: name, Roots: roots, CurrentTime: today}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := server.Leaf.Verify(x509.VerifyOptions{Roots: roots, CurrentTime: today, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err == nil {
		t.Error("the server's certificate serves as a client's")
	}
	if key, ok := server.PrivateKey.(*ecdsa.PrivateKey); !ok || key.Curve != elliptic.P256() {
		t.Errorf("the key is a %T", server.PrivateKey)
	}

	fewer := names{dns: here.dns, ips: here.ips[:1]}
	more := names{dns: []string{"localhost", "store.example"}, ips: here.ips}
	third := today.Add(leafLife - leafLife/3 + 24*time.Hour)
	serverFiles, leaves := []string{"server.crt", "server.key", "peer.crt", "peer.key"}, []string{"client.crt", "client.key", "peer.crt", "peer.key", "server.crt", "server.key"}
	steps := []struct {
		name  string
		now   time.Time
		names names
		harm  func() error
		want  []string
	}{
		{name: "a restart", now: today.Add(time.Hour), names: here},
		{name: "fewer names", now: today, names: fewer},
		{name: "more names", now: today, names: more, want: serverFiles},
		{name: "more names again", now: today, names: more},
		{name: "the last third", now: third, names: more, want: leaves},
		{name: "a clock that went back", now: today.Add(-48 * time.Hour), names: more, want: leaves},
		{name: "a kill between key and certificate", now: today, names: more, want: serverFiles[:2], harm: func() error {
			return os.WriteFile(filepath.Join(dir, "server.key"), []byte(made["server.key"]), 0o600)
		}},
		{name: "a lost client certificate", now: today, names: more, want: []string{"client.crt", "client.key"}, harm: func() error {
			return os.Remove(filepath.Join(dir, "client.crt"))
		}},
		{name: "a kill before the first certificate", now: today, names: more, want: append([]string{"ca.crt", "ca.key"}, leaves...), harm: func() error {
			return os.Remove(filepath.Join(dir, "ca.crt"))
		}},
	}
	for _, step := range steps {
		if step.harm != nil {
			if err := step.harm(); err != nil {
				t.Fatal(err)
			}
		}
		before := files(t, dir)
		if err := (pki{dir, at(step.now)}).ensure(step.names); err != nil {
			t.Errorf("%s: %v", step.name, err)
		}
		if diff := cmp.Diff(step.want, changed(before, files(t, dir)), sorted()); diff != "" {
			t.Errorf("%s: remade files (-want +got):\n%s", step.name, diff)
		}
	}
}

func TestPKIErrors(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name string
		now  time.Time
		harm func(dir string) error
		want string
	}{
		{"authority's key lost", today, func(dir string) error { return os.Remove(filepath.Join(dir, "ca.key")) }, "restore both, or remove"},
		{"authority's key of another", today, func(dir string) error {
			key, err := os.ReadFile(filepath.Join(dir, "client.key"))
			return errors.Join(err, os.WriteFile(filepath.Join(dir, "ca.key"), key, 0o600))
		}, "restore both, or remove"},
		{"a leaf in the authority's place", today, func(dir string) error {
			return errors.Join(os.Rename(filepath.Join(dir, "client.key"), filepath.Join(dir, "ca.key")), os.Rename(filepath.Join(dir, "client.crt"), filepath.Join(dir, "ca.crt")))
		}, "is no certificate authority"},
		{"authority expired", today.Add(caLife + time.Hour), func(string) error { return nil }, "expired on 2056"},
	}
	for _, tt := range tests {
		dir := t.TempDir()
		if err := (pki{dir, at(today)}).ensure(names{}); err != nil {
			t.Fatal(err)
		}
		if err := tt.harm(dir); err != nil {
			t.Fatal(err)
		}
		if err := (pki{dir, at(tt.now)}).ensure(names{}); err == nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), dir) {
			t.Errorf("%s: got %v, want %q", tt.name, err, tt.want)
		}
	}
	if err := (pki{"/proc/routerd", time.Now}).ensure(names{}); err == nil {
		t.Error("certificates in an impossible place")
	}
}

func TestServerNames(t *testing.T) {
	t.Parallel()
	interfaces := func() ([]net.Addr, error) {
		var addrs []net.Addr
		for _, s := range []string{"127.0.0.1/8", "10.0.0.5/24", "fe80::1/64", "fd00::5/64"} {
			ip, n, err := net.ParseCIDR(s)
			if err != nil {
				return nil, err
			}
			addrs = append(addrs, &net.IPNet{IP: ip, Mask: n.Mask})
		}
		return addrs, nil
	}
	tests := []struct {
		listen string
		hosts  []string
		want   []string
	}{
		{"10.0.0.5", []string{"a.example", "10.0.0.9"}, []string{"localhost", "a.example", "127.0.0.1", "::1", "10.0.0.9", "10.0.0.5"}},
		{"0.0.0.0", nil, []string{"localhost", "127.0.0.1", "::1", "10.0.0.5", "fd00::5"}},
		{"fe80::1%eth0", nil, []string{"localhost", "127.0.0.1", "::1", "fe80::1"}},
	}
	for _, tt := range tests {
		n, err := serverNames(netip.MustParseAddr(tt.listen), tt.hosts, interfaces)
		if err != nil {
			t.Error(err)
		}
		got := n.dns
		for _, ip := range n.ips {
			got = append(got, ip.String())
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.listen, diff)
		}
	}
	broken := errors.New("broken")
	if _, err := serverNames(netip.IPv6Unspecified(), nil, func() ([]net.Addr, error) { return nil, broken }); !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
}

func TestNewer(t *testing.T) {
	t.Parallel()
	tests := []struct {
		a, b string
		want bool
	}{
		{"3.7.0", "3.7.3", false},
		{"3.7.9", "3.7.3", false},
		{"3.8.0", "3.7.3", true},
		{"4.0.0", "3.7.3", true},
		{"3.6.0", "3.7.3", false},
		{"2.9.0", "3.7.3", false},
		{"", "3.7.3", false},
		{"x.y.z", "3.7.3", false},
		{"3", "3.7.3", false},
		{"10.0", "3.7.3", true},
	}
	for _, tt := range tests {
		if got := newer(tt.a, tt.b); got != tt.want {
			t.Errorf("newer(%q, %q) = %v", tt.a, tt.b, got)
		}
	}
}

// TestSignClient: a certificate for the key of whoever asks, that is for the node and
// nothing else.
func TestSignClient(t *testing.T) {
	t.Parallel()
	p := pki{t.TempDir(), at(today)}
	if err := p.ensure(names{}); err != nil {
		t.Fatal(err)
	}
	request := func(key crypto.Signer) *x509.CertificateRequest {
		t.Helper()
		der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
			Subject: pkix.Name{CommonName: "root"}, DNSNames: []string{"another.example"},
		}, key)
		if err != nil {
			t.Fatal(err)
		}
		csr, err := x509.ParseCertificateRequest(der)
		if err != nil {
			t.Fatal(err)
		}
		return csr
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	text, err := p.signClient(request(key), "host12")
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(text)
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM([]byte(files(t, p.dir)["ca.crt"]))
	client := x509.VerifyOptions{Roots: roots, CurrentTime: today, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}
	if _, err := cert.Verify(client); err != nil {
		t.Error(err)
	}
	server := client
	server.KeyUsages = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	if _, err := cert.Verify(server); err == nil {
		t.Error("a client's certificate serves as a server's")
	}
	if cert.Subject.CommonName != "host12" || len(cert.DNSNames) > 0 || !key.PublicKey.Equal(cert.PublicKey) {
		t.Errorf("certificate is for %s, %v", cert.Subject, cert.DNSNames)
	}

	old, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.signClient(request(old), "host12"); err == nil || !strings.Contains(err.Error(), "want ECDSA or Ed25519") {
		t.Errorf("an RSA key: %v", err)
	}
	forged := request(key)
	other, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	forged.PublicKey = &other.PublicKey
	if _, err := p.signClient(forged, "host12"); err == nil {
		t.Error("a request for a key that its sender does not hold")
	}
}
