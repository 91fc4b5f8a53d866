package renewal

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/store"
)

// Authority signs the certificates of the datastore's clients.
type Authority interface {
	SignClient(request *x509.CertificateRequest, node string) (certPEM []byte, err error)
	CA() (certPEM []byte, err error)
}

// Signer answers requests. Make one with [NewSigner].
type Signer struct {
	records   Records
	authority Authority
	log       *slog.Logger
	now       func() time.Time
	limit     *rate.Limiter
}

// perSecond and burst bound how many requests are looked at.
const perSecond, burst = 10, 20

// NewSigner makes a signer. now is the clock.
func NewSigner(records Records, authority Authority, log *slog.Logger, now func() time.Time) *Signer {
	return &Signer{records, authority, log, now, rate.NewLimiter(perSecond, burst)}
}

// Run answers requests until ctx ends.
func (s *Signer) Run(ctx context.Context) error {
	var (
		mu      sync.Mutex
		there   map[string]int64
		changed = async.NewSignal()
	)
	var following sync.WaitGroup
	defer following.Wait()
	following.Go(func() {
		s.records.Follow(ctx, func(revisions map[string]int64) {
			mu.Lock()
			there = revisions
			mu.Unlock()
			changed.Set()
		})
	})
	seen := map[string]int64{} // by revision, as they were when they needed nothing any more
	pause := async.Backoff{Min: time.Second, Max: time.Minute}
	var again <-chan time.Time
	for {
		select {
		case <-changed:
		case <-again:
		case <-ctx.Done():
			return ctx.Err()
		}
		mu.Lock()
		revisions := there
		mu.Unlock()
		again = nil
		for id := range seen {
			if _, ok := revisions[id]; !ok {
				delete(seen, id)
			}
		}
		for id, rev := range revisions {
			if seen[id] == rev {
				continue
			}
			if err := s.limit.Wait(ctx); err != nil {
				return err
			}
			// Who lost a race gets what is there now.
			if err := s.answer(ctx, id); err != nil && !errors.Is(err, store.ErrConflict) {
				s.log.Warn("a certificate request is not answered; will try again", "request", id, "error", err)
				again = time.After(pause.Next())
				continue
			}
			seen[id] = rev
		}
		if again == nil {
			pause.Reset()
		}
	}
}

// answer answers one request, if it has no answer yet.
func (s *Signer) answer(ctx context.Context, id string) error {
	text, rev, err := s.records.Read(ctx, id)
	if err != nil || text == nil {
		return err
	}
	var r record
	if len(text) > maxRecord || json.Unmarshal(text, &r) != nil {
		s.log.Info("removed what is no certificate request", "request", id, "bytes", len(text))
		return s.records.Change(ctx, id, rev, nil)
	}
	if r.Answer != nil || r.Refused != "" {
		return nil
	}
	name, err := s.sign(&r)
	var no *refusal
	switch {
	case errors.As(err, &no):
		s.log.Warn("a host was refused another certificate", "request", id, "error", no)
		r.Refused = no.Error()
	case err != nil:
		return err
	}
	if text, err = json.Marshal(r); err != nil {
		return err
	}
	if err := s.records.Change(ctx, id, rev, text); err != nil {
		return err
	}
	if no == nil {
		s.log.Info("a host got another certificate", "host", name)
	}
	return nil
}

// refusal is an error of who asks.
type refusal struct{ err error }

func (r *refusal) Error() string { return r.err.Error() }
func (r *refusal) Unwrap() error { return r.err }

func refuse(format string, args ...any) error { return &refusal{fmt.Errorf(format, args...)} }

// sign gives a request its answer, if it is from who has the certificate in it, and
// returns whose that is.
func (s *Signer) sign(r *record) (name string, err error) {
	old, err := x509.ParseCertificate(r.Certificate)
	if err != nil {
		return "", refuse("the certificate that there is: %w", err)
	}
	ca, err := s.authority.CA()
	if err != nil {
		return "", err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(ca) {
		return "", errors.New("the authority's certificate cannot be read")
	}
	now := s.now()
	if _, err := old.Verify(x509.VerifyOptions{Roots: roots, CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err != nil {
		return "", refuse("the certificate that there is, by the clock here, %s: %w", now.UTC().Format(time.RFC3339), err)
	}
	if err := checkProof(old, r.Request, r.Proof); err != nil {
		return "", refuse("the request is not signed by the key of the certificate of %s: %w", old.Subject.CommonName, err)
	}
	request, err := x509.ParseCertificateRequest(r.Request)
	if err != nil {
		return "", refuse("the request: %w", err)
	}
	name = old.Subject.CommonName
	if request.Subject.CommonName != name {
		return "", refuse("the request is for %s, and the certificate that there is for %s", request.Subject.CommonName, name)
	}
	if err := request.CheckSignature(); err != nil {
		return "", refuse("the request is not of who has its key: %w", err)
	}
	r.Answer, err = s.authority.SignClient(request, name)
	return name, err
}
