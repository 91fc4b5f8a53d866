// Package kubetest is a Kubernetes API server in memory, for tests of programs that need
// one and not its judgement: it holds objects of any kind, of which it checks nothing but
// the resourceVersion. What a real one says is tried in integration/kube.
package kubetest

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	jsonpatch "github.com/evanphx/json-patch/v5"
)

// object is one as JSON has it.
type object map[string]any

func (o object) meta() object {
	m, _ := o["metadata"].(map[string]any)
	return m
}

func (o object) name() string    { s, _ := o.meta()["name"].(string); return s }
func (o object) version() string { s, _ := o.meta()["resourceVersion"].(string); return s }

// change is one, in order.
type change struct {
	revision   int
	kind       string // ADDED, MODIFIED or DELETED
	collection string // as "/api/v1/pods", of all namespaces
	object     json.RawMessage
}

// Server is an API server. Its methods may be called by any goroutine.
type Server struct {
	http *http.Server
	url  string

	mu       sync.Mutex
	objects  map[string]object // by path
	history  []change
	revision int
	more     chan struct{} // closed when the history grows
	away     bool
}

// New starts a server that serves a listener until the test ends.
func New(t testing.TB, l net.Listener) *Server {
	t.Helper()
	s := &Server{url: "http://" + l.Addr().String(), objects: map[string]object{}, revision: 1, more: make(chan struct{})}
	s.http = &http.Server{Handler: s, ReadHeaderTimeout: time.Minute}
	var served sync.WaitGroup
	served.Go(func() { _ = s.http.Serve(l) }) // it ends when the server is closed
	t.Cleanup(func() {
		s.http.Close()
		served.Wait()
	})
	return s
}

// SetAway has the server end all watches and answer nothing, or answer again.
func (s *Server) SetAway(away bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.away = away
	close(s.more)
	s.more = make(chan struct{})
}

func (s *Server) isAway() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.away
}

// Kubeconfig returns the text of a file that leads to the server.
func (s *Server) Kubeconfig() string {
	return fmt.Sprintf(`apiVersion: v1
kind: Config
current-context: test
contexts: [{name: test, context: {cluster: test, user: test}}]
clusters: [{name: test, cluster: {server: %q}}]
users: [{name: test, user: {token: test}}]
`, s.url)
}

// Create puts an object at a path, such as "/api/v1/nodes/node1".
func (s *Server) Create(path, text string) error {
	o := object{}
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		return fmt.Errorf("create %s: %w", path, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.put(parse(path), o)
	return nil
}

// Delete deletes the object at a path.
func (s *Server) Delete(path string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if o, there := s.objects[path]; there {
		s.drop(parse(path), o)
	}
}

// drop deletes an object. The lock is held.
func (s *Server) drop(p place, o object) {
	s.revision++
	delete(s.objects, p.path())
	o.meta()["resourceVersion"] = strconv.Itoa(s.revision)
	s.tell("DELETED", p, o)
}

// Get returns the object at a path, as JSON, or nil.
func (s *Server) Get(path string) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	o, ok := s.objects[path]
	if !ok {
		return nil
	}
	return encode(o)
}

// place is a path, taken apart.
type place struct{ group, namespace, resource, name, subresource string }

// parse takes the path of an object or a collection apart.
func parse(path string) place {
	f := strings.Split(strings.TrimPrefix(path, "/"), "/")
	n := min(2, len(f)) // api, v1
	if f[0] == "apis" {
		n = min(3, len(f))
	}
	p := place{group: "/" + strings.Join(f[:n], "/")}
	if f = f[n:]; len(f) > 2 && f[0] == "namespaces" {
		p.namespace, f = f[1], f[2:]
	}
	for i, to := range []*string{&p.resource, &p.name, &p.subresource} {
		if i < len(f) {
			*to = f[i]
		}
	}
	p.name, _ = url.PathUnescape(p.name)
	return p
}

func (p place) collection() string { return p.group + "/" + p.resource }

func (p place) path() string {
	if p.namespace != "" {
		return p.group + "/namespaces/" + p.namespace + "/" + p.resource + "/" + p.name
	}
	return p.collection() + "/" + p.name
}

