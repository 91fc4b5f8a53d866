// Package renewal has a host that holds a certificate of the datastore's authority get
// another one before that ends, over the datastore itself. The host makes a key and
// writes a request; the host that has the authority's key answers. Both ends are here
// (docs/decisions/019-certificate-renewal.md).
//
// Whoever may write the datastore may write requests. So a request proves whose it is: it
// has the certificate that is to be followed, and a signature by its key. The answer is
// for the name in that certificate, whatever the request says.
package renewal

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"fmt"
	"time"
)

// Records is where requests and their answers are: the datastore, which ends each after
// a time.
type Records interface {
	Add(ctx context.Context, id string, record []byte, ttl time.Duration) error
	Read(ctx context.Context, id string) (record []byte, rev int64, err error)
	Change(ctx context.Context, id string, rev int64, record []byte) error
	Follow(ctx context.Context, yield func(revisions map[string]int64))
}

const (
	// lives is how long a request waits for who answers.
	lives = 24 * time.Hour

	// maxRecord bounds what is looked at; a request has about 1 kB, its answer as much.
	maxRecord = 16 << 10
)

// record is a request, and its answer when there is one.
type record struct {
	Request     []byte `json:"request"`     // PKCS #10 (RFC 2986), DER
	Certificate []byte `json:"certificate"` // the one there is, DER
	Proof       []byte `json:"proof"`       // signature of the request by its key

	Answer  []byte `json:"answer,omitempty"`  // PEM
	Refused string `json:"refused,omitempty"` // why there is none
}

// idOf names the request of a key.
func idOf(key crypto.PublicKey) (string, error) {
	der, err := x509.MarshalPKIXPublicKey(key)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(der)
	return hex.EncodeToString(sum[:16]), nil
}

// message is what the old key signs. The words before the request keep a signature that
// was made for something else from being a proof.
func message(request []byte) []byte {
	return append([]byte("routerd certificate renewal v1\x00"), request...)
}

// prove signs a request.
func prove(key crypto.Signer, request []byte) ([]byte, error) {
	m := message(request)
	switch public := key.Public().(type) {
	case ed25519.PublicKey:
		return key.Sign(rand.Reader, m, crypto.Hash(0))
	case *ecdsa.PublicKey, *rsa.PublicKey:
		sum := sha256.Sum256(m)
		return key.Sign(rand.Reader, sum[:], crypto.SHA256)
	default:
		return nil, fmt.Errorf("a key of type %T does not sign", public)
	}
}

// checkProof reports why a request is not signed by a certificate's key.
func checkProof(cert *x509.Certificate, request, proof []byte) error {
	algorithm := map[x509.PublicKeyAlgorithm]x509.SignatureAlgorithm{
		x509.ECDSA: x509.ECDSAWithSHA256, x509.Ed25519: x509.PureEd25519, x509.RSA: x509.SHA256WithRSA,
	}[cert.PublicKeyAlgorithm]
	return cert.CheckSignature(algorithm, message(request), proof)
}
