package embedded

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/routerd/routerd/control/atomicfile"
)

const (
	caLife   = 30 * 365 * 24 * time.Hour
	leafLife = 2 * 365 * 24 * time.Hour

	// authorityName is whom a certificate that is made here names as its issuer.
	authorityName = "routerd datastore CA"

	// clockSkew is how far behind another host's clock may be.
	clockSkew = time.Hour
)

// ClientFiles returns the files in a PKI directory with which a client reaches
// a server that listens: the CA's certificate, the client's certificate and
// its key.
func ClientFiles(pkiDir string) (ca, cert, key string) {
	return filepath.Join(pkiDir, "ca.crt"), filepath.Join(pkiDir, "client.crt"), filepath.Join(pkiDir, "client.key")
}

// Issued reports whether a certificate says that an authority of this package made it.
func Issued(cert *x509.Certificate) bool { return cert.Issuer.CommonName == authorityName }

// pki is a small certificate authority in a directory: one for the server,
// one for all clients. Keys are ECDSA P-256.
type pki struct {
	dir string
	now func() time.Time
}

// names are what a server certificate is for.
type names struct {
	dns []string
	ips []netip.Addr
}

// ensure makes what is missing or no longer fits: the authority, the certificates for
// names with which the server meets clients and other members, the clients' certificate. What fits stays, so that
// clients' copies stay valid over restarts.
func (p pki) ensure(n names) error {
	if err := os.MkdirAll(p.dir, 0o700); err != nil {
		return fmt.Errorf("make the certificates' directory: %w", err)
	}
	ca, caKey, err := p.authority()
	if err != nil {
		return err
	}
	now := p.now()
	server := &x509.Certificate{
		Subject:     pkix.Name{CommonName: "routerd datastore"},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames:    n.dns,
	}
	for _, ip := range n.ips {
		server.IPAddresses = append(server.IPAddresses, net.IP(ip.Unmap().AsSlice()))
	}
	client := clientTemplate("routerd client")
	// Members are servers and clients of each other, which other clients are not.
	peer := &x509.Certificate{
		Subject:     pkix.Name{CommonName: "routerd datastore member"},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		DNSNames:    server.DNSNames,
		IPAddresses: server.IPAddresses,
	}
	for name, want := range map[string]*x509.Certificate{"server": server, "client": client, "peer": peer} {
		if p.leafFits(name, want, ca, now) {
			continue
		}
		if err := p.issue(name, want, ca, caKey, leafLife); err != nil {
			return err
		}
	}
	return nil
}

func clientTemplate(name string) *x509.Certificate {
	return &x509.Certificate{Subject: pkix.Name{CommonName: name}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}
}

// authority reads the CA, or makes it when there is none.
func (p pki) authority() (*x509.Certificate, crypto.Signer, error) {
	certFile, keyFile := filepath.Join(p.dir, "ca.crt"), filepath.Join(p.dir, "ca.key")
	if _, err := os.Stat(certFile); errors.Is(err, fs.ErrNotExist) {
		// A key alone is what a kill between the two writes leaves: nothing was
		// ever signed with it.
		template := &x509.Certificate{
			Subject:               pkix.Name{CommonName: authorityName},
			IsCA:                  true,
			BasicConstraintsValid: true,
			MaxPathLenZero:        true,
			KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		}
		if err := p.issue("ca", template, nil, nil, caLife); err != nil {
			return nil, nil, err
		}
	}
	pair, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		return nil, nil, fmt.Errorf("certificate authority %s with %s: %w: restore both, or remove %s to make new certificates (every client then needs the new ones)", certFile, keyFile, err, p.dir)
	}
	key, ok := pair.PrivateKey.(crypto.Signer)
	if !ok || !pair.Leaf.IsCA {
		return nil, nil, fmt.Errorf("%s is no certificate authority: remove %s to make new certificates", certFile, p.dir)
	}
	if p.now().After(pair.Leaf.NotAfter) {
		return nil, nil, fmt.Errorf("certificate authority %s expired on %s: mend this host's clock, or remove %s to make new certificates", certFile, pair.Leaf.NotAfter.Format(time.DateOnly), p.dir)
	}
	return pair.Leaf, key, nil
}

// leafFits reports whether the stored certificate can serve as want.
func (p pki) leafFits(name string, want, ca *x509.Certificate, now time.Time) bool {
	pair, err := tls.LoadX509KeyPair(filepath.Join(p.dir, name+".crt"), filepath.Join(p.dir, name+".key"))
	if err != nil {
		return false // missing, or torn by a kill between two writes
	}
	return fits(pair.Leaf, want, ca, now)
}

