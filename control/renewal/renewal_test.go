package renewal

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"log/slog"
	"maps"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/etcd"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const day = 24 * time.Hour

var today = time.Date(2026, 11, 25, 12, 0, 0, 0, time.UTC)

// records are the datastore's, in memory.
type records struct {
	mu      sync.Mutex
	rev     int64
	text    map[string][]byte
	revs    map[string]int64
	changed chan struct{}
	away    error
	adds    int
}

func newRecords() *records {
	return &records{text: map[string][]byte{}, revs: map[string]int64{}, changed: make(chan struct{})}
}

func (r *records) write(id string, text []byte) {
	r.rev++
	r.text[id], r.revs[id] = text, r.rev
	if text == nil {
		delete(r.text, id)
		delete(r.revs, id)
	}
	close(r.changed)
	r.changed = make(chan struct{})
}

func (r *records) Add(_ context.Context, id string, text []byte, _ time.Duration) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.away == nil {
		r.adds++
		r.write(id, text)
	}
	return r.away
}

func (r *records) Read(_ context.Context, id string) ([]byte, int64, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.text[id], r.revs[id], r.away
}

func (r *records) Change(_ context.Context, id string, rev int64, text []byte) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.away != nil:
		return r.away
	case r.revs[id] != rev:
		return store.ErrConflict
	}
	r.write(id, text)
	return nil
}

func (r *records) Follow(ctx context.Context, yield func(map[string]int64)) {
	for ctx.Err() == nil {
		r.mu.Lock()
		revs, changed := maps.Clone(r.revs), r.changed
		r.mu.Unlock()
		yield(revs)
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}
}

// only returns the one record there is.
func (r *records) only(t *testing.T) (id string, rec record) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.text) != 1 {
		t.Fatalf("there are %d records, want one", len(r.text))
	}
	for i, text := range r.text {
		if err := json.Unmarshal(text, &rec); err != nil {
			t.Fatal(err)
		}
		id = i
	}
	return id, rec
}

// authority signs as the embedded datastore does, by a clock of its own.
type authority struct {
	cert *x509.Certificate
	key  crypto.Signer
	now  time.Time
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{key: newKey(t), now: today}
	a.cert = a.issue(t, "routerd datastore CA", a.key.Public(), today.Add(-10*365*day), today.Add(20*365*day), x509.ExtKeyUsageAny)
	return a
}

func newKey(t *testing.T) crypto.Signer {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func (a *authority) issue(t *testing.T, name string, key crypto.PublicKey, from, to time.Time, usage x509.ExtKeyUsage) *x509.Certificate {
	t.Helper()
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: name}, NotBefore: from, NotAfter: to, ExtKeyUsage: []x509.ExtKeyUsage{usage},
	}
	parent := a.cert
	if parent == nil {
		template.IsCA, template.BasicConstraintsValid, template.ExtKeyUsage = true, true, nil
		template.KeyUsage = x509.KeyUsageCertSign
		parent = template
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key, a.key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

func pemOf(cert *x509.Certificate) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Raw})
}

func (a *authority) CA() ([]byte, error) { return pemOf(a.cert), nil }

func (a *authority) SignClient(r *x509.CertificateRequest, node string) ([]byte, error) {
	to := a.now.Add(2 * 365 * day)
	if to.After(a.cert.NotAfter) {
		to = a.cert.NotAfter
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(a.now.UnixNano()), Subject: pkix.Name{CommonName: node}, NotBefore: a.now.Add(-time.Hour), NotAfter: to,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}, a.cert, r.PublicKey, a.key)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), nil
}

// site is a host with a certificate, and the one with the datastore.
type site struct {
	t         *testing.T
	records   *records
	authority *authority
	files     etcd.Config
	now       time.Time // of the host
	renewer   *Renewer
	signer    *Signer
}

