package etcd

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"io/fs"
	"math/big"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// certificates writes a file of certificates that end at given times.
func certificates(t *testing.T, name string, ends ...time.Time) string {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	var b []byte
	for _, end := range ends {
		template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: end.Add(-time.Hour), NotAfter: end}
		der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
		if err != nil {
			t.Fatal(err)
		}
		b = append(b, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})...)
	}
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestExpiry(t *testing.T) {
	t.Parallel()
	day := func(n int) time.Time { return time.Date(2030, 1, n, 0, 0, 0, 0, time.UTC) }
	leaf, chain := certificates(t, "leaf", day(5)), certificates(t, "chain", day(9), day(2))
	bundle, empty := certificates(t, "bundle", day(1), day(7), day(3)), certificates(t, "empty")
	for _, tt := range []struct {
		name     string
		cert, ca string
		file     string
		at       time.Time
		err      error
	}{
		{"none", "", "", "", time.Time{}, nil},
		{"the client's", leaf, bundle, leaf, day(5), nil},
		{"the last authority's", chain, bundle, bundle, day(7), nil},
		{"of a chain its own", chain, "", chain, day(9), nil},
		{"an authority alone", "", bundle, bundle, day(7), nil},
		{"an empty file", empty, bundle, empty, time.Time{}, errNoCertificate},
		{"no file", leaf, "/nowhere/ca.crt", "/nowhere/ca.crt", time.Time{}, fs.ErrNotExist},
	} {
		file, at, err := Config{CertFile: tt.cert, CAFile: tt.ca}.Expiry()
		if file != tt.file || !at.Equal(tt.at) || !errors.Is(err, tt.err) {
			t.Errorf("%s: %s, %v, %v; want %s, %v, %v", tt.name, file, at, err, tt.file, tt.at, tt.err)
		}
	}
}