// apart reports whether the status of a resource's objects is written at a place of its own.
func apart(resource string) bool {
	return resource == "caliconodestatuses" || resource == "kubecontrollersconfigurations"
}

// withStatus returns what a write of o makes of the object that was there: its status, or all
// but that.
func (o object) withStatus(old object, status bool) object {
	from, to := old, o
	if status {
		from, to = o, maps.Clone(old)
	}
	if text, ok := from["status"]; ok {
		to["status"] = text
	} else {
		delete(to, "status")
	}
	return to
}

func encode(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		return nil // what came from JSON goes there again
	}
	return b
}

// put writes an object. The lock is held.
func (s *Server) put(p place, o object) {
	kind := "MODIFIED"
	old, there := s.objects[p.path()]
	if o["metadata"] == nil {
		o["metadata"] = map[string]any{}
	}
	m := o.meta()
	m["name"] = p.name
	if p.namespace != "" {
		m["namespace"] = p.namespace
	}
	s.revision++
	if there {
		m["uid"], m["creationTimestamp"] = old.meta()["uid"], old.meta()["creationTimestamp"]
	} else {
		kind = "ADDED"
		m["uid"], m["creationTimestamp"] = fmt.Sprintf("00000000-0000-4000-8000-%012d", s.revision), "2026-01-01T00:00:00Z"
	}
	m["resourceVersion"] = strconv.Itoa(s.revision)
	s.objects[p.path()] = o
	s.tell(kind, p, o)
}

// tell adds to the history. The lock is held.
func (s *Server) tell(kind string, p place, o object) {
	s.history = append(s.history, change{s.revision, kind, p.collection(), encode(o)})
	close(s.more)
	s.more = make(chan struct{})
}

// ServeHTTP answers one request.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if s.isAway() {
		panic(http.ErrAbortHandler) // the connection ends without an answer
	}
	w.Header().Set("Content-Type", "application/json")
	p := parse(r.URL.EscapedPath())
	if r.Method == http.MethodGet && r.URL.Query().Get("watch") != "" {
		s.watch(w, r, p)
		return
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	s.mu.Lock()
	code, answer := s.answer(r, p, body)
	text := encode(answer) // an object changes when it is deleted
	s.mu.Unlock()
	if code != http.StatusOK {
		text = encode(map[string]any{"kind": "Status", "code": code, "reason": strings.ReplaceAll(http.StatusText(code), " ", ""), "message": r.Method + " " + r.URL.Path})
	}
	w.WriteHeader(code)
	_, _ = w.Write(text) // who asked may be gone
}

// answer carries a request out. The lock is held.
func (s *Server) answer(r *http.Request, p place, body []byte) (code int, answer any) {
	switch {
	case r.URL.Path == "/apis":
		return http.StatusOK, map[string]any{"groups": []any{map[string]any{"name": "projectcalico.org"}}}
	case r.Method == http.MethodGet && p.name == "":
		var items []json.RawMessage
		for _, path := range slices.Sorted(maps.Keys(s.objects)) {
			if q := parse(path); q.collection() == p.collection() && (p.namespace == "" || q.namespace == p.namespace) && selected(r.URL.Query().Get("fieldSelector"), s.objects[path]) {
				items = append(items, encode(s.objects[path]))
			}
		}
		return http.StatusOK, map[string]any{"metadata": map[string]any{"resourceVersion": strconv.Itoa(s.revision)}, "items": items}
	}
	var given object
	if r.Method == http.MethodPost || r.Method == http.MethodPut {
		if json.Unmarshal(body, &given) != nil {
			return http.StatusBadRequest, nil
		}
		p.name = given.name()
	}
	old, there := s.objects[p.path()]
	switch {
	case r.Method == http.MethodPost && there:
		return http.StatusConflict, nil
	case r.Method != http.MethodPost && !there:
		return http.StatusNotFound, nil
	case r.Method == http.MethodGet:
		return http.StatusOK, old
	case r.Method == http.MethodDelete:
		var o struct {
			Preconditions struct{ ResourceVersion string }
		}
		if _ = json.Unmarshal(body, &o); o.Preconditions.ResourceVersion != "" && o.Preconditions.ResourceVersion != old.version() {
			return http.StatusConflict, nil
		}
		s.drop(p, old)
		return http.StatusOK, old
	case r.Method == http.MethodPatch:
		change := jsonpatch.MergePatch
		if strings.HasPrefix(r.Header.Get("Content-Type"), "application/json-patch") {
			change = func(doc, patch []byte) ([]byte, error) {
				p, err := jsonpatch.DecodePatch(patch)
				if err != nil {
					return nil, err
				}
				return p.Apply(doc)
			}
		}
		out, err := change(encode(old), body)
		if err != nil || json.Unmarshal(out, &given) != nil {
			return http.StatusUnprocessableEntity, nil
		}
	}
	if r.Method != http.MethodPost && given.version() != "" && given.version() != old.version() {
		return http.StatusConflict, nil
	}
	if r.Method == http.MethodPut && apart(p.resource) {
		given = given.withStatus(old, p.subresource == "status")
	}
	if r.URL.Query().Get("dryRun") == "" {
		s.put(p, given)
	}
	return http.StatusOK, given
}

