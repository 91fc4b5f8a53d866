package ui

import (
	"context"
	"crypto/rand"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"golang.org/x/net/netutil"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/dataplane/netdev"
)

//go:embed web
var web embed.FS

const (
	// maxConnections bounds the connections of browsers: each takes a file and a goroutine of the daemon.
	maxConnections = 64
	// pulse is how often what nobody tells is looked at while a page is open: the counters of devices.
	pulse = 2 * time.Second
	// settle is how long changes are gathered before a page is told.
	settle = 300 * time.Millisecond
)

// Config is what a [Server] shows.
type Config struct {
	Node     string
	Operator apiv1.OperatorServer
	Events   apiv1.EventsServer
	Watch    *Watch
	// Examine says what is wrong with this host and, by the datastore, with the others.
	Examine func(context.Context) (*apiv1.ExamineResponse, error)
	// Trace follows a packet over the hosts of both ends.
	Trace func(context.Context, *apiv1.TraceRequest) (*apiv1.TraceResponse, error)
	// Pods lists workloads of the cluster.
	Pods func(context.Context) (Pods, error)
	// Hosts asks all hosts how they are.
	Hosts func(context.Context) (*apiv1.HostsResponse, error)
	// Wanted lists the sessions of every node, of clusters of [MaxMesh] nodes at most.
	Wanted func(context.Context) []Session
	// Sessions is this host's sessions and their states, as text: another one is a change.
	Sessions func() string
	// Counters are those of this host's devices, by their names.
	Counters func() (map[string]netdev.Counters, error)
	Now      func() time.Time
	Log      *slog.Logger
}

// Server serves the page. It is safe for concurrent use.
type Server struct {
	cfg      Config
	cookie   string // its name: pages of other hosts, tunnelled to other ports, share a browser's cookies
	tokens   *keys
	sessions *keys
	handler  http.Handler
	// examining has room for one: each takes a second of probes.
	examining chan struct{}
}

// New returns a Server.
func New(cfg Config) (*Server, error) {
	s := &Server{
		cfg: cfg, cookie: "routerd_" + rand.Text()[:8],
		tokens: newKeys(tokenLife, cfg.Now), sessions: newKeys(sessionLife, cfg.Now), examining: make(chan struct{}, 1),
	}
	root, err := fs.Sub(web, "web")
	if err != nil {
		return nil, err
	}
	api := http.NewServeMux()
	api.HandleFunc("GET /api/v1/topology", s.topology)
	api.HandleFunc("GET /api/v1/pools", func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, cfg.Watch.mapPools()) })
	api.HandleFunc("GET /api/v1/node", s.answers(func(r *http.Request) (proto.Message, error) {
		return cfg.Operator.Node(r.Context(), &apiv1.NodeRequest{})
	}))
	api.HandleFunc("GET /api/v1/routes", s.answers(s.routes))
	api.HandleFunc("GET /api/v1/policy", s.answers(func(r *http.Request) (proto.Message, error) {
		return cfg.Operator.Policy(r.Context(), &apiv1.PolicyRequest{Endpoint: r.URL.Query().Get("endpoint")})
	}))
	api.HandleFunc("GET /api/v1/policy/explain", s.answers(s.explain))
	api.HandleFunc("GET /api/v1/events", s.answers(s.events))
	api.HandleFunc("GET /api/v1/doctor", s.answers(s.examine))
	api.HandleFunc("GET /api/v1/pods", s.pods)
	api.HandleFunc("GET /api/v1/trace", s.answers(s.trace))
	api.HandleFunc("GET /api/v1/changes", s.changes)
	files := http.FileServerFS(root)
	api.Handle("GET /", files)
	mux := http.NewServeMux()
	mux.Handle("/", s.letIn(api))
	s.handler = guard(mux)
	return s, nil
}

// Token returns a secret by which the page can be opened once, and until when.
func (s *Server) Token() (string, time.Time) { return s.tokens.make() }

