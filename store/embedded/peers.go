package embedded

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/transport"
	"go.etcd.io/etcd/server/v3/etcdserver/api/etcdhttp"
	"go.etcd.io/etcd/server/v3/etcdserver/api/rafthttp"

	"github.com/routerd/routerd/control/atomicfile"
)

// peerRead bounds how long a member may take to send a request, as etcd has it.
const peerRead = 5 * time.Minute

// peerDoor is where the other members come in. It is not etcd's own, because that can
// be opened only at the start, and takes whoever has a certificate of the authority:
// every client.
type peerDoor struct {
	addr   netip.AddrPort
	server *http.Server
	done   chan struct{}
}

// ServePeers listens for the other members of the cluster, with TLS and certificates of
// members on both sides. Where it does already nothing happens; the address is for good.
func (s *Server) ServePeers(addr netip.AddrPort) error {
	if !s.conf.Listen.IsValid() {
		return errors.New("the embedded datastore serves nobody else, so it can have no other members")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.peer != nil {
		if s.peer.addr != addr {
			return fmt.Errorf("listen on %s for other members: it listens on %s", addr, s.peer.addr)
		}
		return nil
	}
	conf, err := s.peerTLS()
	if err != nil {
		return err
	}
	// The limits of each read and write are etcd's: members speak all the time.
	l, err := transport.NewTimeoutListener(addr.String(), "tcp", nil, rafthttp.ConnReadTimeout, rafthttp.ConnWriteTimeout)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return fmt.Errorf("listen on %s for other members: %w: another program has that port; stop it, or choose another one by datastore.embedded.peerPort", addr, err)
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return fmt.Errorf("listen on %s for other members: %w: no interface of this host has that address", addr, err)
	case err != nil:
		return fmt.Errorf("listen on %s for other members: %w", addr, err)
	}
	p := &peerDoor{
		addr: addr, done: make(chan struct{}),
		server: &http.Server{
			Handler:     etcdhttp.NewPeerHandler(s.etcd.GetLogger(), s.etcd.Server),
			ReadTimeout: peerRead,
			ErrorLog:    log.New(io.Discard, "", 0), // whoever finds the port may have it say things
		},
	}
	go func() {
		defer close(p.done)
		_ = p.server.Serve(tls.NewListener(l, conf)) // it ends when it is closed
	}()
	s.peer = p
	return nil
}

// peerTLS takes members alone.
func (s *Server) peerTLS() (*tls.Config, error) {
	ca, err := s.CA()
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(ca) {
		return nil, fmt.Errorf("%s holds no certificate", filepath.Join(s.conf.PKIDir, "ca.crt"))
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: roots,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			pair, err := tls.LoadX509KeyPair(filepath.Join(s.conf.PKIDir, "peer.crt"), filepath.Join(s.conf.PKIDir, "peer.key"))
			return &pair, err
		},
		VerifyConnection: func(cs tls.ConnectionState) error {
			if len(cs.PeerCertificates) == 0 || !slices.Contains(cs.PeerCertificates[0].ExtKeyUsage, x509.ExtKeyUsageServerAuth) {
				return errors.New("the certificate is not one of a member of the datastore")
			}
			return nil
		},
	}, nil
}

// Peer is where the server listens for other members; invalid: it does not.
func (s *Server) Peer() netip.AddrPort {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.peer == nil {
		return netip.AddrPort{}
	}
	return s.peer.addr
}

func (s *Server) closePeers() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.peer == nil {
		return
	}
	s.peer.server.Close()
	<-s.peer.done
	s.peer = nil
}

// ID is the number of the member in etcd's cluster.
func (s *Server) ID() uint64 { return uint64(s.etcd.Server.MemberID()) }

// HandOver has another member lead, if this one does and there is another.
func (s *Server) HandOver() error { return s.etcd.Server.TryTransferLeadershipOnShutdown() }

// PeerURL is the URL of a member's address for the others.
func PeerURL(addr netip.AddrPort) string { return "https://" + addr.String() }

