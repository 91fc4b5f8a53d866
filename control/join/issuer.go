package join

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/net/netutil"
	"golang.org/x/time/rate"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/store"
)

// Tokens is the datastore, as far as it knows tokens.
type Tokens interface {
	Add(ctx context.Context, id string, record []byte, ttl time.Duration) error
	Read(ctx context.Context, id string) (record []byte, rev int64, err error)
	Change(ctx context.Context, id string, rev int64, record []byte) error
	Follow(ctx context.Context, yield func(revisions map[string]int64))
}

// Names is the datastore, as far as it knows who has which name.
type Names interface {
	Name(ctx context.Context, node string) (store.NameState, error)
}

// Members is what the issuer does for hosts of the cluster that become members of the
// datastore.
type Members interface {
	// Follow says which hosts are to become something.
	Follow(ctx context.Context, yield func(revisions map[string]int64))
	// Secrets returns the authority's certificate and key for a node that is to become
	// a member.
	Secrets(ctx context.Context, node string) (ca, key []byte, err error)
}

// Authority signs the certificates of the datastore's clients.
type Authority interface {
	SignClient(request *x509.CertificateRequest, node string) (certPEM []byte, err error)
	CA() (certPEM []byte, err error)
	Certificate() (*tls.Certificate, error)
}

// Config says how an [Issuer] works.
type Config struct {
	Tokens    Tokens
	Names     Names
	Members   Members // nil: no host becomes one
	Authority Authority
	// Listen is where new hosts ask, while a token is outstanding. Port 0 takes a
	// free one.
	Listen netip.AddrPort
	// DatastorePort is that of the datastore, on the address by which the new host
	// reached the issuer.
	DatastorePort uint16
	// ValidName says whether a node may be called so.
	ValidName func(string) bool
	Log       *slog.Logger
	Now       func() time.Time // nil: the clock
}

// The limits of a token's life.
const (
	MinTTL = time.Minute
	MaxTTL = 24 * time.Hour
)

const (
	// attempts is how many wrong secrets end a token. 32 random
	// bytes are not guessed; who tries is noticed.
	attempts = 10

	// perSecond and burst bound how often the datastore is asked for tokens.
	perSecond, burst = 10, 20

	// connections bounds how many speak at once, and patience for how long each may.
	connections = 32
	patience    = 10 * time.Second

	maxBody = 16 << 10

	// farewell is how long the answers under way may take when the last token ends.
	farewell = 2 * time.Second
)

// record is what the datastore has of a token.
type record struct {
	Secret  []byte    `json:"secret"` // its SHA-256 hash
	Expires time.Time `json:"expires"`
	Wrong   int       `json:"wrong,omitempty"` // secrets that were tried
	// Who joined with it. The same key may ask again: its host may have been
	// killed before it had the answer.
	Node string `json:"node,omitempty"`
	Key  []byte `json:"key,omitempty"` // SHA-256 hash of its public key
}

// Issuer gives out tokens and admits hosts that have one, and gives hosts that are to
// become members of the datastore what they need. It listens only while a token or
// such a host is outstanding. Make one with [NewIssuer].
type Issuer struct {
	c     Config
	limit *rate.Limiter

	mu      sync.Mutex
	tokens  int           // outstanding
	members int           // hosts that become members, or clients again
	port    uint16        // on which it listens; 0: it does not
	failure error         // why it cannot
	changed chan struct{} // closed and made anew at each change
}

// NewIssuer makes an issuer.
func NewIssuer(c Config) *Issuer {
	if c.Now == nil {
		c.Now = time.Now
	}
	return &Issuer{c: c, limit: rate.NewLimiter(perSecond, burst), changed: make(chan struct{})}
}

