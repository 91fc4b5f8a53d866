package kube

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

// Proxy stands between a client and an API server, whose certificate it shows, and
// makes faults. Make one with [Server.Proxy].
type Proxy struct {
	URL string

	server *http.Server
	served sync.WaitGroup

	mu      sync.Mutex
	down    bool
	expire  map[string]bool // paths of which the next watch from a revision is answered with 410
	writes  int             // how many are let through; negative: all
	fail    func(*http.Request) (status int, body string)
	running map[*http.Request]context.CancelFunc
	seen    []*url.URL // since the last [Proxy.Requests]
	faults  Faults
	made    int // faults, until now
	past    map[string]past
}

// past is the answer that a read had until it was written or asked for again.
type past struct {
	until  time.Time
	status int
	header http.Header
	body   []byte
}

// Faults are what a proxy does to requests at random, each to a share of them between 0 and 1.
type Faults struct {
	Refuse float64       // is answered by 429, 500 or 503, and not passed on
	Cut    float64       // is not passed on, and its connection ends
	Lose   float64       // is passed on, and the connection ends before the answer
	Delay  time.Duration // is passed on so much later at most, of those that are no watches
	Lag    time.Duration // what a watch tells comes so much later, as from a replica that is behind
	Stale  float64       // is a read that is answered as it was up to [staleFor] ago, as by a replica that is behind
}

// staleFor is how old a stale answer is at most.
const staleFor = time.Second

// Proxy starts a proxy in front of the server. [Proxy.Close] ends it.
func (s *Server) Proxy() (*Proxy, error) {
	target, err := url.Parse(s.URL)
	if err != nil {
		return nil, err
	}
	pemText, err := os.ReadFile(s.CAFile)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pemText) {
		return nil, fmt.Errorf("%s holds no certificate", s.CAFile)
	}
	p := &Proxy{writes: -1, running: make(map[*http.Request]context.CancelFunc), past: make(map[string]past)}
	pass := httputil.NewSingleHostReverseProxy(target)
	pass.Transport = &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}, MaxIdleConnsPerHost: 32}
	pass.FlushInterval = -1
	pass.ErrorLog = log.New(io.Discard, "", 0) // cut connections are what it is for
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p.URL = "https://" + l.Addr().String()
	p.server = &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { p.serve(w, r, pass) }), ReadHeaderTimeout: time.Minute, ErrorLog: pass.ErrorLog}
	p.served.Go(func() {
		// Without it, every client is refused, and says so.
		_ = p.server.ServeTLS(l, s.CAFile, filepath.Join(filepath.Dir(s.CAFile), "apiserver.key"))
	})
	return p, nil
}

func (p *Proxy) serve(w http.ResponseWriter, r *http.Request, pass http.Handler) {
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	p.mu.Lock()
	p.seen = append(p.seen, r.URL)
	down := p.down
	if write := r.Method != http.MethodGet; write && !down && p.writes >= 0 {
		if p.writes == 0 {
			down = true
			p.made++
		} else {
			p.writes--
		}
	}
	fail, faults := p.fail, p.faults
	gone := false
	if q := r.URL.Query(); q.Get("watch") != "" && q.Get("sendInitialEvents") == "" && p.expire[r.URL.Path] {
		delete(p.expire, r.URL.Path)
		gone = true
	}
	if !down {
		p.running[r] = cancel
	}
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		delete(p.running, r)
		p.mu.Unlock()
	}()
	if down {
		panic(http.ErrAbortHandler) // the connection is cut
	}
	if gone {
		answer(w, http.StatusGone, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Expired","code":410,"message":"too old resource version"}`)
		return
	}
	if fail != nil {
		if status, body := fail(r); status != 0 {
			answer(w, status, body)
			return
		}
	}
	p.meet(ctx, w, r, faults, pass)
}

// meet passes a request on, or does what it meets with instead.
func (p *Proxy) meet(ctx context.Context, w http.ResponseWriter, r *http.Request, f Faults, pass http.Handler) {
	if r.URL.Query().Get("watch") != "" {
		if f.Lag > 0 {
			late := newLate(w, f.Lag)
			defer late.end()
			w = late
		}
		pass.ServeHTTP(w, r.WithContext(ctx))
		return
	}
	if f.Delay > 0 {
		select {
		case <-time.After(rand.N(f.Delay)):
		case <-ctx.Done():
			panic(http.ErrAbortHandler)
		}
	}
	if f.Stale > 0 && p.stale(ctx, w, r, f.Stale, pass) {
		return
	}
	switch n := rand.Float64(); {
	case n < f.Refuse:
		p.count()
		codes := []int{http.StatusTooManyRequests, http.StatusInternalServerError, http.StatusServiceUnavailable}
		code := codes[rand.N(len(codes))]
		answer(w, code, fmt.Sprintf(`{"kind":"Status","apiVersion":"v1","status":"Failure","code":%d,"message":"a fault of the proxy"}`, code))
	case n < f.Refuse+f.Cut:
		p.count()
		panic(http.ErrAbortHandler)
	case n < f.Refuse+f.Cut+f.Lose:
		p.count()
		pass.ServeHTTP(httptest.NewRecorder(), r.WithContext(context.WithoutCancel(ctx)))
		panic(http.ErrAbortHandler)
	default:
		pass.ServeHTTP(w, r.WithContext(ctx))
	}
}

