package join

import (
	"bytes"
	"context"
	"crypto"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/routerd/routerd/control/async"
)

// The paths of the issuer.
const (
	joinPath = "/v1/join"
	donePath = "/v1/done"
	// memberPath is for hosts of the cluster, by their certificates.
	memberPath = "/v1/member"
)

// request is what a new host asks.
type request struct {
	Token  string `json:"token"`
	Secret []byte `json:"secret"`

	Node     string `json:"node,omitempty"`
	Instance string `json:"instance,omitempty"` // as its incarnation has it, if it has one yet
	CSR      []byte `json:"csr,omitempty"`      // DER
}

// answer is what it gets.
type answer struct {
	CA          []byte    `json:"ca,omitempty"`          // PEM
	Certificate []byte    `json:"certificate,omitempty"` // PEM
	Port        uint16    `json:"port,omitempty"`        // of the datastore
	Key         []byte    `json:"key,omitempty"`         // of the authority, PEM: for members alone
	Time        time.Time `json:"time"`
}

// The reasons of a [refusal].
const (
	codeToken     = "token"     // unknown, used, expired, or its secret is wrong
	codeName      = "name"      // another host has it
	codeMalformed = "malformed" // what was sent
	codeBusy      = "busy"      // ask again
	codeFailed    = "failed"    // the issuer
)

// refusal is what it gets instead.
type refusal struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

func (r *refusal) Error() string { return r.Message }

func (r *refusal) status() int {
	switch r.Code {
	case codeToken:
		return http.StatusForbidden
	case codeName:
		return http.StatusConflict
	case codeBusy:
		return http.StatusTooManyRequests
	case codeFailed:
		return http.StatusInternalServerError
	}
	return http.StatusBadRequest
}

// Host is who joins.
type Host struct {
	Node     string
	Instance string // of its state directory; empty: it has none yet
	Key      crypto.Signer
	Now      func() time.Time // nil: the clock
}

func (h Host) now() time.Time {
	if h.Now == nil {
		return time.Now()
	}
	return h.Now()
}

// Admission is what a host needs to reach the datastore.
type Admission struct {
	CA, Certificate []byte // PEM
	Endpoint        string
}

// Ask sends a token to its issuer, once it has proved to have the authority that the
// token names, and returns what it admits the host with.
func Ask(ctx context.Context, t Token, h Host) (Admission, error) {
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: h.Node}}, h.Key)
	if err != nil {
		return Admission{}, fmt.Errorf("make the certificate request: %w", err)
	}
	a, err := t.post(ctx, h, joinPath, request{Token: t.ID, Secret: t.Secret, Node: h.Node, Instance: h.Instance, CSR: csr})
	if err != nil {
		return Admission{}, err
	}
	if err := t.checkAnswer(a, h); err != nil {
		return Admission{}, fmt.Errorf("the answer of %s: %w", t.Address, err)
	}
	host, _, err := splitAddress(t.Address)
	if err != nil {
		return Admission{}, err
	}
	return Admission{
		CA: a.CA, Certificate: a.Certificate,
		Endpoint: "https://" + net.JoinHostPort(host, strconv.Itoa(int(a.Port))),
	}, nil
}

// Done lets the issuer know that the host has what it needs: the token ends.
func Done(ctx context.Context, t Token, h Host) error {
	_, err := t.post(ctx, h, donePath, request{Token: t.ID, Secret: t.Secret})
	return err
}

// AskSecrets asks a member at an address (HOST:PORT), which listens while this host is to
// become one too, for the authority's certificate and key, PEM. The member and this host
// know each other by certificates of the authority.
func AskSecrets(ctx context.Context, address, caFile, certFile, keyFile string) (ca, key []byte, err error) {
	pair, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		return nil, nil, fmt.Errorf("this host's certificate: %w", err)
	}
	known, err := os.ReadFile(caFile)
	if err != nil {
		return nil, nil, err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(known) {
		return nil, nil, fmt.Errorf("%s holds no certificate", caFile)
	}
	transport := &http.Transport{
		Proxy:           nil,
		DialContext:     (&net.Dialer{Timeout: patience}).DialContext,
		TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: roots, Certificates: []tls.Certificate{pair}},
	}
	defer transport.CloseIdleConnections()
	a, err := postOnce(ctx, &http.Client{Transport: transport, Timeout: 3 * patience}, "https://"+address+memberPath, []byte("{}"))
	if err != nil {
		return nil, nil, fmt.Errorf("ask the member at %s: %w", address, err)
	}
	if !bytes.Equal(a.CA, known) {
		return nil, nil, fmt.Errorf("the member at %s has another authority than this host knows (%s)", address, caFile)
	}
	return a.CA, a.Key, nil
}