// newSite makes one whose host has a certificate that is to be renewed.
func newSite(t *testing.T) *site {
	t.Helper()
	dir := t.TempDir()
	s := &site{t: t, records: newRecords(), authority: newAuthority(t), now: today}
	s.files = etcd.Config{CAFile: filepath.Join(dir, "ca.crt"), CertFile: filepath.Join(dir, "client.crt"), KeyFile: filepath.Join(dir, "client.key")}
	s.write(s.files.CAFile, pemOf(s.authority.cert))
	s.have("host12", today.Add(-20*30*day), today.Add(130*day))
	s.renewer = NewRenewer(Config{
		Records: s.records, Credentials: s.files, Log: slog.New(slog.DiscardHandler), Now: func() time.Time { return s.now },
		Ours: func(c *x509.Certificate) bool { return c.Issuer.CommonName == "routerd datastore CA" },
	})
	s.signer = NewSigner(s.records, s.authority, slog.New(slog.DiscardHandler), func() time.Time { return s.authority.now })
	return s
}

func (s *site) write(file string, text []byte) {
	s.t.Helper()
	if err := os.WriteFile(file, text, 0o600); err != nil {
		s.t.Fatal(err)
	}
}

// have gives the host a certificate.
func (s *site) have(name string, from, to time.Time) {
	s.t.Helper()
	key := newKey(s.t)
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		s.t.Fatal(err)
	}
	s.write(s.files.CertFile, pemOf(s.authority.issue(s.t, name, key.Public(), from, to, x509.ExtKeyUsageClientAuth)))
	s.write(s.files.KeyFile, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}))
}

func (s *site) pair() *tls.Certificate {
	s.t.Helper()
	p, err := s.files.Pair()
	if err != nil {
		s.t.Fatal(err)
	}
	return p
}

// step has the host do what it can, and checks what it says: nothing, or these words.
func (s *site) step(says string) {
	s.t.Helper()
	err := s.renewer.step(s.t.Context())
	if (err == nil) != (says == "") || err != nil && !strings.Contains(err.Error(), says) {
		s.t.Errorf("the host says %v, want %q", err, says)
	}
}

// answer has the signer answer the one request there is.
func (s *site) answer() record {
	s.t.Helper()
	id, _ := s.records.only(s.t)
	if err := s.signer.answer(s.t.Context(), id); err != nil {
		s.t.Error(err)
	}
	_, rec := s.records.only(s.t)
	return rec
}

// change lets somebody write into the one record there is.
func (s *site) change(f func(*record)) {
	s.t.Helper()
	id, rec := s.records.only(s.t)
	f(&rec)
	text, err := json.Marshal(rec)
	if err != nil {
		s.t.Fatal(err)
	}
	if err := s.records.Add(s.t.Context(), id, text, time.Hour); err != nil {
		s.t.Fatal(err)
	}
}

// renewed checks that the host has another certificate of the same name, with its key,
// and that nothing is left of how it came to it.
func (s *site) renewed(before *x509.Certificate) {
	s.t.Helper()
	p, err := tls.LoadX509KeyPair(s.files.CertFile, s.files.KeyFile)
	if err != nil {
		s.t.Fatal(err)
	}
	if !p.Leaf.NotAfter.After(before.NotAfter) || p.Leaf.Subject.CommonName != before.Subject.CommonName || bytes.Equal(p.Leaf.RawSubjectPublicKeyInfo, before.RawSubjectPublicKeyInfo) {
		s.t.Errorf("it has a certificate of %s until %s, of another key: %v", p.Leaf.Subject.CommonName, p.Leaf.NotAfter, !bytes.Equal(p.Leaf.RawSubjectPublicKeyInfo, before.RawSubjectPublicKeyInfo))
	}
	entries, err := os.ReadDir(filepath.Dir(s.files.CertFile))
	if err != nil || len(entries) != 3 {
		s.t.Errorf("files: %v, %v", entries, err)
	}
	if len(s.records.text) != 0 {
		s.t.Errorf("%d records are left", len(s.records.text))
	}
}

func TestDue(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ life, at time.Duration }{
		{730 * day, 730 * day / 3 * 2},
		{240 * day, 150 * day}, // 90 days before its end
		{90 * day, 60 * day},   // not at once
		{90 * time.Minute, time.Hour},
	} {
		got := due(&x509.Certificate{NotBefore: today, NotAfter: today.Add(tt.life)}).Sub(today)
		if got != tt.at {
			t.Errorf("of a life of %v after %v, want %v", tt.life, got, tt.at)
		}
	}
}

