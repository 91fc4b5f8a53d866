package kubetest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"testing"
	"time"
)

// Authority signs certificates.
type Authority struct {
	PEM   []byte   // its certificate
	Addrs []net.IP // that its certificates serve at, beside 127.0.0.1

	t    testing.TB
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// NewAuthority makes one with a key of its own.
func NewAuthority(t testing.TB, name string) *Authority {
	t.Helper()
	a := &Authority{t: t}
	template := template(name)
	template.IsCA, template.BasicConstraintsValid, template.KeyUsage = true, true, x509.KeyUsageCertSign|x509.KeyUsageDigitalSignature
	var der []byte
	a.key, der = a.sign(template, nil)
	var err error
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	a.PEM = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	return a
}

// Issue signs a certificate that serves at 127.0.0.1 and [Authority.Addrs] and says who asks: the name, and the
// groups of Kubernetes. It is good from an hour ago, or from a time, for an hour.
func (a *Authority) Issue(from time.Time, name string, groups ...string) (cert, key []byte) {
	a.t.Helper()
	c := template(name)
	if c.Subject.Organization = groups; !from.IsZero() {
		c.NotBefore, c.NotAfter = from, from.Add(time.Hour)
	}
	c.IPAddresses = append([]net.IP{net.IPv4(127, 0, 0, 1)}, a.Addrs...)
	c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	private, der := a.sign(c, a.cert)
	raw, err := x509.MarshalECPrivateKey(private)
	if err != nil {
		a.t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: raw})
}

// Server is [Authority.Issue] for a server of Go's.
func (a *Authority) Server(from time.Time) *tls.Certificate {
	a.t.Helper()
	pair, err := tls.X509KeyPair(a.Issue(from, "server"))
	if err != nil {
		a.t.Fatal(err)
	}
	return &pair
}

func template(name string) *x509.Certificate {
	serial, _ := rand.Int(rand.Reader, big.NewInt(1<<62)) // it does not fail: package rand ends the program
	return &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageDigitalSignature,
	}
}

// sign makes a key and signs a certificate for it; by nobody: with that key itself.
func (a *Authority) sign(c, by *x509.Certificate) (*ecdsa.PrivateKey, []byte) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	signer := a.key
	if by == nil {
		by, signer = c, key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, by, key.Public(), signer)
	if err != nil {
		a.t.Fatal(err)
	}
	return key, der
}
