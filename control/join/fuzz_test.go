package join

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/time/rate"

	"github.com/routerd/routerd/store"
)

// FuzzToken: what is taken as a token is written again as the same, leads to the address
// that it shows, and is not printed. The text is given its checksum, which no fuzzer would
// find.
func FuzzToken(f *testing.F) {
	for _, address := range []string{"10.1.0.11:7748", "[fd00::1]:7748", "[fe80::1%eth0]:1", "host.example:1", "host/../:1", "user@host:1", "a\x1b[2Jb:1", "a b:1", ":1", "host:0", "host:65536", "host:+1", ""} {
		f.Add(append(make([]byte, fixedSize), address...))
	}
	f.Add(bytes.Repeat([]byte{0xff}, fixedSize+1))
	f.Fuzz(func(t *testing.T, b []byte) {
		sum := crc32.ChecksumIEEE(b)
		text := tokenPrefix + base64.RawURLEncoding.EncodeToString(binary.BigEndian.AppendUint32(bytes.Clone(b), sum))
		tok, err := ParseToken(text)
		if err != nil {
			return
		}
		again, err := tok.Encode()
		if err != nil || again != text {
			t.Errorf("%s is written as %s, %v", text, again, err)
		}
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "https://"+tok.Address+joinPath, http.NoBody)
		if err != nil || r.URL.Host != tok.Address || r.URL.Path != joinPath || r.URL.User != nil {
			t.Errorf("%q leads elsewhere: %+v, %v", tok.Address, r, err)
		}
		if said := tok.String(); strings.ContainsFunc(said, func(r rune) bool { return r < ' ' || r == 0x7f }) {
			t.Errorf("a terminal is commanded: %q", said)
		}
	})
}

// shelf is a datastore with one token, in which nobody has a name.
type shelf struct {
	id     string
	record []byte
}

func (s *shelf) Add(context.Context, string, []byte, time.Duration) error { return nil }

func (s *shelf) Read(_ context.Context, id string) ([]byte, int64, error) {
	if id != s.id {
		return nil, 0, nil
	}
	return s.record, 1, nil
}

func (s *shelf) Change(_ context.Context, id string, _ int64, _ []byte) error {
	if id != s.id {
		return fmt.Errorf("a token %q is written", id)
	}
	return nil
}

func (s *shelf) Follow(context.Context, func(map[string]int64)) {}

func (s *shelf) Name(context.Context, string) (store.NameState, error) {
	return store.NameState{}, nil
}

func (s *shelf) SignClient(r *x509.CertificateRequest, _ string) ([]byte, error) {
	return []byte("signed"), r.CheckSignature()
}

func (s *shelf) CA() ([]byte, error)                    { return []byte("authority"), nil }
func (s *shelf) Certificate() (*tls.Certificate, error) { return nil, errors.New("none") }

// FuzzRequest: whatever comes gets an answer with a reason, and no certificate without the
// token and its secret. A request that has them is given them in place of TOKEN and SECRET.
func FuzzRequest(f *testing.F) {
	tok, err := newToken([sha256.Size]byte{1}, time.Now().Add(time.Hour))
	if err != nil {
		f.Fatal(err)
	}
	sum := sha256.Sum256(tok.Secret)
	rec, err := json.Marshal(record{Secret: sum[:], Expires: time.Now().Add(24 * time.Hour)})
	if err != nil {
		f.Fatal(err)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, newHost(f, "n1").Key)
	if err != nil {
		f.Fatal(err)
	}
	csr := base64.StdEncoding.EncodeToString(der)
	const known = `"token":"TOKEN","secret":"SECRET"`
	for _, q := range []string{
		`{` + known + `,"node":"n1","csr":"` + csr + `"}`, `{` + known + `,"node":"../n1","csr":"` + csr + `"}`, `{` + known + `,"node":"n1","csr":"AAAA"}`,
		`{"token":"TOKEN","secret":"AAAA","node":"n1","csr":"` + csr + `"}`, `{"token":"../incarnations/x"}`, `{"secret":[]}`, `null`, `[]`, `{`, ``,
	} {
		for _, done := range []bool{false, true} {
			f.Add([]byte(q), rec, done)
		}
	}
	f.Add([]byte(`{`+known+`}`), []byte(`{"node":"n1"}`), true)
	f.Add([]byte(`{`+known+`}`), []byte(`[`), false)
	f.Fuzz(func(t *testing.T, body, kept []byte, done bool) {
		s := &shelf{id: tok.ID, record: kept}
		i := NewIssuer(Config{
			Tokens: s, Names: s, Authority: s, Log: slog.New(slog.DiscardHandler),
			ValidName: regexp.MustCompile(`^[a-z0-9]+$`).MatchString,
		})
		i.limit.SetLimit(rate.Inf)
		secret := base64.StdEncoding.EncodeToString(tok.Secret)
		body = bytes.ReplaceAll(bytes.ReplaceAll(body, []byte("TOKEN"), []byte(tok.ID)), []byte("SECRET"), []byte(secret))
		handle := i.join
		if done {
			handle = i.done
		}
		w := httptest.NewRecorder()
		i.answer(handle)(w, httptest.NewRequestWithContext(t.Context(), http.MethodPost, joinPath, bytes.NewReader(body)))
		if w.Code == http.StatusOK {
			var a answer
			if err := json.Unmarshal(w.Body.Bytes(), &a); err != nil || !bytes.Contains(body, []byte(tok.ID)) || done == (a.Certificate != nil) {
				t.Errorf("%q is answered with %s, %v", body, w.Body, err)
			}
			return
		}
		var no refusal
		if err := json.Unmarshal(w.Body.Bytes(), &no); err != nil || no.Message == "" || no.status() != w.Code {
			t.Errorf("%q is refused with %d %s, %v", body, w.Code, w.Body, err)
		}
	})
}

// FuzzAnswer: an answer of somebody who does not have the authority is never used.
func FuzzAnswer(f *testing.F) {
	host := newHost(f, "n1")
	ca := []byte("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
	for _, a := range []answer{{}, {CA: ca, Port: 1, Certificate: ca}, {CA: []byte("x"), Key: ca}} {
		b, err := json.Marshal(a)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b, ca)
	}
	f.Fuzz(func(t *testing.T, text, ca []byte) {
		var a answer
		if json.Unmarshal(text, &a) != nil {
			return
		}
		if err := (Token{CA: sha256.Sum256(nil)}).checkAnswer(&a, host); err == nil {
			t.Errorf("%s is used", text)
		}
		// Nor one whose authority is the right one by its hash, and nothing else.
		if err := (Token{CA: sha256.Sum256(ca)}).checkAnswer(&answer{CA: a.CA, Certificate: ca, Port: 1}, host); err == nil {
			t.Errorf("%s is used with certificate %q", text, ca)
		}
	})
}