// TestRenewal: the host asks, waits for whoever answers, and has the new pair in its
// place; not before it is time, nor where nobody would answer.
func TestRenewal(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	before := s.pair().Leaf
	s.now = due(before).Add(-time.Second)
	s.step("")
	s.now = due(before)
	s.authority.now = s.now
	s.step("has not answered yet")
	s.step("has not answered yet") // the signer is away
	if s.records.adds != 1 {
		t.Errorf("it asked %d times", s.records.adds)
	}
	if rec := s.answer(); rec.Answer == nil || rec.Refused != "" {
		t.Errorf("answer: %s", rec.Refused)
	}
	s.step("")
	s.renewed(before)
	s.step("")
	if s.records.adds != 1 {
		t.Errorf("it asked again")
	}

	s.renewer.c.Ours = func(*x509.Certificate) bool { return false }
	s.have("host12", today.Add(-700*day), today.Add(30*day))
	s.step("")
	if s.records.adds != 1 {
		t.Error("it asks for a certificate of an authority that nobody here has")
	}
}

// TestShared: who has a copy of the certificate that all copies have gets one of that name.
func TestShared(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.have("routerd client", today.Add(-600*day), today.Add(130*day))
	before := s.pair().Leaf
	s.step("has not answered yet")
	s.answer()
	s.step("")
	s.renewed(before)
}

// TestTwoDaemons: two hosts with copies of one pair each get a pair of their own.
func TestTwoDaemons(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	before := s.pair().Leaf
	other := *s
	dir := t.TempDir()
	other.files = etcd.Config{CAFile: filepath.Join(dir, "ca.crt"), CertFile: filepath.Join(dir, "client.crt"), KeyFile: filepath.Join(dir, "client.key")}
	for from, to := range map[string]string{s.files.CAFile: other.files.CAFile, s.files.CertFile: other.files.CertFile, s.files.KeyFile: other.files.KeyFile} {
		text, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		other.write(to, text)
	}
	c := s.renewer.c
	c.Credentials = other.files
	other.renewer = NewRenewer(c)
	s.step("has not answered yet")
	other.step("has not answered yet")
	for id := range maps.Clone(s.records.text) {
		if err := s.signer.answer(t.Context(), id); err != nil {
			t.Error(err)
		}
	}
	s.step("")
	other.step("")
	s.renewed(before)
	other.renewed(before)
	if bytes.Equal(s.pair().Leaf.Raw, other.pair().Leaf.Raw) {
		t.Error("both have the same certificate")
	}
}