// stale answers a share of the reads as they were some time ago, and reports whether it did. What an
// object was before a write is asked for then; a list was what it was when it was asked for last.
func (p *Proxy) stale(ctx context.Context, w http.ResponseWriter, r *http.Request, share float64, pass http.Handler) bool {
	target := r.URL.RequestURI()
	if r.Method != http.MethodGet {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		p.keep(ctx, written(r, body), pass)
		return false
	}
	p.mu.Lock()
	was, known := p.past[target]
	p.mu.Unlock()
	if known && time.Since(was.until) < staleFor && rand.Float64() < share {
		p.count()
		maps.Copy(w.Header(), was.header)
		w.WriteHeader(was.status)
		_, _ = w.Write(was.body) // the client may have gone
		return true
	}
	if r.URL.RawQuery != "" {
		p.keep(ctx, r, pass)
	}
	return false
}

// written is the read of what a write changes.
func written(r *http.Request, body []byte) *http.Request {
	get := r.Clone(context.WithoutCancel(r.Context()))
	get.Method, get.Body, get.ContentLength, get.URL.RawQuery = http.MethodGet, http.NoBody, 0, ""
	get.URL.Path = strings.TrimSuffix(get.URL.Path, "/status")
	if r.Method == http.MethodPost {
		var made struct{ Metadata struct{ Name string } }
		if json.Unmarshal(body, &made) == nil {
			get.URL.Path += "/" + made.Metadata.Name
		}
	}
	return get
}

// keep keeps the answer to a read as it is now, unless it has one that is young enough.
func (p *Proxy) keep(ctx context.Context, get *http.Request, pass http.Handler) {
	target := get.URL.RequestURI()
	p.mu.Lock()
	was, known := p.past[target]
	p.mu.Unlock()
	if known && time.Since(was.until) < staleFor {
		return
	}
	rec := httptest.NewRecorder()
	pass.ServeHTTP(rec, get.WithContext(context.WithoutCancel(ctx)))
	if rec.Code != http.StatusOK && rec.Code != http.StatusNotFound {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.past[target] = past{time.Now(), rec.Code, rec.Header().Clone(), rec.Body.Bytes()}
}

func (p *Proxy) count() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.made++
}

// Disturb has requests from now on meet faults. Watches that run keep what they met.
func (p *Proxy) Disturb(f Faults) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.faults = f
}

// Faults is how many requests were refused, cut off or lost until now, and how often all were.
func (p *Proxy) Faults() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.made
}

// late passes an answer on later than it is written.
type late struct {
	http.ResponseWriter
	by    time.Duration
	parts chan part
	done  chan struct{}

	mu sync.Mutex // guards ResponseWriter
}

type part struct {
	due  time.Time
	text []byte
}

func newLate(w http.ResponseWriter, by time.Duration) *late {
	l := &late{ResponseWriter: w, by: by, parts: make(chan part, 1024), done: make(chan struct{})}
	go l.pass()
	return l
}

func (l *late) pass() {
	defer close(l.done)
	for p := range l.parts {
		time.Sleep(time.Until(p.due))
		l.mu.Lock()
		_, _ = l.ResponseWriter.Write(p.text) // the client may have gone
		l.mu.Unlock()
		l.Flush()
	}
}

// Write implements [http.ResponseWriter].
func (l *late) Write(b []byte) (int, error) {
	l.parts <- part{time.Now().Add(l.by), bytes.Clone(b)}
	return len(b), nil
}

// Flush implements [http.Flusher].
func (l *late) Flush() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if f, ok := l.ResponseWriter.(http.Flusher); ok {
		f.Flush()
	}
}

// end passes the rest on. Nothing is written afterwards.
func (l *late) end() {
	close(l.parts)
	<-l.done
}

func answer(w http.ResponseWriter, status int, body string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = io.WriteString(w, body) // the client may have gone
}

// Interrupt cuts every connection and takes no other until heal is called.
func (p *Proxy) Interrupt() (heal func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.down = true
	p.made++
	p.cut()
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.down = false
	}
}

// cut ends what runs. The lock is held.
func (p *Proxy) cut() {
	for _, cancel := range p.running {
		cancel()
	}
}

// Expire ends every watch, and answers the next one from a revision, of each of
// these paths, that its history is gone.
func (p *Proxy) Expire(paths ...string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.made++
	p.expire = make(map[string]bool, len(paths))
	for _, path := range paths {
		p.expire[path] = true
	}
	p.cut()
}

// LetWrites lets n writes through and cuts those after them; negative: all pass.
func (p *Proxy) LetWrites(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.writes = n
}

// Fail answers those requests itself for which fail returns a status; nil: none.
func (p *Proxy) Fail(fail func(*http.Request) (status int, body string)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.fail = fail
}

// Requests returns what was asked for since the last call.
func (p *Proxy) Requests() []*url.URL {
	p.mu.Lock()
	defer p.mu.Unlock()
	seen := p.seen
	p.seen = nil
	return seen
}

// Close ends the proxy and what runs through it.
func (p *Proxy) Close() {
	p.mu.Lock()
	p.down = true
	p.cut()
	p.mu.Unlock()
	p.server.Close()
	p.served.Wait()
}