// watch tells changes of a collection until who asked goes or the server is closed.
func (s *Server) watch(w http.ResponseWriter, r *http.Request, p place) {
	send := func(kind string, raw json.RawMessage) {
		_, _ = w.Write(append(encode(map[string]any{"type": kind, "object": raw}), '\n')) // the loop sees that who asked is gone
	}
	bookmark := func(revision int, annotations any) {
		send("BOOKMARK", encode(map[string]any{"metadata": map[string]any{"resourceVersion": strconv.Itoa(revision), "annotations": annotations}}))
	}
	end := time.Duration(1<<62) / 2
	if n, err := strconv.Atoi(r.URL.Query().Get("timeoutSeconds")); err == nil {
		end = time.Duration(n) * time.Second
	}
	over := time.NewTimer(end)
	defer over.Stop()
	concerns := func(raw json.RawMessage) bool {
		var o object
		return json.Unmarshal(raw, &o) == nil && selected(r.URL.Query().Get("fieldSelector"), o)
	}
	at, err := strconv.Atoi(r.URL.Query().Get("resourceVersion"))
	if initial := r.URL.Query().Get("sendInitialEvents") != ""; initial || err != nil {
		s.mu.Lock()
		at = s.revision
		var state []json.RawMessage
		for _, path := range slices.Sorted(maps.Keys(s.objects)) {
			if parse(path).collection() == p.collection() {
				state = append(state, encode(s.objects[path]))
			}
		}
		s.mu.Unlock()
		for _, raw := range state {
			if concerns(raw) {
				send("ADDED", raw)
			}
		}
		if initial {
			bookmark(at, map[string]string{"k8s.io/initial-events-end": "true"})
		}
	}
	out := http.NewResponseController(w)
	for {
		s.mu.Lock()
		more := s.more
		i, _ := slices.BinarySearchFunc(s.history, at+1, func(c change, rev int) int { return c.revision - rev })
		news := s.history[i:]
		s.mu.Unlock()
		for _, c := range news {
			if at = c.revision; c.collection == p.collection() && concerns(c.object) {
				send(c.kind, c.object)
			}
		}
		if out.Flush() != nil || s.isAway() {
			return
		}
		select {
		case <-more:
		case <-over.C:
			bookmark(at, nil)
			return
		case <-r.Context().Done():
			return
		}
	}
}

// selected reports whether an object is what a field selector names.
func selected(selector string, o object) bool {
	for term := range strings.SplitSeq(selector, ",") {
		if term == "" {
			continue
		}
		field, want, _ := strings.Cut(term, "=")
		field, not := strings.CutSuffix(field, "!")
		var v any = map[string]any(o)
		for name := range strings.SplitSeq(field, ".") {
			m, _ := v.(map[string]any)
			v = m[name]
		}
		if got, _ := v.(string); (got == want) == not {
			return false
		}
	}
	return true
}