// Issue makes a token that is good for ttl, and returns it once a host can join
// with it. host is the address by which new hosts are to come.
func (i *Issuer) Issue(ctx context.Context, host string, ttl time.Duration) (Token, error) {
	if ttl < MinTTL || ttl > MaxTTL {
		return Token{}, fmt.Errorf("a token's life of %s: want %s to %s", ttl, MinTTL, MaxTTL)
	}
	cert, err := i.c.Authority.Certificate()
	if err != nil {
		return Token{}, err
	}
	if err := cert.Leaf.VerifyHostname(host); err != nil {
		return Token{}, fmt.Errorf("new hosts could not reach the datastore at %s: %w; name one of these, or add it to datastore.embedded.hosts and restart routerd", host, err)
	}
	ca := cert.Certificate[len(cert.Certificate)-1]
	t, err := newToken(sha256.Sum256(ca), i.c.Now().Add(ttl))
	if err != nil {
		return Token{}, err
	}
	sum := sha256.Sum256(t.Secret)
	if err := i.write(t.ID, record{Secret: sum[:], Expires: t.Expires}, func(b []byte) error {
		return i.c.Tokens.Add(ctx, t.ID, b, ttl)
	}); err != nil {
		return Token{}, err
	}
	port, err := i.opened(ctx)
	if err != nil {
		// A token that no host can use is not to stay.
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), farewell)
		defer cancel()
		if _, rev, readErr := i.c.Tokens.Read(undo, t.ID); readErr == nil {
			err = errors.Join(err, i.c.Tokens.Change(undo, t.ID, rev, nil))
		}
		return Token{}, err
	}
	t.Address = net.JoinHostPort(host, strconv.Itoa(int(port)))
	i.c.Log.Info("a join token was made", "token", t.ID, "address", t.Address, "expires", t.Expires)
	return t, nil
}

// write hands on a record as the datastore has it.
func (i *Issuer) write(id string, r record, put func([]byte) error) error {
	b, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("write the join token %s: %w", id, err)
	}
	return put(b)
}

// opened waits until the listener is open, and returns its port, or why it cannot be.
func (i *Issuer) opened(ctx context.Context) (uint16, error) {
	for {
		i.mu.Lock()
		port, failure, changed := i.port, i.failure, i.changed
		i.mu.Unlock()
		if port != 0 || failure != nil {
			return port, failure
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return 0, fmt.Errorf("open %s for new hosts: %w", i.c.Listen, context.Cause(ctx))
		}
	}
}

// set changes the state and wakes who waits for it.
func (i *Issuer) set(change func()) {
	i.mu.Lock()
	defer i.mu.Unlock()
	change()
	close(i.changed)
	i.changed = make(chan struct{})
}

// Run listens while a token is outstanding, until ctx ends.
func (i *Issuer) Run(ctx context.Context) error {
	var following sync.WaitGroup
	defer following.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	following.Go(func() {
		i.c.Tokens.Follow(ctx, func(tokens map[string]int64) { i.set(func() { i.tokens = len(tokens) }) })
	})
	if i.c.Members != nil {
		following.Go(func() {
			i.c.Members.Follow(ctx, func(hosts map[string]int64) { i.set(func() { i.members = len(hosts) }) })
		})
	}
	pause := async.Backoff{Min: 100 * time.Millisecond, Max: 5 * time.Second}
	for {
		if err := i.await(ctx, true); err != nil {
			return err
		}
		if err := i.listen(ctx); err != nil {
			i.set(func() { i.failure = err })
			i.c.Log.Warn("new hosts cannot join; will try again", "error", err)
			if err := pause.Wait(ctx); err != nil {
				return err
			}
			i.set(func() { i.failure = nil })
			continue
		}
		pause.Reset()
	}
}