// TestImpostor: whoever may write the datastore gets no certificate of another node, and
// none at all without the key of one that is valid.
func TestImpostor(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	mine := s.pair()
	victimKey := newKey(t)
	victim := s.authority.issue(t, "host13", victimKey.Public(), today.Add(-600*day), today.Add(130*day), x509.ExtKeyUsageClientAuth)
	forger := newAuthority(t)
	other, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	fresh := newKey(t)
	request := func(name string, key crypto.Signer) []byte {
		t.Helper()
		der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: name}}, key)
		if err != nil {
			t.Fatal(err)
		}
		return der
	}
	signed := func(key crypto.PrivateKey, request []byte) []byte {
		t.Helper()
		signer, ok := key.(crypto.Signer)
		if !ok {
			t.Fatalf("a key of type %T", key)
		}
		proof, err := prove(signer, request)
		if err != nil {
			t.Fatal(err)
		}
		return proof
	}
	of13, of12 := request("host13", fresh), request("host12", fresh)
	tampered := bytes.Clone(of12)
	tampered[len(tampered)-1] ^= 1
	issue := func(name string, from, to time.Time, usage x509.ExtKeyUsage) *x509.Certificate {
		return s.authority.issue(t, name, fresh.Public(), from, to, usage)
	}
	expired := issue("host13", today.Add(-800*day), today.Add(-day), x509.ExtKeyUsageClientAuth)
	future := issue("host13", today.Add(day), today.Add(800*day), x509.ExtKeyUsageClientAuth)
	server := issue("routerd datastore", today.Add(-day), today.Add(day), x509.ExtKeyUsageServerAuth)
	for name, tt := range map[string]struct {
		r    record
		says string
	}{
		"another's name with one's own certificate":  {record{Request: of13, Certificate: mine.Leaf.Raw, Proof: signed(mine.PrivateKey, of13)}, "the request is for host13, and the certificate that there is for host12"},
		"another's certificate with one's own key":   {record{Request: of13, Certificate: victim.Raw, Proof: signed(mine.PrivateKey, of13)}, "not signed by the key of the certificate of host13"},
		"another's certificate with the new key":     {record{Request: of13, Certificate: victim.Raw, Proof: signed(fresh, of13)}, "not signed by the key of the certificate of host13"},
		"another's certificate with a key of a kind": {record{Request: of13, Certificate: victim.Raw, Proof: signed(other, of13)}, "not signed by the key"},
		"another's proof with one's own request":     {record{Request: of13, Certificate: victim.Raw, Proof: signed(victimKey, request("host13", newKey(t)))}, "not signed by the key"},
		"no proof":                                   {record{Request: of13, Certificate: victim.Raw}, "not signed by the key"},
		"a signature that was made for something else": {record{Request: of12, Certificate: mine.Leaf.Raw, Proof: func() []byte {
			sum := sha256.Sum256(of12)
			proof, err := ecdsa.SignASN1(rand.Reader, mine.PrivateKey.(*ecdsa.PrivateKey), sum[:])
			if err != nil {
				t.Fatal(err)
			}
			return proof
		}()}, "not signed by the key"},
		"a certificate of another authority": {record{Request: of13, Certificate: forger.issue(t, "host13", fresh.Public(), today.Add(-day), today.Add(day), x509.ExtKeyUsageClientAuth).Raw, Proof: signed(fresh, of13)}, "certificate signed by unknown authority"},
		"a certificate that has ended":       {record{Request: of13, Certificate: expired.Raw, Proof: signed(fresh, of13)}, "certificate has expired"},
		"a certificate that has not begun":   {record{Request: of13, Certificate: future.Raw, Proof: signed(fresh, of13)}, "not yet valid"},
		"a server's certificate":             {record{Request: request("routerd datastore", fresh), Certificate: server.Raw, Proof: signed(fresh, request("routerd datastore", fresh))}, "incompatible key usage"},
		"a request of a key that nobody has": {record{Request: tampered, Certificate: mine.Leaf.Raw, Proof: signed(mine.PrivateKey, tampered)}, "not of who has its key"},
		"no certificate":                     {record{Request: of12, Proof: signed(mine.PrivateKey, of12)}, "the certificate that there is"},
		"no request":                         {record{Certificate: mine.Leaf.Raw, Proof: signed(mine.PrivateKey, nil)}, "the request: "},
	} {
		_, err := s.signer.sign(&tt.r)
		var no *refusal
		if !errors.As(err, &no) || !strings.Contains(err.Error(), tt.says) || tt.r.Answer != nil {
			t.Errorf("%s: %v, want %q", name, err, tt.says)
		}
	}
	_, ed, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	for name, key := range map[string]crypto.Signer{"ECDSA": fresh, "Ed25519": ed, "RSA": other} {
		cert := s.authority.issue(t, "host12", key.Public(), today.Add(-day), today.Add(day), x509.ExtKeyUsageClientAuth)
		r := record{Request: of12, Certificate: cert.Raw, Proof: signed(key, of12)}
		if _, err := s.signer.sign(&r); err != nil || r.Answer == nil {
			t.Errorf("who has the %s key of a valid certificate: %v", name, err)
		}
	}
}

