package ui

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/events"
	"github.com/routerd/routerd/control/rpc"
	"github.com/routerd/routerd/dataplane/netdev"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

// clock is a time that tests move.
type clock struct {
	mu sync.Mutex
	t  time.Time
}

func (c *clock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.t
}

func (c *clock) add(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.t = c.t.Add(d)
}

// fakeOperator answers for a host.
type fakeOperator struct {
	apiv1.UnimplementedOperatorServer
}

func (fakeOperator) Node(context.Context, *apiv1.NodeRequest) (*apiv1.NodeResponse, error) {
	ok := &apiv1.Check{Name: "ready", Ok: true}
	return &apiv1.NodeResponse{
		Name: "node1", Health: &apiv1.Health{Live: ok, Ready: ok},
		Peers: []*apiv1.BGPPeer{{Name: "node2", Address: "10.0.0.2", Type: "node-to-node mesh", State: "up", Info: "Established"}},
	}, nil
}

func (fakeOperator) Paths(context.Context, *apiv1.PathsRequest) (*apiv1.PathsResponse, error) {
	return &apiv1.PathsResponse{Paths: []*apiv1.Path{{Node: "node2", Address: "10.0.0.2", Answers: true, Rtt: durationpb.New(time.Millisecond)}}}, nil
}

func (fakeOperator) Tunnels(context.Context, *apiv1.TunnelsRequest) (*apiv1.TunnelsResponse, error) {
	return &apiv1.TunnelsResponse{}, nil
}

func (fakeOperator) Routes(_ context.Context, r *apiv1.RoutesRequest) (*apiv1.RoutesResponse, error) {
	return &apiv1.RoutesResponse{Routes: []*apiv1.Route{{Prefix: r.GetPrefix(), Best: true, Reason: "told so"}}}, nil
}

// host is a server of the page, as tests see it.
type host struct {
	*Server
	clock *clock
	watch *Watch
	log   *slog.Logger
}