// checkAnswer finds what would fail later, where the reason does not show.
func (t Token) checkAnswer(a *answer, h Host) error {
	if err := CheckCA(a.CA, t.CA); err != nil {
		return err
	}
	if a.Port == 0 {
		return errors.New("it names no port of the datastore")
	}
	cert, err := CheckCertificate(a.CA, a.Certificate, h.Node, h.Key.Public())
	if err != nil {
		return err
	}
	if now := h.now(); now.Before(cert.NotBefore) {
		return fmt.Errorf("the certificate is valid from %s, and this host's clock says %s, %s behind the other host's: set it (timedatectl set-ntp true, or date -s) and run the same command again",
			cert.NotBefore.UTC().Format(time.RFC3339), now.UTC().Format(time.RFC3339), a.Time.Sub(now).Round(time.Second))
	}
	return nil
}

// CheckCA reports why a PEM text does not begin with the authority of a hash.
func CheckCA(text []byte, want [sha256.Size]byte) error {
	block, _ := pem.Decode(text)
	if block == nil || block.Type != "CERTIFICATE" {
		return errors.New("the authority's certificate cannot be read")
	}
	if got := sha256.Sum256(block.Bytes); got != want {
		return fmt.Errorf("the authority's certificate has the hash %x, and the token names %x", got[:8], want[:8])
	}
	return nil
}