// TestLies: whatever somebody writes in the place of an answer is not put in the place of
// the certificate, and the host goes on.
func TestLies(t *testing.T) {
	t.Parallel()
	forger := newAuthority(t)
	for name, tt := range map[string]struct {
		lie  func(s *site, rec *record)
		says string
	}{
		"garbage": {func(_ *site, rec *record) { rec.Answer = []byte("garbage") }, "cannot be read"},
		"another key's": {func(s *site, rec *record) {
			rec.Answer = pemOf(s.authority.issue(t, "host12", newKey(t).Public(), today, today.Add(700*day), x509.ExtKeyUsageClientAuth))
		}, "of another key"},
		"the old one": {func(s *site, rec *record) { rec.Answer = pemOf(s.pair().Leaf) }, "of another key"},
		"another authority's": {func(s *site, rec *record) {
			request, err := x509.ParseCertificateRequest(rec.Request)
			if err != nil {
				t.Fatal(err)
			}
			rec.Answer = pemOf(forger.issue(t, "host12", request.PublicKey, today, today.Add(700*day), x509.ExtKeyUsageClientAuth))
		}, "unknown authority"},
		"another name's": {func(s *site, rec *record) {
			request, err := x509.ParseCertificateRequest(rec.Request)
			if err != nil {
				t.Fatal(err)
			}
			rec.Answer = pemOf(s.authority.issue(t, "host13", request.PublicKey, today, today.Add(700*day), x509.ExtKeyUsageClientAuth))
		}, "is of node host13"},
		"one that ends before": {func(s *site, rec *record) {
			request, err := x509.ParseCertificateRequest(rec.Request)
			if err != nil {
				t.Fatal(err)
			}
			rec.Answer = pemOf(s.authority.issue(t, "host12", request.PublicKey, today, today.Add(100*day), x509.ExtKeyUsageClientAuth))
		}, "no later than the one there is"},
		"a refusal": {func(_ *site, rec *record) { rec.Refused = "no\x1b[2J" + strings.Repeat("!", 1000) }, `refuses: "no\x1b[2J!!!`},
	} {
		s := newSite(t)
		before := s.pair().Leaf
		s.step("has not answered yet")
		s.change(func(rec *record) { tt.lie(s, rec) })
		s.step(tt.says)
		if !bytes.Equal(s.pair().Leaf.Raw, before.Raw) {
			t.Errorf("%s: the certificate was replaced", name)
		}
		s.step("has not answered yet") // it asks again
		s.answer()
		s.step("")
		s.renewed(before)
	}
	s := newSite(t)
	before := s.pair().Leaf
	s.step("has not answered yet")
	id, _ := s.records.only(t)
	for _, text := range []string{"", "{", "[]", strings.Repeat("x", maxRecord+1), `{"request":5}`} {
		if err := s.records.Add(t.Context(), id, []byte(text), time.Hour); err != nil {
			t.Fatal(err)
		}
		s.step("cannot be read")
		s.step("has not answered yet")
		if err := s.records.Add(t.Context(), id, []byte(text), time.Hour); err != nil {
			t.Fatal(err)
		}
		if err := s.signer.answer(t.Context(), id); err != nil {
			t.Error(err)
		}
		if len(s.records.text) != 0 {
			t.Errorf("%.20q is left", text)
		}
		s.step("has not answered yet")
	}
	s.answer()
	s.step("")
	s.renewed(before)
}

// TestClocks: neither a clock of an hour off on either host nor one that is far off
// leaves the host without a valid certificate.
func TestClocks(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		signer time.Duration
		says   string
		then   time.Duration // how much later the host takes the answer
	}{
		{"an hour behind", -time.Hour, "", 0},
		{"an hour ahead", time.Hour, "", 0},
		{"a day ahead", day, "valid already", day - time.Hour},
	} {
		s := newSite(t)
		before := s.pair().Leaf
		s.authority.now = today.Add(tt.signer)
		s.step("has not answered yet")
		s.answer()
		s.step(tt.says)
		if tt.says != "" {
			if !bytes.Equal(s.pair().Leaf.Raw, before.Raw) {
				t.Errorf("%s: replaced by one that is not valid yet", tt.name)
			}
			s.now = s.now.Add(tt.then)
			s.step("")
		}
		s.renewed(before)
	}
	s := newSite(t)
	s.authority.now = today.Add(-10 * 365 * day)
	s.step("has not answered yet")
	if rec := s.answer(); !strings.Contains(rec.Refused, "by the clock here, 2016") {
		t.Errorf("refused: %q", rec.Refused)
	}
	s.step("by the clock here, 2016")
	s.authority.now = today
	s.step("has not answered yet")
	s.answer()
	s.step("")

	s.have("host12", today.Add(-800*day), today.Add(-day))
	s.step("it ended on 2026-11-24")
	s.have("host12", today.Add(-800*day), s.authority.cert.NotAfter)
	s.now = s.authority.cert.NotAfter.Add(-day)
	s.step("") // its authority ends as well
	if len(s.records.text) != 0 {
		t.Error("it asks for what is of no use")
	}
}

