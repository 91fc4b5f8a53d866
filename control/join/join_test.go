package join

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/embedded"
	"github.com/routerd/routerd/store/etcd"
)

// site is a host with the datastore and an issuer.
type site struct {
	t      *testing.T
	server *embedded.Server
	store  *etcd.Store
	issuer *Issuer
}

// newSite starts one; change may alter the issuer's configuration.
func newSite(t *testing.T, change func(*Config)) *site {
	t.Helper()
	dir, err := os.MkdirTemp("", "join") //nolint:usetesting // the path of a socket is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	server, err := embedded.Start(await.Context(t), embedded.Config{
		Dir: filepath.Join(dir, "data"), Socket: filepath.Join(dir, "s"), Listen: netip.MustParseAddrPort("127.0.0.1:0"),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Close)
	s, err := etcd.Open(t.Context(), etcd.Config{Endpoints: []string{server.Endpoint()}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	c := Config{
		Tokens: s.Joins(), Names: s, Authority: server, Listen: netip.MustParseAddrPort("127.0.0.1:0"), DatastorePort: server.Listen().Port(),
		ValidName: regexp.MustCompile(`^[a-z0-9]+$`).MatchString, Log: slog.New(slog.DiscardHandler),
	}
	if change != nil {
		change(&c)
	}
	i := NewIssuer(c)
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		if err := i.Run(ctx); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
	t.Cleanup(func() { cancel(); running.Wait() })
	return &site{t, server, s, i}
}

func (s *site) token() Token {
	s.t.Helper()
	t, err := s.issuer.Issue(await.Context(s.t), "127.0.0.1", time.Hour)
	if err != nil {
		s.t.Fatal(err)
	}
	text, err := t.Encode()
	if err != nil {
		s.t.Fatal(err)
	}
	if t, err = ParseToken(text); err != nil {
		s.t.Fatal(err)
	}
	return t
}

// closed waits until nobody can join.
func (s *site) closed(t Token) {
	s.t.Helper()
	await.Until(s.t, "the listener is closed", func() error {
		c, err := net.Dial("tcp", t.Address)
		if err == nil {
			c.Close()
			return fmt.Errorf("%s answers", t.Address)
		}
		return nil
	})
}

func newHost(t testing.TB, node string) Host {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return Host{Node: node, Key: key}
}

// refused checks that a host is refused with words that say why and what to do.
func refused(t *testing.T, tok Token, h Host, words ...string) {
	t.Helper()
	_, err := Ask(await.Context(t), tok, h)
	if err == nil {
		t.Errorf("%s has joined, want %q", h.Node, words)
		return
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("want %q in: %v", w, err)
		}
	}
}