// CheckCertificate parses a client certificate, and reports why it is not one of a
// node with a key, signed by the authority. Whether it is valid now is another
// matter.
func CheckCertificate(ca, text []byte, node string, key crypto.PublicKey) (*x509.Certificate, error) {
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(ca) {
		return nil, errors.New("the authority's certificate cannot be read")
	}
	block, _ := pem.Decode(text)
	if block == nil || block.Type != "CERTIFICATE" {
		return nil, errors.New("the certificate cannot be read")
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("the certificate cannot be read: %w", err)
	}
	if public, ok := cert.PublicKey.(interface{ Equal(crypto.PublicKey) bool }); !ok || !public.Equal(key) {
		return nil, errors.New("the certificate is of another key")
	}
	if cert.Subject.CommonName != node {
		return nil, fmt.Errorf("the certificate is of node %s, and this host is %s", cert.Subject.CommonName, node)
	}
	_, err = cert.Verify(x509.VerifyOptions{Roots: roots, CurrentTime: cert.NotAfter, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	if err != nil {
		return nil, fmt.Errorf("the certificate: %w", err)
	}
	return cert, nil
}

// tries is how often an issuer is asked that is busy.
const tries = 5

// post asks the issuer.
func (t Token) post(ctx context.Context, h Host, path string, q request) (*answer, error) {
	host, _, err := splitAddress(t.Address)
	if err != nil {
		return nil, err
	}
	transport := &http.Transport{
		Proxy:       nil, // the token is for the issuer alone
		DialContext: (&net.Dialer{Timeout: patience}).DialContext,
		TLSClientConfig: &tls.Config{
			MinVersion: tls.VersionTLS13,
			// The authority is known by its hash: VerifyConnection does what the usual
			// way would do, and more.
			InsecureSkipVerify: true, //nolint:gosec // see above
			VerifyConnection: func(cs tls.ConnectionState) error {
				return t.verify(host, h.now(), cs.PeerCertificates)
			},
		},
	}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport, Timeout: 3 * patience}
	body, err := json.Marshal(q)
	if err != nil {
		return nil, err
	}
	pause := async.Backoff{Min: 200 * time.Millisecond, Max: 2 * time.Second}
	for try := 1; ; try++ {
		a, err := postOnce(ctx, client, "https://"+t.Address+path, body)
		var no *refusal
		busy := errors.As(err, &no) && no.Code == codeBusy
		if err == nil || !busy || try == tries {
			return a, t.explain(err, h.now())
		}
		if err := pause.Wait(ctx); err != nil {
			return nil, err
		}
	}
}

func postOnce(ctx context.Context, client *http.Client, to string, body []byte) (*answer, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, to, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	if err != nil {
		var wrapped *url.Error
		if errors.As(err, &wrapped) {
			err = wrapped.Err
		}
		return nil, err
	}
	defer resp.Body.Close()
	from := json.NewDecoder(io.LimitReader(resp.Body, 4*maxBody))
	if resp.StatusCode != http.StatusOK {
		no := new(refusal)
		if err := from.Decode(no); err != nil || no.Message == "" {
			return nil, fmt.Errorf("it answers with HTTP status %s", resp.Status)
		}
		return nil, no
	}
	a := new(answer)
	if err := from.Decode(a); err != nil {
		return nil, fmt.Errorf("its answer cannot be read: %w", err)
	}
	return a, nil
}

// errPeer says that the server has not proved what it must.
type errPeer struct{ msg string }

func (e *errPeer) Error() string { return e.msg }

// verify authenticates the issuer by the certificates that it shows.
func (t Token) verify(host string, now time.Time, shown []*x509.Certificate) error {
	roots, found := x509.NewCertPool(), false
	for _, c := range shown {
		if sha256.Sum256(c.Raw) == t.CA {
			roots.AddCert(c)
			found = true
		}
	}
	if !found {
		return &errPeer{"it does not have the authority that the token names: the token is of another cluster or older than the authority, something else than routerd answers there, or somebody is in between. Nothing was sent. Make another token with `routerctl cluster token` on the host with the datastore"}
	}
	leaf := shown[0]
	opts := x509.VerifyOptions{Roots: roots, CurrentTime: now, DNSName: strings.SplitN(host, "%", 2)[0]}
	_, err := leaf.Verify(opts)
	var name x509.HostnameError
	switch clock := now.UTC().Format(time.RFC3339); {
	case err == nil:
		return nil
	case errors.As(err, &name):
		return &errPeer{fmt.Sprintf("%v: name one of these in the command, or add %s to datastore.embedded.hosts on that host and restart routerd there", err, host)}
	case now.Before(leaf.NotBefore):
		return &errPeer{fmt.Sprintf("its certificate is valid from %s, and this host's clock says %s: set it (timedatectl set-ntp true, or date -s) and run the same command again", leaf.NotBefore.UTC().Format(time.RFC3339), clock)}
	case now.After(leaf.NotAfter):
		return &errPeer{fmt.Sprintf("its certificate ended on %s, and this host's clock says %s: set the clock of this host if it is ahead; else restart routerd there, which renews its certificate", leaf.NotAfter.UTC().Format(time.RFC3339), clock)}
	}
	return &errPeer{err.Error()}
}

// explain says what an error of asking means, and what to do.
func (t Token) explain(err error, now time.Time) error {
	if err == nil {
		return nil
	}
	var (
		no   *refusal
		peer *errPeer
		dns  *net.DNSError
	)
	old := ""
	if !now.Before(t.Expires) {
		old = fmt.Sprintf(" The token expired at %s by this host's clock.", t.Expires.UTC().Format(time.RFC3339))
	}
	cure := ""
	switch {
	case errors.As(err, &no):
		switch no.Code {
		case codeToken:
			cure = "make another token with `routerctl cluster token` on the host with the datastore"
		case codeName:
			cure = "give this host another name (nodeName in its configuration), or stop routerd on the other one"
		case codeFailed:
			cure = "see routerd's log there"
		case codeBusy:
			cure = "try again"
		}
		if cure == "" {
			return fmt.Errorf("%s refuses: %w", t.Address, err)
		}
		return fmt.Errorf("%s refuses: %w: %s", t.Address, err, cure)
	case errors.As(err, &peer):
		return fmt.Errorf("%s is not trusted: %w", t.Address, err)
	case errors.As(err, &dns):
		return fmt.Errorf("reach %s: %w: name the host by its address", t.Address, err)
	case errors.Is(err, syscall.ECONNREFUSED):
		cure = "nothing listens there, which is so while no token is outstanding: this one has expired or was used, or routerd has stopped on that host. Make another one there with `routerctl cluster token`." + old
	case errors.Is(err, syscall.ENETUNREACH), errors.Is(err, syscall.EHOSTUNREACH):
		cure = "this host has no way there: look at `ip route get` and `ip neigh`, or name another address of that host in the command"
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded):
		cure = "no answer: a packet filter on the way drops it, or the host is down; its TCP port must be open for this host, and the datastore's too"
	default:
		return fmt.Errorf("ask %s: %w", t.Address, err)
	}
	return fmt.Errorf("reach %s: %w: %s", t.Address, err, cure)
}
