package etcd_test

import (
	"crypto"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/embedded"
	"github.com/routerd/routerd/store/etcd"
)

// copyFile copies a file in place of what is there.
func copyFile(t *testing.T, from, to string) {
	t.Helper()
	text, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(to, text, 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestReread: other certificates of the client and of the authorities are used at the
// next connection, without a restart.
func TestReread(t *testing.T) {
	t.Parallel()
	conf := embedded.Config{
		Dir: filepath.Join(t.TempDir(), "data"), Socket: filepath.Join(t.TempDir(), "s.sock"), Listen: netip.MustParseAddrPort("127.0.0.1:0"),
	}
	server, other := start(t, conf), start(t, embedded.Config{
		Dir: filepath.Join(t.TempDir(), "data"), Socket: filepath.Join(t.TempDir(), "s.sock"), Listen: netip.MustParseAddrPort("127.0.0.1:0"),
	})
	dir := t.TempDir()
	ca, cert, key := embedded.ClientFiles(dir)
	use := func(s *embedded.Server) {
		t.Helper()
		fromCA, fromCert, fromKey := embedded.ClientFiles(s.PKIDir())
		copyFile(t, fromCA, ca)
		copyFile(t, fromCert, cert)
		copyFile(t, fromKey, key)
	}
	use(other)
	s := open(t, etcd.Config{Endpoints: []string{"https://" + server.Listen().String()}, CAFile: ca, CertFile: cert, KeyFile: key})
	if _, err := s.Get(await.Context(t), store.IPAMConfigKey()); err == nil || !strings.Contains(err.Error(), "unknown authority") {
		t.Errorf("with another cluster's certificates: %v", err)
	}
	use(server)
	await.Until(t, "the right ones are used", func() error {
		if _, err := s.Get(await.Context(t), store.IPAMConfigKey()); !errors.Is(err, store.ErrNotFound) {
			return err
		}
		return nil
	})
}

// public returns a public key that can be compared.
func public(t *testing.T, key crypto.Signer) interface{ Equal(crypto.PublicKey) bool } {
	t.Helper()
	p, ok := key.Public().(interface{ Equal(crypto.PublicKey) bool })
	if !ok {
		t.Fatalf("a key of type %T", key)
	}
	return p
}

// sign has a server's authority sign a certificate of a key.
func sign(t *testing.T, s *embedded.Server, key crypto.Signer) []byte {
	t.Helper()
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	if err != nil {
		t.Fatal(err)
	}
	request, err := x509.ParseCertificateRequest(der)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := s.SignClient(request, "host12")
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

// TestReplace: at any moment of the replacement there is a pair, and a symbolic link
// stays one.
func TestReplace(t *testing.T) {
	t.Parallel()
	server := start(t, embedded.Config{
		Dir: filepath.Join(t.TempDir(), "data"), Socket: filepath.Join(t.TempDir(), "s.sock"), Listen: netip.MustParseAddrPort("127.0.0.1:0"),
	})
	from, dir := t.TempDir(), t.TempDir()
	_, oldCert, oldKey := embedded.ClientFiles(server.PKIDir())
	ca, cert, key := embedded.ClientFiles(dir)
	copyFile(t, oldCert, filepath.Join(from, "there.crt"))
	copyFile(t, oldKey, filepath.Join(from, "there.key"))
	for to, name := range map[string]string{cert: "there.crt", key: "there.key"} {
		if err := os.Symlink(filepath.Join(from, name), to); err != nil {
			t.Fatal(err)
		}
	}
	c := etcd.Config{CAFile: ca, CertFile: cert, KeyFile: key}
	next, err := c.NextKey()
	if err != nil {
		t.Fatal(err)
	}
	if again, err := c.NextKey(); err != nil || !public(t, again).Equal(next.Public()) {
		t.Errorf("the next key is another one: %v", err)
	}
	if err := c.Replace([]byte("none")); err == nil {
		t.Error("what is no certificate is in the place of one")
	}
	text, err := os.ReadFile(oldCert)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Replace(text); err == nil || !strings.Contains(err.Error(), "of another key") {
		t.Errorf("a certificate of another key: %v", err)
	}
	if err := c.Replace(sign(t, server, next)); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(key + ".next"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the next key's file: %v", err)
	}
	for _, file := range []string{cert, key} {
		if info, err := os.Lstat(file); err != nil || info.Mode()&fs.ModeSymlink == 0 {
			t.Errorf("%s is no link any more: %v, %v", file, info, err)
		}
	}
	if _, err := tls.LoadX509KeyPair(filepath.Join(from, "there.crt"), filepath.Join(from, "there.key")); err != nil {
		t.Error(err)
	}
	if _, err := (etcd.Config{CertFile: cert, KeyFile: cert}).NextKey(); err == nil || !strings.Contains(err.Error(), "two files") {
		t.Errorf("one file for both: %v", err)
	}
}