// await waits until the listener is wanted, or is not any more.
func (i *Issuer) await(ctx context.Context, wanted bool) error {
	for ctx.Err() == nil {
		i.mu.Lock()
		now, changed := i.tokens > 0 || i.members > 0, i.changed
		i.mu.Unlock()
		if now == wanted {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}
	return ctx.Err()
}

// listen serves until no token is outstanding, or ctx ends.
func (i *Issuer) listen(ctx context.Context) error {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", i.c.Listen.String())
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return fmt.Errorf("listen on %s for new hosts: %w: another program has that port; stop it, or choose another one by datastore.embedded.joinPort", i.c.Listen, err)
	case err != nil:
		return fmt.Errorf("listen on %s for new hosts: %w", i.c.Listen, err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+joinPath, i.answer(i.join))
	mux.HandleFunc("POST "+donePath, i.answer(i.done))
	if i.c.Members != nil {
		mux.HandleFunc("POST "+memberPath, i.member)
	}
	srv := &http.Server{
		Handler: mux, ReadTimeout: patience, WriteTimeout: patience, IdleTimeout: patience, MaxHeaderBytes: maxBody,
		// Whoever finds the port may have it say things: not at the level of what matters.
		ErrorLog: slog.NewLogLogger(i.c.Log.Handler(), slog.LevelDebug),
		TLSConfig: &tls.Config{
			MinVersion:         tls.VersionTLS13,
			GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return i.tls() },
		},
	}
	served := make(chan error, 1)
	go func() { served <- srv.ServeTLS(netutil.LimitListener(l, connections), "", "") }()
	if at, ok := l.Addr().(*net.TCPAddr); ok {
		i.set(func() { i.port = at.AddrPort().Port() })
	}
	i.c.Log.Info("new hosts and members may ask", "address", i.c.Listen)
	ended, stop := context.WithCancel(ctx)
	defer stop()
	over := make(chan struct{})
	go func() { defer close(over); _ = i.await(ended, false) }() // either way it is over
	select {
	case err = <-served:
		stop()
	case <-over:
		i.set(func() { i.port = 0 })
		bye, cancel := context.WithTimeout(context.WithoutCancel(ctx), farewell)
		defer cancel()
		if srv.Shutdown(bye) != nil {
			srv.Close()
		}
		err = <-served
	}
	<-over
	i.set(func() { i.port = 0 })
	if errors.Is(err, http.ErrServerClosed) {
		i.c.Log.Info("no new host and no new member is expected any more", "address", i.c.Listen)
		return nil
	}
	return fmt.Errorf("serve new hosts on %s: %w", i.c.Listen, err)
}

// tls is what the next connection is made with. A new host has no certificate; one of
// the cluster shows it.
func (i *Issuer) tls() (*tls.Config, error) {
	cert, err := i.c.Authority.Certificate()
	if err != nil {
		return nil, err
	}
	ca, err := i.c.Authority.CA()
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	return &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{*cert},
		ClientAuth: tls.VerifyClientCertIfGiven, ClientCAs: roots,
	}, nil
}

// member gives a host of the cluster, which its certificate names, what it needs as a
// member of the datastore.
func (i *Issuer) member(w http.ResponseWriter, r *http.Request) {
	i.answer(func(ctx context.Context, _ request) (*answer, error) {
		if r.TLS == nil || len(r.TLS.VerifiedChains) == 0 {
			return nil, &refusal{Code: codeName, Message: "no certificate of a host of this cluster was shown"}
		}
		node := r.TLS.VerifiedChains[0][0].Subject.CommonName
		ca, key, err := i.c.Members.Secrets(ctx, node)
		if err != nil {
			return nil, &refusal{Code: codeName, Message: fmt.Sprintf("%s is not to become a member: %v", node, err)}
		}
		i.c.Log.Warn("a host got the authority's key, to become a member of the datastore", "host", node, "from", r.RemoteAddr)
		return &answer{CA: ca, Key: key}, nil
	})(w, r)
}

// answer makes a handler of a question and its answer.
func (i *Issuer) answer(f func(context.Context, request) (*answer, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		a, err := func() (*answer, error) {
			if !i.limit.Allow() {
				return nil, &refusal{Code: codeBusy, Message: "too many hosts ask at once"}
			}
			var q request
			if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody)).Decode(&q); err != nil {
				return nil, &refusal{Code: codeMalformed, Message: "the request cannot be read: " + err.Error()}
			}
			return f(r.Context(), q)
		}()
		w.Header().Set("Content-Type", "application/json")
		if err != nil {
			var no *refusal
			switch {
			case errors.As(err, &no):
				i.c.Log.Info("a host was refused", "from", r.RemoteAddr, "error", no.Message)
			case errors.Is(err, store.ErrConflict):
				no = &refusal{Code: codeBusy, Message: "another host asks with the same token at this moment"}
			default:
				i.c.Log.Warn("a host could not join", "from", r.RemoteAddr, "error", err)
				no = &refusal{Code: codeFailed, Message: err.Error()}
			}
			w.WriteHeader(no.status())
			_ = json.NewEncoder(w).Encode(no) // whoever asked has gone
			return
		}
		_ = json.NewEncoder(w).Encode(a) // whoever asked has gone
	}
}