// TestJoin: a host gets a certificate with which the datastore takes it. It may ask
// again, for it may have been killed before it had stored the answer; nobody else may.
// Then nothing listens any more.
func TestJoin(t *testing.T) {
	t.Parallel()
	s := newSite(t, nil)
	tok, h := s.token(), newHost(t, "host12")
	var got Admission
	for range 2 {
		var err error
		if got, err = Ask(await.Context(t), tok, h); err != nil {
			t.Fatal(err)
		}
	}
	refused(t, tok, newHost(t, "host13"), "host12 has joined with it", "make another token")

	dir := t.TempDir()
	key := pemKey(t, h)
	for name, b := range map[string][]byte{"ca": got.CA, "cert": got.Certificate, "key": key} {
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	client, err := etcd.Open(t.Context(), etcd.Config{
		Endpoints: []string{got.Endpoint}, CAFile: filepath.Join(dir, "ca"), CertFile: filepath.Join(dir, "cert"), KeyFile: filepath.Join(dir, "key"),
	})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	if _, err := client.Name(await.Context(t), "host12"); err != nil {
		t.Error(err)
	}

	if err := Done(await.Context(t), tok, h); err != nil {
		t.Error(err)
	}
	s.closed(tok)
	refused(t, tok, h, "no token is outstanding", "routerctl cluster token")
	if another := s.token(); another.ID == tok.ID {
		t.Error("the same token twice")
	}
}

// TestTwoAtOnce: of two hosts that ask with one token at the same moment, one joins.
func TestTwoAtOnce(t *testing.T) {
	t.Parallel()
	s := newSite(t, nil)
	tok := s.token()
	var (
		asked sync.WaitGroup
		mu    sync.Mutex
		in    int
	)
	for i := range 6 {
		h := newHost(t, fmt.Sprint("host", i))
		asked.Go(func() {
			if _, err := Ask(await.Context(t), tok, h); err == nil {
				mu.Lock()
				defer mu.Unlock()
				in++
			}
		})
	}
	asked.Wait()
	if in != 1 {
		t.Errorf("%d hosts have joined with one token", in)
	}
}

// TestRefusals: what is wrong is named with its cure, and the token is not used by it.
func TestRefusals(t *testing.T) {
	t.Parallel()
	s := newSite(t, nil)
	tok := s.token()
	h := newHost(t, "host12")

	wrong := tok
	wrong.Secret = make([]byte, secretSize)
	refused(t, wrong, h, "secret is wrong", "make another token")
	unknown := tok
	unknown.ID = encodeID(make([]byte, idSize))
	refused(t, unknown, h, "there is no such token here", "expired", "make another token")
	other := tok
	other.CA[0]++
	refused(t, other, h, "is not trusted", "another cluster", "Nothing was sent", "Make another token")
	badName := h
	badName.Node = "Host 12"
	refused(t, tok, badName, "cannot be a node's name")

	behind, ahead := h, h
	behind.Now = func() time.Time { return time.Now().Add(-48 * time.Hour) }
	refused(t, tok, behind, "valid from", "this host's clock says", "timedatectl")
	ahead.Now = func() time.Time { return time.Now().AddDate(5, 0, 0) }
	refused(t, tok, ahead, "ended on", "this host's clock says")

	// The datastore's own port is not the issuer's.
	etcdPort := tok
	etcdPort.Address = s.server.Listen().String()
	refused(t, etcdPort, h, "is not trusted")

	// Nobody with that name: another address of the same host.
	byName, err := tok.At("127.0.0.2")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Ask(await.Context(t), byName, h); err == nil {
		t.Error("the issuer was reached at an address where it does not listen")
	}
	byName, err = tok.At("no-such-host.invalid")
	if err != nil {
		t.Fatal(err)
	}
	refused(t, byName, h, "reach no-such-host.invalid:", "name the host by its address")

	if _, err := Ask(await.Context(t), tok, h); err != nil {
		t.Errorf("after all of this the token is not good: %v", err)
	}
}

// TestNameHeld: the name of a host that is there is given to no other, and to itself
// again.
func TestNameHeld(t *testing.T) {
	t.Parallel()
	s := newSite(t, nil)
	st, err := s.store.Name(await.Context(t), "host12")
	if err != nil {
		t.Fatal(err)
	}
	hold, err := s.store.Claim(t.Context(), "host12", st, store.Incarnation{Instance: "mine", Host: "twelve"}, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	defer hold.Forget()
	tok, h := s.token(), newHost(t, "host12")
	refused(t, tok, h, "name host12 is that of another host", "twelve", "nodeName")
	h.Instance = "other"
	refused(t, tok, h, "name host12 is that of another host")
	h.Instance = "mine"
	if _, err := Ask(await.Context(t), tok, h); err != nil {
		t.Error(err)
	}
}

// TestAttempts: who tries secrets ends the token.
func TestAttempts(t *testing.T) {
	t.Parallel()
	s := newSite(t, nil)
	tok := s.token()
	wrong := tok
	wrong.Secret = make([]byte, secretSize)
	for range attempts {
		refused(t, wrong, newHost(t, "host12"), "secret is wrong")
	}
	s.closed(tok)
	refused(t, tok, newHost(t, "host12"), "no token is outstanding")
}

// TestExpired: the record's own time counts, for leases begin anew when the datastore
// restarts; and the client says so too.
func TestExpired(t *testing.T) {
	t.Parallel()
	var late sync.Map
	now := func() time.Time {
		if _, ok := late.Load("late"); ok {
			return time.Now().Add(2 * time.Hour)
		}
		return time.Now()
	}
	s := newSite(t, func(c *Config) { c.Now = now })
	tok := s.token()
	late.Store("late", true)
	refused(t, tok, newHost(t, "host12"), "the token expired at", "make another token")

	h := newHost(t, "host12")
	h.Now = now
	nobody := tok
	nobody.Address = "127.0.0.1:1"
	refused(t, nobody, h, "connection refused", "no token is outstanding", "The token expired at")
}

// TestLeaseEnds: what nobody uses ends by itself, and the listener with it.
func TestLeaseEnds(t *testing.T) {
	t.Parallel()
	s := newSite(t, nil)
	// Below what operators may ask for.
	if err := s.store.Joins().Add(await.Context(t), "short", []byte("{}"), time.Second); err != nil {
		t.Fatal(err)
	}
	if _, err := s.issuer.opened(await.Context(t)); err != nil {
		t.Fatal(err)
	}
	await.Until(t, "the listener is closed", func() error {
		s.issuer.mu.Lock()
		defer s.issuer.mu.Unlock()
		if s.issuer.port != 0 {
			return errors.New("it is open")
		}
		return nil
	})
}

// TestIssueErrors: no token is given out that nobody could join with.
func TestIssueErrors(t *testing.T) {
	t.Parallel()
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	s := newSite(t, func(c *Config) { c.Listen = netip.MustParseAddrPort(taken.Addr().String()) })
	for _, tt := range []struct {
		host string
		ttl  time.Duration
		want string
	}{
		{"127.0.0.1", time.Second, "want 1m0s to 24h0m0s"},
		{"127.0.0.1", 25 * time.Hour, "want 1m0s to 24h0m0s"},
		{"192.0.2.1", time.Hour, "datastore.embedded.hosts"},
		{"127.0.0.1", time.Hour, "datastore.embedded.joinPort"},
	} {
		if _, err := s.issuer.Issue(await.Context(t), tt.host, tt.ttl); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s for %s: %v, want %q", tt.host, tt.ttl, err, tt.want)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var left map[string]int64
	s.store.Joins().Follow(ctx, func(tokens map[string]int64) { left = tokens; cancel() })
	if len(left) > 0 {
		t.Errorf("tokens that nobody can use: %v", left)
	}
}

// TestNoWay: the ways in which a host is not reached.
func TestNoWay(t *testing.T) {
	t.Parallel()
	tok := Token{Address: "192.0.2.1:7748", Expires: time.Now().Add(time.Hour)}
	for _, tt := range []struct {
		err  error
		want string
	}{
		{syscall.ENETUNREACH, "ip route get"},
		{syscall.EHOSTUNREACH, "ip route get"},
		{os.ErrDeadlineExceeded, "packet filter"},
		{syscall.ECONNREFUSED, "no token is outstanding"},
	} {
		err := tok.explain(&net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", tt.err)}, time.Now())
		if !errors.Is(err, tt.err) || !strings.Contains(err.Error(), tt.want) || strings.Contains(err.Error(), "expired at") {
			t.Errorf("%v: want %q", err, tt.want)
		}
	}
}

// TestBusy: who is told to come again does so.
func TestBusy(t *testing.T) {
	t.Parallel()
	s := newSite(t, nil)
	tok := s.token()
	for s.issuer.limit.Allow() { // it is used up
	}
	if _, err := Ask(await.Context(t), tok, newHost(t, "host12")); err != nil {
		t.Error(err)
	}
}

// TestProtocol: whatever comes over the wire is answered, and never used.
func TestProtocol(t *testing.T) {
	t.Parallel()
	s := newSite(t, nil)
	tok := s.token()
	conf := &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS13} //nolint:gosec // the test's own server
	for _, tt := range []struct{ path, body, want string }{
		{joinPath, "", "malformed"},
		{joinPath, "{", "malformed"},
		{joinPath, "[]", "malformed"},
		{joinPath, `{"token":"../incarnations/x"}`, "no such token"},
		{joinPath, `{"token":"` + strings.Repeat("A", 11) + `"}`, "no such token"},
		{joinPath, fmt.Sprintf(`{"token":%q,"secret":%q,"node":"n","csr":"AAAA"}`, tok.ID, base64.StdEncoding.EncodeToString(tok.Secret)), "malformed"},
		{donePath, fmt.Sprintf(`{"token":%q,"secret":%q}`, tok.ID, base64.StdEncoding.EncodeToString(tok.Secret)), "nobody has joined"},
		{joinPath, `{"node":"` + strings.Repeat("n", 2*maxBody) + `"}`, "too large"},
		{"/", "", "404"},
	} {
		c, err := tls.Dial("tcp", tok.Address, conf)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s", tt.path, len(tt.body), tt.body)
		got := readAll(t, c)
		c.Close()
		if !strings.Contains(got, tt.want) || strings.Contains(got, "certificate\":") {
			t.Errorf("%s %.60s: %s\nwant %q", tt.path, tt.body, got, tt.want)
		}
	}
	if _, err := Ask(await.Context(t), tok, newHost(t, "host12")); err != nil {
		t.Error(err)
	}
}

// orders are those to hosts, in a test.
type orders struct{ server Authority }

func (o orders) Follow(ctx context.Context, yield func(map[string]int64)) {
	yield(map[string]int64{"host12": 1})
	<-ctx.Done()
}

func (o orders) Secrets(_ context.Context, node string) (ca, key []byte, err error) {
	if node != "host12" {
		return nil, nil, errors.New("no order says so")
	}
	return o.server.(*embedded.Server).Secrets()
}

// TestSecrets: a host that is to become a member gets the authority's key by its own
// certificate; who shows another one, or none, does not. The listener is open meanwhile.
func TestSecrets(t *testing.T) {
	t.Parallel()
	s := newSite(t, func(c *Config) { c.Members = orders{c.Authority} })
	port, err := s.issuer.opened(await.Context(t))
	if err != nil {
		t.Fatal(err)
	}
	address := fmt.Sprint("127.0.0.1:", port)
	for _, tt := range []struct{ node, want string }{{"host12", ""}, {"host13", "host13 is not to become a member: no order says so"}} {
		dir := filepath.Join(t.TempDir(), "pki")
		if err := embedded.IssueClient(s.server.PKIDir(), dir, tt.node); err != nil {
			t.Fatal(err)
		}
		ca, cert, key := embedded.ClientFiles(dir)
		gotCA, gotKey, err := AskSecrets(await.Context(t), address, ca, cert, key)
		if tt.want != "" {
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%s: %v, want %q", tt.node, err, tt.want)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, err := tls.X509KeyPair(gotCA, gotKey); err != nil {
			t.Errorf("%s got %s, %v", tt.node, gotCA, err)
		}
	}
	// Of a cluster of its own.
	foreign := newSite(t, nil)
	dir := filepath.Join(t.TempDir(), "pki")
	if err := embedded.IssueClient(foreign.server.PKIDir(), dir, "host12"); err != nil {
		t.Fatal(err)
	}
	ca, cert, key := embedded.ClientFiles(dir)
	if _, _, err := AskSecrets(await.Context(t), address, ca, cert, key); err == nil {
		t.Error("a host of another cluster got the key")
	}
	mine, _, _ := embedded.ClientFiles(s.server.PKIDir())
	if _, _, err := AskSecrets(await.Context(t), address, mine, cert, key); err == nil {
		t.Error("a host with another cluster's certificate got the key")
	}
	c, err := tls.Dial("tcp", address, &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS13}) //nolint:gosec // the test's own server
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}", memberPath)
	if got := readAll(t, c); !strings.Contains(got, "no certificate") || strings.Contains(got, "PRIVATE") {
		t.Errorf("without a certificate: %s", got)
	}
}

// TestTokenText: what is encoded is parsed again, and no text with a part lost is.
func TestTokenText(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var ca [sha256.Size]byte
		copy(ca[:], rapid.SliceOfN(rapid.Byte(), len(ca), len(ca)).Draw(t, "ca"))
		want, err := newToken(ca, time.Unix(rapid.Int64Range(0, 1<<40).Draw(t, "expires"), 0))
		if err != nil {
			t.Fatal(err)
		}
		want.Address = rapid.SampledFrom([]string{"10.1.0.11:7748", "[fd00::1]:7748", "host.example:1"}).Draw(t, "address")
		text, err := want.Encode()
		if err != nil {
			t.Fatal(err)
		}
		got, err := ParseToken(" " + text + "\n")
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("-want +got:\n%s", diff)
		}
		cut := rapid.IntRange(0, len(text)-1).Draw(t, "cut")
		if _, err := ParseToken(text[:cut]); err == nil {
			t.Errorf("a token that was cut short is taken: %s", text[:cut])
		}
		b := []byte(text)
		b[rapid.IntRange(0, len(b)-2).Draw(t, "at")] = '-'
		if _, err := ParseToken(string(b)); err == nil && string(b) != text {
			t.Errorf("a mistyped token is taken: %s", b)
		}
		if said := fmt.Sprintf("%v %s %+v %#v", want, want, want, want); strings.Contains(said, text[len(tokenPrefix)+20:len(tokenPrefix)+40]) || strings.Contains(said, string(want.Secret)) {
			t.Errorf("the secret is printed: %s", said)
		}
	})
	for _, tt := range []struct{ text, want string }{
		{"", "routerctl cluster token"},
		{"K10abc::server:xyz", "begins with"},
		{"rjt1.abc", "cut short or mistyped"},
	} {
		if _, err := ParseToken(tt.text); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%q: %v, want %q", tt.text, err, tt.want)
		}
	}
}

