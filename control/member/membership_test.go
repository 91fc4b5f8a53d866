package member

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"log/slog"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestSharedCertificate: a host with the certificate that hosts copy from the first one is
// told what it needs, and no member is asked.
func TestSharedCertificate(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	d := Datastore{
		Endpoints: []string{"https://192.0.2.1:2379"},
		CAFile:    filepath.Join(dir, "ca.crt"), CertFile: filepath.Join(dir, "client.crt"), KeyFile: filepath.Join(dir, "client.key"),
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	of := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "routerd client"}}
	cert, err := x509.CreateCertificate(rand.Reader, of, of, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	for file, b := range map[string]*pem.Block{
		d.CAFile: {Type: "CERTIFICATE", Bytes: cert}, d.CertFile: {Type: "CERTIFICATE", Bytes: cert}, d.KeyFile: {Type: "PRIVATE KEY", Bytes: private},
	} {
		if err := os.WriteFile(file, pem.EncodeToMemory(b), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	m, err := NewMembership(MembershipConfig{
		Node: "host12", Datastore: d, StateFile: filepath.Join(dir, "member.json"), MembersFile: filepath.Join(dir, "members.json"), Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	err = m.Do(t.Context(), TakeSecrets, &Order{Issuer: "192.0.2.1:7748"})
	if err == nil || !strings.Contains(err.Error(), `"routerd client"`) || !strings.Contains(err.Error(), "routerd join") {
		t.Errorf("the error is %v", err)
	}
}