func newHost(t *testing.T) host {
	t.Helper()
	h := host{clock: &clock{t: time.Unix(1_700_000_000, 0)}, watch: NewWatch()}
	said := events.New(slog.DiscardHandler, slog.LevelInfo)
	h.log = said.Logger()
	var err error
	h.Server, err = New(Config{
		Node: "node1", Operator: fakeOperator{}, Events: rpc.NewEventsServer(said), Watch: h.watch,
		Examine: func(context.Context) (*apiv1.ExamineResponse, error) {
			return &apiv1.ExamineResponse{Node: "node1", Findings: []*apiv1.Finding{{Check: "a-check"}}}, nil
		},
		Trace: func(_ context.Context, r *apiv1.TraceRequest) (*apiv1.TraceResponse, error) {
			return &apiv1.TraceResponse{Verdict: "whole", Packet: r.String()}, nil
		},
		Pods: func(context.Context) (Pods, error) {
			return Pods{Pods: []Pod{{Name: "shop/web", Node: "node1", Addrs: []string{"192.168.1.5"}}}, All: 7}, nil
		},
		Hosts: func(context.Context) (*apiv1.HostsResponse, error) {
			return &apiv1.HostsResponse{Hosts: []*apiv1.HostLoad{{Node: "node2", Sessions: 1, SessionsUp: 1}}}, nil
		},
		Wanted: func(context.Context) []Session { return nil }, Sessions: func() string { return "" },
		Counters: netdev.Read, Now: h.clock.now, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// ask makes a request as a browser at localhost does, with what change makes of it.
func (h host) ask(path string, change ...func(*http.Request)) *http.Response {
	r := httptest.NewRequest(http.MethodGet, "http://localhost:7749"+path, nil)
	for _, c := range change {
		c(r)
	}
	w := httptest.NewRecorder()
	h.handler.ServeHTTP(w, r)
	return w.Result()
}

// enter opens the page with a token, and returns what makes a later request one of that browser.
func (h host) enter(t *testing.T) func(*http.Request) {
	t.Helper()
	token, _ := h.Token()
	resp := h.ask("/?token=" + token)
	if resp.StatusCode != http.StatusSeeOther || resp.Header.Get("Location") != "/" || len(resp.Cookies()) != 1 {
		t.Fatalf("a token leads to %s, %q, %d cookies", resp.Status, resp.Header.Get("Location"), len(resp.Cookies()))
	}
	return func(r *http.Request) { r.AddCookie(resp.Cookies()[0]) }
}

func body(t *testing.T, r *http.Response) string {
	t.Helper()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func header(name, value string) func(*http.Request) {
	return func(r *http.Request) { r.Header.Set(name, value) }
}

// TestLetIn: nobody is let in but who shows a token first, and then the cookie.
func TestLetIn(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	for _, path := range []string{"/", "/app.js", "/style.css", "/api/v1/topology", "/api/v1/node", "/api/v1/routes?prefix=10.0.0.0/8", "/api/v1/changes", "/nothing"} {
		if got := h.ask(path).StatusCode; got != http.StatusUnauthorized {
			t.Errorf("GET %s without a cookie: %d, want 401", path, got)
		}
	}
	token, _ := h.Token()
	for _, wrong := range []string{"", "x", token[1:], token + "A", token + "&token=" + token} {
		if got := h.ask("/?token=" + wrong).StatusCode; got != http.StatusUnauthorized {
			t.Errorf("token %q: %d, want 401", wrong, got)
		}
	}
	if got := h.ask("/?token="+token, func(r *http.Request) { r.Method = http.MethodHead }).StatusCode; got != http.StatusMethodNotAllowed {
		t.Errorf("HEAD with a token: %d, want 405, and the token is good still", got)
	}
	token, _ = h.Token() // the one before was given twice in one address, which ends nothing but must not let in
	first := h.ask("/?token=" + token)
	if first.StatusCode != http.StatusSeeOther {
		t.Fatalf("a token: %s", first.Status)
	}
	c := first.Cookies()[0]
	if !c.HttpOnly || c.SameSite != http.SameSiteStrictMode || c.Path != "/" || c.Value == token {
		t.Errorf("the cookie is %v", c)
	}
	if got := h.ask("/?token=" + token).StatusCode; got != http.StatusUnauthorized {
		t.Errorf("the same token once more: %d, want 401", got)
	}
	with := func(r *http.Request) { r.AddCookie(c) }
	for _, path := range []string{"/", "/app.js", "/style.css", "/icon.svg", "/api/v1/topology"} {
		if got := h.ask(path, with).StatusCode; got != http.StatusOK {
			t.Errorf("GET %s with the cookie: %d, want 200", path, got)
		}
	}
	if got := h.ask("/", func(r *http.Request) { r.AddCookie(&http.Cookie{Name: c.Name, Value: c.Value + "A"}) }).StatusCode; got != http.StatusUnauthorized {
		t.Errorf("another cookie: %d, want 401", got)
	}
	if other := newHost(t); other.ask("/", with).StatusCode != http.StatusUnauthorized {
		t.Error("another host's cookie lets in")
	}
	for _, m := range []string{http.MethodPost, http.MethodPut, http.MethodDelete, http.MethodOptions} {
		if got := h.ask("/api/v1/node", with, func(r *http.Request) { r.Method = m }).StatusCode; got != http.StatusMethodNotAllowed {
			t.Errorf("%s: %d, want 405", m, got)
		}
	}
}

// TestExpired: tokens and sessions end.
func TestExpired(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	old, end := h.Token()
	if got := end.Sub(h.clock.now()); got != tokenLife {
		t.Errorf("a token is good for %s, want %s", got, tokenLife)
	}
	h.clock.add(tokenLife)
	if got := h.ask("/?token=" + old).StatusCode; got != http.StatusUnauthorized {
		t.Errorf("an old token: %d, want 401", got)
	}
	with := h.enter(t)
	h.clock.add(sessionLife - time.Second)
	if got := h.ask("/", with).StatusCode; got != http.StatusOK {
		t.Errorf("a second before its end a session: %d, want 200", got)
	}
	h.clock.add(time.Second)
	if got := h.ask("/", with).StatusCode; got != http.StatusUnauthorized {
		t.Errorf("an old session: %d, want 401", got)
	}
}

// TestKeysAreBounded: the oldest key ends when there would be too many.
func TestKeysAreBounded(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	first, _ := h.Token()
	var last string
	for range maxKeys {
		h.clock.add(time.Millisecond)
		last, _ = h.Token()
	}
	if n := len(h.tokens.end); n != maxKeys {
		t.Errorf("%d tokens are kept, want %d", n, maxKeys)
	}
	if h.tokens.use(first) || !h.tokens.use(last) {
		t.Error("want the oldest gone and the newest there")
	}
}

// TestTwoAtOnce: of many who use a token at once, one is let in.
func TestTwoAtOnce(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	token, _ := h.Token()
	in := make(chan bool, 16)
	for range cap(in) {
		go func() { in <- h.ask("/?token="+token).StatusCode == http.StatusSeeOther }()
	}
	n := 0
	for range cap(in) {
		if <-in {
			n++
		}
	}
	if n != 1 {
		t.Errorf("%d were let in by one token", n)
	}
}

// TestSource: a page of another site gets nothing, though the browser that shows it was let in.
func TestSource(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	with := h.enter(t)
	hostIs := func(name string) func(*http.Request) { return func(r *http.Request) { r.Host = name } }
	for _, c := range []struct {
		name string
		path string
		as   []func(*http.Request)
		want int
	}{
		{"localhost", "/", []func(*http.Request){hostIs("localhost:9000")}, 200},
		{"without a port", "/", []func(*http.Request){hostIs("localhost")}, 200},
		{"an address", "/", []func(*http.Request){hostIs("127.0.0.1:7749")}, 200},
		{"an IPv6 address", "/", []func(*http.Request){hostIs("[::1]:7749")}, 200},
		{"a name that was made to lead here", "/", []func(*http.Request){hostIs("attacker.example:7749")}, 403},
		{"a name that looks like it", "/", []func(*http.Request){hostIs("localhost.attacker.example")}, 403},
		{"another address", "/", []func(*http.Request){hostIs("10.0.0.1:7749")}, 403},
		{"no host", "/", []func(*http.Request){hostIs("")}, 403},
		{"own origin", "/api/v1/node", []func(*http.Request){header("Origin", "http://localhost:7749")}, 200},
		{"another origin", "/api/v1/node", []func(*http.Request){header("Origin", "http://attacker.example")}, 403},
		{"another port of this host", "/api/v1/node", []func(*http.Request){header("Origin", "http://localhost:8080")}, 403},
		{"a hidden origin", "/api/v1/node", []func(*http.Request){header("Origin", "null")}, 403},
		{"own page", "/api/v1/node", []func(*http.Request){header("Sec-Fetch-Site", "same-origin")}, 200},
		{"an address that was typed", "/", []func(*http.Request){header("Sec-Fetch-Site", "none"), header("Sec-Fetch-Mode", "navigate")}, 200},
		{"a page of this host at another port", "/api/v1/node", []func(*http.Request){header("Sec-Fetch-Site", "same-site")}, 403},
		{"a script of another site", "/api/v1/node", []func(*http.Request){header("Sec-Fetch-Site", "cross-site"), header("Sec-Fetch-Mode", "no-cors")}, 403},
		{"a link of another site", "/", []func(*http.Request){header("Sec-Fetch-Site", "cross-site"), header("Sec-Fetch-Mode", "navigate")}, 200},
		{"a link of another site to data", "/api/v1/node", []func(*http.Request){header("Sec-Fetch-Site", "cross-site"), header("Sec-Fetch-Mode", "navigate")}, 403},
	} {
		resp := h.ask(c.path, append(c.as, with)...)
		if resp.StatusCode != c.want {
			t.Errorf("%s: %d, want %d: %s", c.name, resp.StatusCode, c.want, body(t, resp))
		}
	}
	token, _ := h.Token()
	if got := h.ask("/?token="+token, hostIs("attacker.example")).StatusCode; got != http.StatusForbidden {
		t.Errorf("a token at another name: %d, want 403", got)
	}
	if h.ask("/?token="+token).StatusCode != http.StatusSeeOther {
		t.Error("a request that was refused has used the token")
	}
}

// TestNothingFromOutside: browsers are told to load nothing else, and the page's files name nothing else.
func TestNothingFromOutside(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	with := h.enter(t)
	for _, path := range []string{"/", "/app.js", "/style.css", "/api/v1/topology", "/api/v1/nothing"} {
		resp := h.ask(path, with)
		if csp := resp.Header.Get("Content-Security-Policy"); !strings.HasPrefix(csp, "default-src 'self';") || !strings.Contains(csp, "frame-ancestors 'none'") {
			t.Errorf("%s: Content-Security-Policy %q", path, csp)
		}
		if resp.StatusCode == http.StatusOK && resp.Header.Get("Cache-Control") != "no-store" || resp.Header.Get("X-Content-Type-Options") != "nosniff" {
			t.Errorf("%s: headers %v", path, resp.Header)
		}
		if text := strings.ReplaceAll(body(t, resp), "http://www.w3.org/2000/svg", ""); strings.Contains(text, "http://") || strings.Contains(text, "https://") {
			t.Errorf("%s names an address outside", path)
		}
	}
}

// TestAPI: what the page is told is what the operator's API says, in the same JSON.
func TestAPI(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	with := h.enter(t)
	h.log.Info("something happened", "why", "a test")
	for _, c := range []struct {
		path string
		code int
		has  []string
	}{
		{"/api/v1/node", 200, []string{`"name":"node1"`, `"workloadMtu":0`}},
		{"/api/v1/topology", 200, []string{`"node":"node1"`, `"hosts":[`}},
		{"/api/v1/pools", 200, []string{`{"pools":[],"stray":[]}`}},
		{"/api/v1/routes?prefix=10.0.0.0/8", 200, []string{`"prefix":"10.0.0.0/8"`, `"reason":"told so"`}},
		{"/api/v1/routes", 400, []string{"prefix is required"}},
		{"/api/v1/doctor", 200, []string{`"check":"a-check"`}},
		{"/api/v1/events", 200, []string{`"message":"something happened"`, `"value":"a test"`}},
		{"/api/v1/events?level=loud", 400, []string{`level "loud"`}},
		{"/api/v1/policy/explain?from=a&to=b&port=x", 400, []string{`port "x"`}},
		{"/api/v1/pods", 200, []string{`"name":"shop/web"`, `"all":7`}},
		{"/api/v1/trace?from=a&to=b&protocol=tcp&port=80", 200, []string{`"verdict":"whole"`, "port:80"}},
		{"/api/v1/trace?from=a", 400, []string{"from and to are required"}},
		{"/api/v1/trace?from=a&to=b&port=x", 400, []string{`port "x"`}},
		{"/api/v1/nothing", 404, nil},
	} {
		resp := h.ask(c.path, with)
		text := strings.ReplaceAll(body(t, resp), `": `, `":`) // protojson varies its white space
		text = strings.ReplaceAll(text, `", "`, `","`)
		if resp.StatusCode != c.code {
			t.Errorf("%s: %d, want %d: %s", c.path, resp.StatusCode, c.code, text)
		}
		for _, s := range c.has {
			if !strings.Contains(text, s) {
				t.Errorf("%s: no %s in %s", c.path, s, text)
			}
		}
	}
}

// TestChanges: a page hears of a change when there is one, and its stream ends with the server.
func TestChanges(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	socket := filepath.Join(t.TempDir(), "ui.sock")
	lis, err := rpc.Listen(socket)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- h.Serve(ctx, lis) }()
	client := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}}
	r, err := http.NewRequestWithContext(await.Context(t), http.MethodGet, "http://localhost/api/v1/changes", nil)
	if err != nil {
		t.Fatal(err)
	}
	h.enter(t)(r)
	resp, err := client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	next := func() (rev Revisions) {
		for lines.Scan() {
			if lines.Text() == "event: revisions" && lines.Scan() {
				if err := json.Unmarshal([]byte(strings.TrimPrefix(lines.Text(), "data: ")), &rev); err != nil {
					t.Fatal(err)
				}
				return rev
			}
		}
		t.Fatalf("the stream has ended: %v", lines.Err())
		return rev
	}
	if got := next(); got != (Revisions{}) {
		t.Errorf("at first %+v, want none", got)
	}
	h.watch.HandleStore(cluster.Step{Changes: []*cluster.Change{{Event: store.Event{Key: store.ResourceKey(store.KindIPPool, "a")}}}})
	if got := next(); got.Pools != 1 || got.Topology != 0 {
		t.Errorf("after a pool changed: %+v", got)
	}
	h.watch.SetPresent([]string{"node1"})
	if got := next(); got.Topology != 1 {
		t.Errorf("after a host came: %+v", got)
	}
	h.watch.Happened()
	if got := next(); got.Events != 1 || got.Topology != 2 {
		t.Errorf("after a record of the log: %+v", got)
	}
	stop()
	for lines.Scan() { // until it ends
	}
	if err := <-done; err != nil {
		t.Errorf("the server ended with %v", err)
	}
}