// Serve serves on lis until ctx ends.
func (s *Server) Serve(ctx context.Context, lis net.Listener) error {
	srv := &http.Server{
		Handler: s.handler, ReadHeaderTimeout: 5 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 16 << 10,
		ErrorLog:    slog.NewLogLogger(s.cfg.Log.Handler(), slog.LevelDebug), // browsers break connections off
		BaseContext: func(net.Listener) context.Context { return ctx },       // ends the streams
	}
	done := make(chan error, 1)
	go func() { done <- srv.Serve(netutil.LimitListener(lis, maxConnections)) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	err := srv.Close() // it only reads: nothing is lost
	if serr := <-done; !errors.Is(serr, http.ErrServerClosed) {
		err = errors.Join(err, serr)
	}
	return err
}

// letIn asks for a session, and gives one for a token.
func (s *Server) letIn(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet {
			w.Header().Set("Allow", http.MethodGet)
			http.Error(w, "the page only reads: use GET", http.StatusMethodNotAllowed)
			return
		}
		if token, ok := r.URL.Query()["token"]; ok && r.URL.Path == "/" {
			if len(token) != 1 || !s.tokens.use(token[0]) {
				http.Error(w, "This address was used before, or is too old: run `routerctl ui` again.", http.StatusUnauthorized)
				return
			}
			secret, _ := s.sessions.make()
			http.SetCookie(w, &http.Cookie{
				Name: s.cookie, Value: secret, Path: "/", MaxAge: int(sessionLife.Seconds()), HttpOnly: true, SameSite: http.SameSiteStrictMode,
			})
			http.Redirect(w, r, "/", http.StatusSeeOther)
			return
		}
		c, err := r.Cookie(s.cookie)
		if err != nil {
			unauthorized(w)
			return
		}
		end, ok := s.sessions.valid(c.Value)
		if !ok {
			unauthorized(w)
			return
		}
		// A stream ends with its session.
		ctx, cancel := context.WithTimeout(r.Context(), end.Sub(s.cfg.Now()))
		defer cancel()
		next.ServeHTTP(w, r.WithContext(ctx))
	})
}

func unauthorized(w http.ResponseWriter) {
	http.Error(w, "Run `routerctl ui` on this host, as root, and open the address that it prints.", http.StatusUnauthorized)
}

// answers serves an answer of the operator's API, in the JSON that routerctl prints.
func (s *Server) answers(ask func(*http.Request) (proto.Message, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		m, err := ask(r)
		if err != nil {
			writeError(w, err)
			return
		}
		b, err := protojson.MarshalOptions{EmitUnpopulated: true}.Marshal(m)
		if err != nil {
			writeError(w, err)
			return
		}
		writeBytes(w, b)
	}
}

func writeJSON(w http.ResponseWriter, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		writeError(w, err)
		return
	}
	writeBytes(w, b)
}

func writeBytes(w http.ResponseWriter, b []byte) {
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(b) // the client is gone; nobody is left to tell
}

// writeError answers in the words of a gRPC status.
func writeError(w http.ResponseWriter, err error) {
	code := http.StatusInternalServerError
	st := status.Convert(err)
	switch st.Code() {
	case codes.InvalidArgument:
		code = http.StatusBadRequest
	case codes.NotFound:
		code = http.StatusNotFound
	case codes.FailedPrecondition, codes.Unavailable, codes.ResourceExhausted:
		code = http.StatusServiceUnavailable
	}
	http.Error(w, st.Message(), code)
}

func (s *Server) topology(w http.ResponseWriter, r *http.Request) {
	ctx := r.Context()
	f := s.cfg.Watch.facts(s.cfg.Now())
	var err error
	if f.Self, err = s.cfg.Operator.Node(ctx, &apiv1.NodeRequest{}); err != nil {
		writeError(w, err)
		return
	}
	var notes []string
	if f.Paths, err = s.cfg.Operator.Paths(ctx, &apiv1.PathsRequest{}); err != nil {
		notes = append(notes, "paths of the underlay: "+status.Convert(err).Message())
	}
	if f.Tunnels, err = s.cfg.Operator.Tunnels(ctx, &apiv1.TunnelsRequest{}); err != nil {
		notes = append(notes, "tunnels: "+status.Convert(err).Message())
	}
	if len(f.Nodes) <= MaxMesh {
		f.Wanted = s.cfg.Wanted(ctx)
	} else {
		notes = append(notes, fmt.Sprintf("of %d nodes the sessions of this host alone are drawn", len(f.Nodes)))
	}
	t := draw(f)
	t.Notes = append(t.Notes, notes...)
	writeJSON(w, t)
}

