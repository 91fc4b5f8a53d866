package renewal

import (
	"context"
	"crypto"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/control/join"
)

// Credentials are this host's as a client of the datastore.
type Credentials interface {
	Pair() (*tls.Certificate, error)
	Authorities() (certsPEM []byte, err error)
	// NextKey returns the key of the next certificate, the same until that is in its place.
	NextKey() (crypto.Signer, error)
	// Replace puts the next certificate in its place, and Settle completes that where it
	// was cut short.
	Replace(certPEM []byte) error
	Settle() error
}

// Config says how a [Renewer] works.
type Config struct {
	Records     Records
	Credentials Credentials
	// Ours says whether the authority of a certificate is one that answers here.
	Ours func(*x509.Certificate) bool
	// Replaced is called when another certificate is in its place; nil: nothing is.
	Replaced func()
	Log      *slog.Logger
	Now      func() time.Time // nil: the clock
}

// Renewer asks for another certificate when it is time. Make one with [NewRenewer].
type Renewer struct {
	c Config

	mu  sync.Mutex
	err error
}

// NewRenewer makes a renewer.
func NewRenewer(c Config) *Renewer {
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.Replaced == nil {
		c.Replaced = func() {}
	}
	return &Renewer{c: c}
}

const (
	// early is how long before its end a certificate is renewed at the latest.
	early = 90 * 24 * time.Hour

	// look is how often it is looked whether it is time.
	look = time.Hour
)

// due returns when a certificate is to be renewed: at two thirds of its life, or 90
// days before its end if that is sooner. One that lives for less than twice that is not
// renewed as soon as it is made.
func due(cert *x509.Certificate) time.Time {
	life := cert.NotAfter.Sub(cert.NotBefore)
	at := cert.NotBefore.Add(life / 3 * 2)
	if sooner := cert.NotAfter.Add(-early); life > 2*early && sooner.Before(at) {
		return sooner
	}
	return at
}

// ErrFiles says that the certificate and its key cannot be replaced by new ones.
var ErrFiles = errors.New("the new certificate cannot be stored")

// errWaiting says that there is no answer yet.
var errWaiting = errors.New("the host that runs the datastore has not answered yet")

// Err returns why there is no new certificate although it is time; nil: it is not, or
// there is one.
func (r *Renewer) Err() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.err
}

