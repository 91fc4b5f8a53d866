package etcd

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"

	"google.golang.org/grpc/credentials"

	"github.com/routerd/routerd/control/atomicfile"
	"github.com/routerd/routerd/store"
)

// nextSuffix is what the file of the key ends in whose certificate is to take the
// place of the one there is.
const nextSuffix = ".next"

// Pair reads the client's certificate with its key.
//
// Two files cannot be replaced in one step. [Config.Replace] puts the certificate in
// its place before its key, and until the key is there too, which a kill may put off,
// it is the next one's file that holds it.
func (c Config) Pair() (*tls.Certificate, error) {
	pair, err := tls.LoadX509KeyPair(c.CertFile, c.KeyFile)
	if err == nil {
		return &pair, nil
	}
	if next, nextErr := tls.LoadX509KeyPair(c.CertFile, c.KeyFile+nextSuffix); nextErr == nil {
		return &next, nil
	}
	// The key may have come to its place between the two.
	if pair, again := tls.LoadX509KeyPair(c.CertFile, c.KeyFile); again == nil {
		return &pair, nil
	}
	return nil, fmt.Errorf("%w: client certificate %s with key %s: %w", store.ErrInvalid, c.CertFile, c.KeyFile, err)
}

// Authorities reads the certificates of the authorities that are trusted, as PEM.
func (c Config) Authorities() ([]byte, error) {
	text, err := os.ReadFile(c.CAFile)
	if err != nil {
		return nil, fmt.Errorf("%w: read the CA file: %w", store.ErrInvalid, err)
	}
	return text, nil
}

// NextKey returns the key for which the next certificate is to be asked: the one that
// an earlier call made, if it is there. It finds what stands in the way of
// [Config.Replace].
func (c Config) NextKey() (crypto.Signer, error) {
	if c.CertFile == c.KeyFile {
		return nil, fmt.Errorf("the certificate and its key are both in %s: have them in two files", c.KeyFile)
	}
	for _, path := range []string{c.CertFile, c.KeyFile} {
		file, err := filepath.EvalSymlinks(path)
		if err != nil {
			return nil, err
		}
		const write = 2 // W_OK of access(2)
		if err := syscall.Access(filepath.Dir(file), write); err != nil {
			return nil, &fs.PathError{Op: "write", Path: filepath.Dir(file), Err: err}
		}
	}
	if key, err := ReadKey(c.KeyFile + nextSuffix); err == nil {
		return key, nil
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make a key: %w", err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("make a key: %w", err)
	}
	text := pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
	return key, atomicfile.Write(c.KeyFile+nextSuffix, text, 0o600)
}

// Replace puts a certificate of the next key in the place of the one there is, and the
// key in the place of its key. At any moment [Config.Pair] finds one of the two pairs.
func (c Config) Replace(certPEM []byte) error {
	next, err := ReadKey(c.KeyFile + nextSuffix)
	if err != nil {
		return err
	}
	if !isOf(certPEM, next) {
		return errors.New("the certificate is of another key than the next one")
	}
	file, err := filepath.EvalSymlinks(c.CertFile)
	if err != nil {
		return err
	}
	mode := fs.FileMode(0o600)
	if info, err := os.Stat(file); err == nil {
		mode = info.Mode().Perm()
	}
	if err := atomicfile.Write(file, certPEM, mode); err != nil {
		return err
	}
	return c.Settle()
}

// Settle completes a [Config.Replace] that a kill cut short: a certificate whose key is
// the next one gets it in its place.
func (c Config) Settle() error {
	next, err := ReadKey(c.KeyFile + nextSuffix)
	if err != nil {
		return nil //nolint:nilerr // there is none, or none of use
	}
	if cert, err := os.ReadFile(c.CertFile); err != nil || !isOf(cert, next) {
		return err
	}
	file, err := filepath.EvalSymlinks(c.KeyFile)
	if err != nil {
		return err
	}
	mode := fs.FileMode(0o600)
	if info, err := os.Stat(file); err == nil {
		mode = info.Mode().Perm()
	}
	text, err := os.ReadFile(c.KeyFile + nextSuffix)
	if err != nil {
		return err
	}
	if err := atomicfile.Write(file, text, mode); err != nil {
		return err
	}
	return os.Remove(c.KeyFile + nextSuffix)
}

// isOf reports whether the first certificate of a PEM text is of a key.
func isOf(certPEM []byte, key crypto.Signer) bool {
	block, _ := pem.Decode(certPEM)
	if block == nil {
		return false
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return false
	}
	public, ok := key.Public().(interface{ Equal(crypto.PublicKey) bool })
	return ok && public.Equal(cert.PublicKey)
}

// ReadKey reads a private key that signs, in PEM form (PKCS #8, RFC 5208), from a file. Of
// a file that is not there the error is an [fs.ErrNotExist].
func ReadKey(file string) (crypto.Signer, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	block, _ := pem.Decode(text)
	if block == nil {
		return nil, fmt.Errorf("%s holds no key in PEM form", file)
	}
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	signer, ok := key.(crypto.Signer)
	if !ok {
		return nil, fmt.Errorf("%s: a key of type %T does not sign", file, key)
	}
	return signer, nil
}

// rereading are credentials that are read from the files for each connection, so that
// new ones are used without a restart.
type rereading struct {
	credentials.TransportCredentials // for what does not depend on them
	conf                             Config
}

func (r rereading) ClientHandshake(ctx context.Context, authority string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	now, err := r.conf.tls()
	if err != nil {
		return nil, nil, err
	}
	return credentials.NewTLS(now).ClientHandshake(ctx, authority, conn)
}

func (r rereading) Clone() credentials.TransportCredentials {
	return rereading{r.TransportCredentials.Clone(), r.conf}
}