// TestKilled: wherever the daemon is killed, the next run goes on, and at any moment the
// files are a pair.
func TestKilled(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	before := s.pair().Leaf
	s.step("has not answered yet") // the key is on disk, and the request in the datastore
	again := func() {
		s.renewer = NewRenewer(s.renewer.c)
	}
	again()
	s.step("has not answered yet")
	if s.records.adds != 1 {
		t.Errorf("asked %d times with one key", s.records.adds)
	}
	rec := s.answer()
	// Between the certificate and its key.
	s.write(s.files.CertFile, rec.Answer)
	if p := s.pair(); bytes.Equal(p.Leaf.Raw, before.Raw) {
		t.Error("the old certificate is there still")
	}
	again()
	s.step("")
	if _, err := tls.LoadX509KeyPair(s.files.CertFile, s.files.KeyFile); err != nil {
		t.Errorf("the pair is not in its place: %v", err)
	}
	s.records.text = map[string][]byte{} // its lease ends
	s.renewed(before)

	// The answer was lost with the datastore's content: another one is asked for.
	s = newSite(t)
	before = s.pair().Leaf
	s.step("has not answered yet")
	s.answer()
	s.records.text, s.records.revs = map[string][]byte{}, map[string]int64{}
	again()
	s.step("has not answered yet")
	s.answer()
	s.step("")
	s.renewed(before)

	// A key that cannot be read is no obstacle.
	s = newSite(t)
	before = s.pair().Leaf
	s.write(s.files.KeyFile+".next", []byte("torn"))
	s.step("has not answered yet")
	s.answer()
	s.step("")
	s.renewed(before)
}

// TestReadOnly: files that cannot be written are said before anything is asked for, and
// an answer that could not be stored is stored when there is room.
func TestReadOnly(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	dir := filepath.Dir(s.files.CertFile)
	readOnly := func(flags uintptr) {
		t.Helper()
		if err := unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_BIND|flags, ""); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mount(dir, dir, "", unix.MS_BIND, ""); err != nil {
		t.Skipf("bind mounts: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	before := s.pair().Leaf
	readOnly(unix.MS_RDONLY)
	err := s.renewer.step(t.Context())
	if !errors.Is(err, ErrFiles) || !errors.Is(err, syscall.EROFS) || !strings.Contains(err.Error(), dir) || s.records.adds != 0 {
		t.Errorf("%v, asked %d times", err, s.records.adds)
	}
	readOnly(0)
	s.step("has not answered yet")
	s.answer()
	readOnly(unix.MS_RDONLY)
	if err := s.renewer.step(t.Context()); !errors.Is(err, ErrFiles) {
		t.Errorf("the answer on a read-only disk: %v", err)
	}
	readOnly(0)
	s.step("")
	s.renewed(before)
	if s.records.adds != 1 {
		t.Errorf("asked %d times", s.records.adds)
	}
}

// TestRun: both ends at work, and the datastore away in between.
func TestRun(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	before := s.pair().Leaf
	s.records.away = errors.New("away")
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = s.renewer.Run(ctx) })
	running.Go(func() { _ = s.signer.Run(ctx) })
	await.Until(t, "the host says that the datastore is away", func() error {
		if err := s.renewer.Err(); err == nil || err.Error() != "away" {
			return errors.New("it does not")
		}
		return nil
	})
	s.records.mu.Lock()
	s.records.away = nil
	s.records.mu.Unlock()
	await.True(t, "the host is content", func() bool { return s.renewer.Err() == nil })
	cancel()
	running.Wait()
	s.renewed(before)
}