// Secrets returns the authority of the datastore, certificate and key, as PEM: with
// them a host is a member like this one, and can admit others.
func (s *Server) Secrets() (ca, key []byte, err error) {
	if ca, err = s.CA(); err != nil {
		return nil, nil, err
	}
	key, err = os.ReadFile(filepath.Join(s.conf.PKIDir, "ca.key"))
	return ca, key, err
}

// Sign signs a digest with the authority's key, as members do what all are to believe;
// [Verify] checks it.
func (s *Server) Sign(digest []byte) ([]byte, error) {
	_, key, err := pki{s.conf.PKIDir, time.Now}.authority()
	if err != nil {
		return nil, err
	}
	return key.Sign(nil, digest, crypto.SHA256)
}

// Verify reports whether the authority with a certificate (PEM) has signed a digest.
func Verify(ca, digest, signature []byte) bool {
	block, _ := pem.Decode(ca)
	if block == nil {
		return false
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return false
	}
	public, ok := cert.PublicKey.(*ecdsa.PublicKey)
	return ok && ecdsa.VerifyASN1(public, digest, signature)
}

// InstallSecrets has a directory hold the authority of a cluster that this host becomes
// a member of. What is there of another authority is put away, beside the directory.
func InstallSecrets(dir string, ca, key []byte, now time.Time) error {
	if _, err := tls.X509KeyPair(ca, key); err != nil {
		return fmt.Errorf("the authority of the datastore: %w", err)
	}
	have, err := os.ReadFile(filepath.Join(dir, "ca.crt"))
	if err == nil && string(have) != string(ca) {
		if err := os.Rename(dir, filepath.Clean(dir)+".before-"+now.UTC().Format(stamp)); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	// The key first, as where both are made.
	if err := atomicfile.Write(filepath.Join(dir, "ca.key"), key, 0o600); err != nil {
		return err
	}
	return atomicfile.Write(filepath.Join(dir, "ca.crt"), ca, 0o644)
}

// HasSecrets reports whether a directory holds the authority with a certificate (PEM),
// and its key.
func HasSecrets(dir string, ca []byte) bool {
	have, err := os.ReadFile(filepath.Join(dir, "ca.crt"))
	if err != nil || string(have) != string(ca) {
		return false
	}
	_, err = os.Stat(filepath.Join(dir, "ca.key"))
	return err == nil
}

// ForgetSecrets removes from a directory what members alone have.
func ForgetSecrets(dir string) error {
	var errs []error
	for _, name := range []string{"ca.key", "server.key", "server.crt", "peer.key", "peer.crt"} {
		if err := os.Remove(filepath.Join(dir, name)); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// IssueClient makes a key and a client's certificate for a node in a directory, by the
// authority in another.
func IssueClient(pkiDir, dir, node string) error {
	authority := pki{pkiDir, time.Now}
	ca, caKey, err := authority.authority()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if err := atomicfile.Write(filepath.Join(dir, "ca.crt"), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: ca.Raw}), 0o644); err != nil {
		return err
	}
	return pki{dir, time.Now}.issue("client", clientTemplate(node), ca, caKey, leafLife)
}

// stamp is how names of what is put away tell when.
const stamp = "20060102T150405Z"

// HasData reports whether a directory has the data of a member: its log, which is there
// at once and whole, and without which etcd would begin anew.
func HasData(dir string) bool {
	logs, err := filepath.Glob(filepath.Join(dir, "member", "wal", "*.wal"))
	return err == nil && len(logs) > 0
}

// PutAway gives the data in a directory, which no server uses, another name beside it,
// and returns that; empty: there are none.
func PutAway(dir, why string, now time.Time) (to string, err error) {
	if _, err := os.Stat(filepath.Join(dir, "member")); errors.Is(err, os.ErrNotExist) {
		return "", nil
	}
	lock, err := lockDir(dir)
	if err != nil {
		return "", err
	}
	defer lock.Close()
	to = filepath.Clean(dir) + "." + why + "-" + now.UTC().Format(stamp)
	if err := os.Rename(dir, to); err != nil {
		return "", err
	}
	return to, atomicfile.SyncDir(filepath.Dir(filepath.Clean(dir)))
}
