package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"go.uber.org/goleak"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/kube/convert"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// script is an API server that says what a test wants it to, without a network,
// so that time can be virtual. What a real one says is tried in integration/kube.
type script struct {
	mu    sync.Mutex
	seen  []*url.URL
	say   func(n int, req *http.Request) *http.Response // n counts from 0
	ended sync.WaitGroup
}

func (s *script) RoundTrip(req *http.Request) (*http.Response, error) {
	s.mu.Lock()
	n := len(s.seen)
	s.seen = append(s.seen, req.URL)
	s.mu.Unlock()
	resp := s.say(n, req)
	if resp == nil {
		return nil, fmt.Errorf("dial tcp: connect: connection refused")
	}
	return resp, nil
}

func (s *script) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.seen)
}

// open returns a store that talks to the script.
func (s *script) open(t *testing.T) *Store {
	t.Helper()
	st := &Store{
		cluster: &cluster{
			client: &client{http: &http.Client{Transport: s}, base: "https://api", log: slog.New(slog.DiscardHandler)}, group: convert.V3, identified: true, asked: true,
		},
	}
	st.ctx, st.cancel = context.WithCancel(t.Context())
	t.Cleanup(func() {
		st.Close()
		s.ended.Wait()
	})
	return st
}

// answer is a whole answer.
func answer(code int, body string) *http.Response {
	return &http.Response{StatusCode: code, Header: http.Header{}, Body: io.NopCloser(strings.NewReader(body))}
}

func refusal(code int, reason, message string) string {
	return fmt.Sprintf(`{"kind":"Status","code":%d,"reason":%q,"message":%q}`, code, reason, message)
}

// stream is the answer to a watch: the lines, and then silence until the client
// goes, or with over the end.
func (s *script) stream(req *http.Request, over bool, lines ...string) *http.Response {
	r, w := io.Pipe()
	s.ended.Go(func() {
		for _, line := range lines {
			if _, err := io.WriteString(w, line+"\n"); err != nil {
				return
			}
		}
		if !over {
			<-req.Context().Done()
		}
		w.Close()
	})
	return &http.Response{StatusCode: http.StatusOK, Header: http.Header{}, Body: r}
}

// piped returns an answer of which each line is told as it comes; an empty one ends it.
func piped(req *http.Request) (*http.Response, func(line string)) {
	r, w := io.Pipe()
	stop := context.AfterFunc(req.Context(), func() { w.Close() })
	return &http.Response{StatusCode: http.StatusOK, Header: http.Header{}, Body: r}, func(line string) {
		if line == "" {
			stop()
			w.Close()
			return
		}
		_, _ = io.WriteString(w, line+"\n") // who asked may be gone
	}
}

func pool(name string, rev int, cidr string) string {
	return fmt.Sprintf(`{"kind":"IPPool","apiVersion":"projectcalico.org/v3","metadata":{"name":%q,"resourceVersion":"%d"},"spec":{"cidr":%s}}`, name, rev, cidr)
}

func line(kind, object string) string { return fmt.Sprintf(`{"type":%q,"object":%s}`, kind, object) }

func bookmark(rev int, end bool) string {
	a := ""
	if end {
		a = `,"annotations":{"k8s.io/initial-events-end":"true"}`
	}
	return line("BOOKMARK", fmt.Sprintf(`{"metadata":{"resourceVersion":"%d"%s}}`, rev, a))
}

// initial reports whether a request is for the state as a stream.
func initial(req *http.Request) bool { return req.URL.Query().Get("sendInitialEvents") != "" }

func watching(req *http.Request) bool { return req.URL.Query().Get("watch") != "" }

// collect takes what is there without the passing of time.
func collect(ch <-chan store.Batch) []store.Batch {
	var out []store.Batch
	for {
		synctest.Wait()
		select {
		case b := <-ch:
			out = append(out, b)
		default:
			return out
		}
	}
}

// told says in short what batches tell.
func told(batches []store.Batch) string {
	var out []string
	for _, b := range batches {
		var events []string
		for _, e := range b.Events {
			switch {
			case e.Err != nil:
				events = append(events, "!"+e.Key.Name)
			case e.Deleted():
				events = append(events, "-"+e.Key.Name)
			default:
				events = append(events, fmt.Sprintf("%s@%d", e.Key.Name, e.Object.Revision))
			}
		}
		s := fmt.Sprintf("%d[%s]", b.Revision, strings.Join(events, " "))
		if b.Synced {
			s += " synced"
		}
		if b.Err != nil {
			s += " outage"
		}
		out = append(out, s)
	}
	return strings.Join(out, ", ")
}

func want(t *testing.T, what string, ch <-chan store.Batch, text string) {
	t.Helper()
	if got := told(collect(ch)); got != text {
		t.Errorf("%s: told %q, want %q", what, got, text)
	}
}

func page1(rev int, items ...string) string {
	raw := make([]json.RawMessage, len(items))
	for i, it := range items {
		raw[i] = json.RawMessage(it)
	}
	b, _ := json.Marshal(map[string]any{"metadata": map[string]any{"resourceVersion": fmt.Sprint(rev)}, "items": raw})
	return string(b)
}
