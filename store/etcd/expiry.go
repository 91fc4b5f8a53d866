package etcd

import (
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"time"
)

// errNoCertificate says that a file has none.
var errNoCertificate = errors.New("no certificate in it")

// Expiry returns which of the configuration's certificates ends first, and when: this
// client's own, or the last of the authorities that are trusted. Without any the file
// is empty. It reads the files.
func (c Config) Expiry() (file string, at time.Time, err error) {
	for _, f := range []struct {
		name string
		last bool // the one that ends last counts, else the first one in the file
	}{{c.CertFile, false}, {c.CAFile, true}} {
		if f.name == "" {
			continue
		}
		end, err := endOf(f.name, f.last)
		if err != nil {
			return f.name, time.Time{}, fmt.Errorf("read certificate %s: %w", f.name, err)
		}
		if file == "" || !end.After(at) { // a certificate may end with its authority
			file, at = f.name, end
		}
	}
	return file, at, nil
}

// endOf returns when the certificates in a file end.
func endOf(file string, last bool) (at time.Time, err error) {
	rest, err := os.ReadFile(file)
	if err != nil {
		return at, err
	}
	for {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		if block.Type != "CERTIFICATE" {
			continue
		}
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return at, err
		}
		if cert.NotAfter.After(at) {
			at = cert.NotAfter
		}
		if !last {
			break
		}
	}
	if at.IsZero() {
		return at, errNoCertificate
	}
	return at, nil
}