// Run renews the certificate whenever it is time, until ctx ends.
func (r *Renewer) Run(ctx context.Context) error {
	pause := async.Backoff{Min: time.Second, Max: 5 * time.Minute, Jitter: 0.5}
	said := ""
	for {
		err := r.step(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		r.mu.Lock()
		r.err = err
		r.mu.Unlock()
		wait := look
		if err == nil {
			pause.Reset()
			said = ""
		} else {
			wait = pause.Next()
			if err.Error() != said && !errors.Is(err, errWaiting) {
				r.c.Log.Warn("this host's certificate of the datastore is not renewed; will try again", "error", err)
			}
			said = err.Error()
		}
		if err := async.Sleep(ctx, wait); err != nil {
			return err
		}
	}
}

// step does what can be done now, and reports why that is not all.
func (r *Renewer) step(ctx context.Context) error {
	if err := r.c.Credentials.Settle(); err != nil {
		return fmt.Errorf("%w: %w", ErrFiles, err)
	}
	pair, err := r.c.Credentials.Pair()
	if err != nil {
		return err
	}
	old, now := pair.Leaf, r.c.Now()
	if !r.c.Ours(old) || now.Before(due(old)) {
		return nil
	}
	cas, err := r.c.Credentials.Authorities()
	if err != nil {
		return err
	}
	switch {
	case endsWithAuthority(old, cas):
		return nil // no other one would end later
	case now.After(old.NotAfter):
		return fmt.Errorf("it ended on %s: only before its end can another one be asked for with it", old.NotAfter.Format(time.DateOnly))
	}
	key, err := r.c.Credentials.NextKey()
	if err != nil {
		return fmt.Errorf("%w: %w", ErrFiles, err)
	}
	id, err := idOf(key.Public())
	if err != nil {
		return err
	}
	text, rev, err := r.c.Records.Read(ctx, id)
	if err != nil {
		return err
	}
	if text == nil {
		return r.ask(ctx, id, pair, key)
	}
	var a record
	if len(text) > maxRecord || json.Unmarshal(text, &a) != nil {
		return errors.Join(errors.New("the answer cannot be read"), r.c.Records.Change(ctx, id, rev, nil))
	}
	switch {
	case a.Refused != "":
		err = fmt.Errorf("the host that runs the datastore refuses: %.300q", a.Refused)
	case a.Answer == nil:
		return errWaiting
	default:
		err = r.take(a.Answer, old, key, cas)
	}
	if errors.Is(err, ErrFiles) || errors.Is(err, errWaiting) {
		return err // the answer is good, and is still there at the next try
	}
	// What is left would only be refused again.
	return errors.Join(err, r.c.Records.Change(ctx, id, rev, nil))
}

// ask writes a request.
func (r *Renewer) ask(ctx context.Context, id string, pair *tls.Certificate, key crypto.Signer) error {
	request, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: pair.Leaf.Subject.CommonName}}, key)
	if err != nil {
		return fmt.Errorf("make a certificate request: %w", err)
	}
	oldKey, ok := pair.PrivateKey.(crypto.Signer)
	if !ok {
		return fmt.Errorf("the certificate's key is of type %T, which does not sign", pair.PrivateKey)
	}
	proof, err := prove(oldKey, request)
	if err != nil {
		return fmt.Errorf("sign the certificate request: %w", err)
	}
	text, err := json.Marshal(record{Request: request, Certificate: pair.Leaf.Raw, Proof: proof})
	if err != nil {
		return err
	}
	if err := r.c.Records.Add(ctx, id, text, lives); err != nil {
		return err
	}
	return errWaiting
}

// take checks an answer, which anybody may have written, and puts it in its place.
func (r *Renewer) take(answer []byte, old *x509.Certificate, key crypto.Signer, cas []byte) error {
	cert, err := join.CheckCertificate(cas, answer, old.Subject.CommonName, key.Public())
	if err != nil {
		return fmt.Errorf("the answer is of no use: %w", err)
	}
	if !cert.NotAfter.After(old.NotAfter) {
		return fmt.Errorf("the new certificate ends on %s, no later than the one there is: is the clock right of the host that runs the datastore?", cert.NotAfter.Format(time.DateOnly))
	}
	// Its issuer's clock may be ahead. Until then the old one is the better one.
	if now := r.c.Now(); now.Before(cert.NotBefore) {
		return fmt.Errorf("%w with a certificate that is valid already: it begins at %s, and the clock here says %s", errWaiting, cert.NotBefore.UTC().Format(time.RFC3339), now.UTC().Format(time.RFC3339))
	}
	// Only the certificate that was checked, without what may be behind it.
	if err := r.c.Credentials.Replace(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Raw})); err != nil {
		return fmt.Errorf("%w: %w", ErrFiles, err)
	}
	r.c.Replaced()
	r.c.Log.Info("this host has another certificate of the datastore", "host", cert.Subject.CommonName, "expires", cert.NotAfter)
	return nil
}

// endsWithAuthority reports whether a certificate ends when the last of the authorities does
// that have its issuer's name.
func endsWithAuthority(cert *x509.Certificate, cas []byte) bool {
	var end time.Time
	for block, rest := pem.Decode(cas); block != nil; block, rest = pem.Decode(rest) {
		if ca, err := x509.ParseCertificate(block.Bytes); err == nil && cert.CheckSignatureFrom(ca) == nil && ca.NotAfter.After(end) {
			end = ca.NotAfter
		}
	}
	return !end.IsZero() && !cert.NotAfter.Before(end)
}