// routes wants a prefix: a table of BGP's may have a million.
func (s *Server) routes(r *http.Request) (proto.Message, error) {
	prefix := r.URL.Query().Get("prefix")
	if prefix == "" {
		return nil, status.Error(codes.InvalidArgument, "prefix is required: a prefix, such as 192.168.0.0/16, or an address")
	}
	return s.cfg.Operator.Routes(r.Context(), &apiv1.RoutesRequest{Prefix: prefix})
}

func (s *Server) explain(r *http.Request) (proto.Message, error) {
	q := r.URL.Query()
	req := &apiv1.PolicyExplainRequest{From: q.Get("from"), To: q.Get("to"), Protocol: q.Get("protocol")}
	var err error
	if req.Port, err = portOf(q.Get("port")); err != nil {
		return nil, err
	}
	return s.cfg.Operator.PolicyExplain(r.Context(), req)
}

// shownEvents is how many of the newest are shown unless more are asked for.
const shownEvents = 200

func (s *Server) events(r *http.Request) (proto.Message, error) {
	out := &collected{ctx: r.Context()}
	req := &apiv1.EventsRequest{Level: r.URL.Query().Get("level"), Limit: shownEvents}
	if err := s.cfg.Events.List(req, out); err != nil {
		return nil, err
	}
	return &out.all, nil
}

// collected takes a stream of events as one answer.
type collected struct {
	grpc.ServerStream
	ctx context.Context
	all apiv1.EventsResponse
}

// Context implements [grpc.ServerStream].
func (c *collected) Context() context.Context { return c.ctx }

// Send implements [grpc.ServerStreamingServer].
func (c *collected) Send(r *apiv1.EventsResponse) error {
	c.all.Events = append(c.all.Events, r.GetEvents()...)
	return nil
}

func (s *Server) examine(r *http.Request) (proto.Message, error) {
	return s.alone(r, func(ctx context.Context) (proto.Message, error) { return s.cfg.Examine(ctx) })
}

// alone has this host examined for one page at a time.
func (s *Server) alone(r *http.Request, look func(context.Context) (proto.Message, error)) (proto.Message, error) {
	select {
	case s.examining <- struct{}{}:
		defer func() { <-s.examining }()
	case <-r.Context().Done():
		return nil, r.Context().Err()
	}
	return look(r.Context())
}

// changes tells a page what has changed, for as long as it listens (Server-Sent Events, HTML Living Standard section
// 9.2), and every pulse what its devices carry.
func (s *Server) changes(w http.ResponseWriter, r *http.Request) {
	ctx := r.Context()
	w.Header().Set("Content-Type", "text/event-stream")
	out := http.NewResponseController(w)
	send := func(event string, v any) bool {
		b, err := json.Marshal(v)
		if err != nil {
			return false
		}
		if _, err = fmt.Fprintf(w, "event: %s\ndata: %s\n\n", event, b); err != nil {
			return false
		}
		return out.Flush() == nil
	}
	rev, changed := s.cfg.Watch.Revisions()
	if !send("revisions", rev) {
		return
	}
	asking, stop := context.WithCancel(ctx)
	var others sync.WaitGroup
	others.Go(func() { s.followOthers(asking) })
	defer others.Wait()
	defer stop()
	tick := time.NewTicker(pulse)
	defer tick.Stop()
	sessions, read, at := s.cfg.Sessions(), s.counters(), s.cfg.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case <-changed:
			if async.Sleep(ctx, settle) != nil { // what comes in a moment is told with it
				return
			}
			rev, changed = s.cfg.Watch.Revisions()
			if !send("revisions", rev) {
				return
			}
		case <-tick.C:
			if now := s.cfg.Sessions(); now != sessions {
				sessions = now
				s.cfg.Watch.Happened() // with or without a record of the log
			}
			is, now := s.counters(), s.cfg.Now()
			if !send("rates", rates(read, is, now.Sub(at))) {
				return
			}
			read, at = is, now
		}
	}
}

func (s *Server) counters() map[string]netdev.Counters {
	all, _ := s.cfg.Counters() // of what cannot be read the page shows no rates
	return shown(all)
}