// check finds the record of a request's token, whose secret it must know.
func (i *Issuer) check(ctx context.Context, q request) (r record, rev int64, err error) {
	unknown := &refusal{Code: codeToken, Message: "there is no such token here: it has expired, or a host has joined with it, or it is of another cluster"}
	if !validID(q.Token) { // it becomes a part of a key
		return r, 0, unknown
	}
	b, rev, err := i.c.Tokens.Read(ctx, q.Token)
	if err != nil {
		return r, 0, err
	}
	if b == nil {
		return r, 0, unknown
	}
	if err := json.Unmarshal(b, &r); err != nil {
		return r, 0, fmt.Errorf("the record of the join token %s: %w", q.Token, err)
	}
	// After a restart of the datastore its leases begin anew.
	if !i.c.Now().Before(r.Expires) {
		return r, 0, &refusal{Code: codeToken, Message: "the token expired at " + r.Expires.UTC().Format(time.RFC3339)}
	}
	sum := sha256.Sum256(q.Secret)
	if subtle.ConstantTimeCompare(sum[:], r.Secret) == 1 {
		return r, rev, nil
	}
	r.Wrong++
	err = i.write(q.Token, r, func(b []byte) error {
		if r.Wrong >= attempts {
			b = nil
		}
		return i.c.Tokens.Change(ctx, q.Token, rev, b)
	})
	if err != nil {
		return r, 0, err
	}
	if r.Wrong >= attempts {
		i.c.Log.Warn("a join token was ended: too many wrong secrets", "token", q.Token, "attempts", r.Wrong)
	}
	return r, 0, &refusal{Code: codeToken, Message: "the token's secret is wrong"}
}

// join signs a certificate.
func (i *Issuer) join(ctx context.Context, q request) (*answer, error) {
	r, rev, err := i.check(ctx, q)
	if err != nil {
		return nil, err
	}
	if !i.c.ValidName(q.Node) {
		return nil, &refusal{Code: codeMalformed, Message: fmt.Sprintf("%q cannot be a node's name: want lower-case letters, digits, - and .", q.Node)}
	}
	csr, err := x509.ParseCertificateRequest(q.CSR)
	if err != nil {
		return nil, &refusal{Code: codeMalformed, Message: "the certificate request: " + err.Error()}
	}
	key := sha256.Sum256(csr.RawSubjectPublicKeyInfo)
	if r.Node != "" && subtle.ConstantTimeCompare(key[:], r.Key) != 1 {
		return nil, &refusal{Code: codeToken, Message: "the token is used: " + r.Node + " has joined with it"}
	}
	name, err := i.c.Names.Name(ctx, q.Node)
	if err != nil {
		return nil, err
	}
	if h := name.Holder; h != nil && (h.Instance == "" || h.Instance != q.Instance) {
		return nil, &refusal{Code: codeName, Message: fmt.Sprintf("the name %s is that of another host that is there: %s", q.Node, h.Describe())}
	}
	cert, err := i.c.Authority.SignClient(csr, q.Node)
	if err != nil {
		return nil, &refusal{Code: codeMalformed, Message: err.Error()}
	}
	ca, err := i.c.Authority.CA()
	if err != nil {
		return nil, err
	}
	// The token is used before the certificate leaves: of two that ask at once, one
	// gets it.
	r.Node, r.Key = q.Node, key[:]
	err = i.write(q.Token, r, func(b []byte) error { return i.c.Tokens.Change(ctx, q.Token, rev, b) })
	if err != nil {
		return nil, err
	}
	i.c.Log.Info("a host got its certificate", "host", q.Node, "token", q.Token)
	return &answer{CA: ca, Certificate: cert, Port: i.c.DatastorePort, Time: i.c.Now()}, nil
}

// done ends a token with which a host has joined.
func (i *Issuer) done(ctx context.Context, q request) (*answer, error) {
	r, rev, err := i.check(ctx, q)
	if err != nil {
		return nil, err
	}
	if r.Node == "" {
		return nil, &refusal{Code: codeMalformed, Message: "nobody has joined with this token yet"}
	}
	return &answer{}, i.c.Tokens.Change(ctx, q.Token, rev, nil)
}