// TestAt: another way to the same issuer.
func TestAt(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ host, want string }{
		{"", "10.1.0.11:7748"},
		{"10.2.0.11", "10.2.0.11:7748"},
		{"10.2.0.11:99", "10.2.0.11:99"},
		{"fd00::1", "[fd00::1]:7748"},
		{"[fd00::1]", "[fd00::1]:7748"},
		{"[fd00::1]:99", "[fd00::1]:99"},
		{"host11", "host11:7748"},
		{"https://host11", ""},
		{"user@host11", ""},
		{"host11/x:99", ""},
		{"host\x1b[2J", ""},
	} {
		got, err := Token{Address: "10.1.0.11:7748"}.At(tt.host)
		if (err == nil) != (tt.want != "") || err == nil && got.Address != tt.want {
			t.Errorf("%s: %s, %v, want %s", tt.host, got.Address, err, tt.want)
		}
	}
}

func pemKey(t *testing.T, h Host) []byte {
	t.Helper()
	der, err := x509.MarshalPKCS8PrivateKey(h.Key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
}

func readAll(t *testing.T, c net.Conn) string {
	t.Helper()
	if err := c.SetDeadline(time.Now().Add(await.Patience)); err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(c)
	if err != nil {
		t.Error(err)
	}
	return string(b)
}