// fits reports whether have is signed by ca, is for at least the names of want
// and has more than a third of its life before it.
func fits(have, want, ca *x509.Certificate, now time.Time) bool {
	if have.CheckSignatureFrom(ca) != nil {
		return false
	}
	life := have.NotAfter.Sub(have.NotBefore)
	if now.Before(have.NotBefore) || now.After(have.NotAfter.Add(-life/3)) {
		return false
	}
	for _, n := range want.DNSNames {
		if !slices.Contains(have.DNSNames, n) {
			return false
		}
	}
	for _, ip := range want.IPAddresses {
		if !slices.ContainsFunc(have.IPAddresses, ip.Equal) {
			return false
		}
	}
	return true
}

// issue makes a key and a certificate, signed by ca, or by itself when ca is
// nil, and stores both: the key first, so that a certificate always has one.
func (p pki) issue(name string, template, ca *x509.Certificate, caKey crypto.Signer, life time.Duration) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return fmt.Errorf("make the %s key: %w", name, err)
	}
	if ca == nil {
		caKey = key
	}
	certPEM, err := p.sign(name, template, key.Public(), ca, caKey, life)
	if err != nil {
		return err
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return fmt.Errorf("make the %s key: %w", name, err)
	}
	keyPEM := pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER})
	if err := atomicfile.Write(filepath.Join(p.dir, name+".key"), keyPEM, 0o600); err != nil {
		return err
	}
	return atomicfile.Write(filepath.Join(p.dir, name+".crt"), certPEM, 0o644)
}

// sign makes a certificate of a public key, signed with caKey by ca, or by itself
// when ca is nil.
func (p pki) sign(name string, template *x509.Certificate, public crypto.PublicKey, ca *x509.Certificate, caKey crypto.Signer, life time.Duration) ([]byte, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, fmt.Errorf("make the %s certificate: %w", name, err)
	}
	now := p.now()
	template.SerialNumber = serial
	template.NotBefore, template.NotAfter = now.Add(-clockSkew), now.Add(life)
	if ca == nil {
		ca = template
	} else {
		template.KeyUsage = x509.KeyUsageDigitalSignature
		// A certificate that outlives its authority would be refused at a time
		// when nothing renews it.
		if template.NotAfter.After(ca.NotAfter) {
			template.NotAfter = ca.NotAfter
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, ca, public, caKey)
	if err != nil {
		return nil, fmt.Errorf("make the %s certificate: %w", name, err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), nil
}

// signClient makes a client's certificate for a node, of the key whose holder has
// signed the request. Nothing else of the request counts.
func (p pki) signClient(request *x509.CertificateRequest, node string) ([]byte, error) {
	if err := request.CheckSignature(); err != nil {
		return nil, fmt.Errorf("certificate request of %s: %w", node, err)
	}
	switch key := request.PublicKey.(type) {
	case *ecdsa.PublicKey, ed25519.PublicKey:
	default:
		return nil, fmt.Errorf("certificate request of %s: a key of type %T: want ECDSA or Ed25519", node, key)
	}
	ca, caKey, err := p.authority()
	if err != nil {
		return nil, err
	}
	return p.sign(node, clientTemplate(node), request.PublicKey, ca, caKey, leafLife)
}

// SignClient makes a certificate with which a node is a client of this server, of
// the key whose holder has signed the request. It returns it as PEM. Of the
// request nothing but the key counts.
func (s *Server) SignClient(request *x509.CertificateRequest, node string) ([]byte, error) {
	return pki{s.conf.PKIDir, time.Now}.signClient(request, node)
}

// CA returns the certificate of the authority, as PEM.
func (s *Server) CA() ([]byte, error) {
	return os.ReadFile(filepath.Join(s.conf.PKIDir, "ca.crt"))
}

// ServerFiles returns the files of the authority's certificate and of the server's.
func (s *Server) ServerFiles() (ca, cert string) {
	return filepath.Join(s.conf.PKIDir, "ca.crt"), filepath.Join(s.conf.PKIDir, "server.crt")
}

// Certificate returns what the server shows to clients, with its authority's
// certificate behind it, for those who know that one by its hash alone.
func (s *Server) Certificate() (*tls.Certificate, error) {
	pair, err := tls.LoadX509KeyPair(filepath.Join(s.conf.PKIDir, "server.crt"), filepath.Join(s.conf.PKIDir, "server.key"))
	if err != nil {
		return nil, fmt.Errorf("the datastore's certificate: %w", err)
	}
	ca, _, err := pki{s.conf.PKIDir, time.Now}.authority()
	if err != nil {
		return nil, err
	}
	pair.Certificate = append(pair.Certificate, ca.Raw)
	return &pair, nil
}
