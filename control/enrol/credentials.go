package enrol

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/routerd/routerd/control/atomicfile"
	"github.com/routerd/routerd/control/join"
	"github.com/routerd/routerd/store/embedded"
	"github.com/routerd/routerd/store/etcd"
)

// credentials are what this host reaches the datastore by, in files.
type credentials struct {
	dir   string
	node  string
	ca    [sha256.Size]byte // digest of the authority that the token names
	force bool
}

// check reports why the credentials that are there are not those of this host in
// the token's cluster.
func (c credentials) check() error {
	caFile, certFile, keyFile := embedded.ClientFiles(c.dir)
	ca, err := os.ReadFile(caFile)
	if err != nil {
		return err
	}
	if err := join.CheckCA(ca, c.ca); err != nil {
		return fmt.Errorf("%s: %w", caFile, err)
	}
	cert, err := os.ReadFile(certFile)
	if err != nil {
		return err
	}
	key, err := etcd.ReadKey(keyFile)
	if err != nil {
		return err
	}
	have, err := join.CheckCertificate(ca, cert, c.node, key.Public())
	if err != nil {
		return fmt.Errorf("%s: %w", certFile, err)
	}
	if time.Now().After(have.NotAfter) {
		return fmt.Errorf("%s ended on %s", certFile, have.NotAfter.Format(time.DateOnly))
	}
	return nil
}

// key returns the key of this host: the one that is there if it has no certificate
// yet or one of this cluster, else a new one.
func (c credentials) key() (crypto.Signer, error) {
	_, certFile, keyFile := embedded.ClientFiles(c.dir)
	key, err := etcd.ReadKey(keyFile)
	_, certErr := os.Stat(certFile)
	switch {
	case err == nil && errors.Is(certErr, fs.ErrNotExist):
		return key, nil // a run that was ended before it had the answer
	case err == nil:
		if err := c.check(); err == nil {
			return key, nil // one that was ended before it wrote the configuration
		} else if !c.force {
			return nil, fmt.Errorf("this host has credentials already: %w: is it in another cluster? To replace them, say --force", err)
		}
	case !errors.Is(err, fs.ErrNotExist) && !c.force:
		return nil, fmt.Errorf("%w: to replace it, say --force", err)
	case errors.Is(err, fs.ErrNotExist) && certErr == nil && !c.force:
		return nil, fmt.Errorf("%s is there, and its key %s is not: to replace it, say --force", certFile, keyFile)
	}
	if err := os.Remove(certFile); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	fresh, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make a key: %w", err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(fresh)
	if err != nil {
		return nil, fmt.Errorf("make a key: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(keyFile), 0o700); err != nil {
		return nil, err
	}
	// Before it is used: who is ended meanwhile asks again with the same key.
	return fresh, atomicfile.Write(keyFile, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), 0o600)
}
