package kube

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/store"
)

const (
	// callTimeout bounds one request that is no watch.
	callTimeout = 30 * time.Second
	// readTries is how often a read is tried that a server could not serve.
	readTries = 3
	// pageSize is how many objects one request of a list asks for.
	pageSize = 500
	// retryMin and retryMax bound the pause between tries where the server names
	// none.
	retryMin = 100 * time.Millisecond
	retryMax = 5 * time.Second

	jsonType      = "application/json"
	patchType     = "application/merge-patch+json"
	jsonPatchType = "application/json-patch+json"
)

// client makes requests of an API.
type client struct {
	http *http.Client
	base string // before paths

	warned   func(r request, text string)    // gets what a server says of a write beside the answer; may be nil
	describe func() (user, authority string) // of the credentials, for people; may be nil
	native   bool                            // see Config.NativeOnly
	log      *slog.Logger
	ctx      context.Context // ends with [Store.Close]
}

// request is one of these.
type request struct {
	method, path string
	query        url.Values
	contentType  string
	body         []byte
}

// statusError is the answer of a server that did not do what was asked.
type statusError struct {
	req     request
	code    int
	reason  string // of Kubernetes, as "AlreadyExists"
	message string
	after   time.Duration // before another try, if the server says so
}

func (e *statusError) Error() string {
	return fmt.Sprintf("%s %s: %d %s: %s", e.req.method, e.req.path, e.code, e.reason, e.message)
}

// status is how the API says that it did not do something.
type status struct {
	Message string `json:"message"`
	Reason  string `json:"reason"`
	Code    int    `json:"code"`
	Details struct {
		RetryAfterSeconds int `json:"retryAfterSeconds"`
	} `json:"details"`
}

// send makes a request once. The caller closes the answer's body.
func (c *client) send(ctx context.Context, r request) (*http.Response, error) {
	target := c.base + r.path
	if len(r.query) > 0 {
		target += "?" + r.query.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, r.method, target, bytes.NewReader(r.body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept", jsonType)
	if r.contentType != "" {
		req.Header.Set("Content-Type", r.contentType)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode/100 == 2 {
		if c.warned != nil && r.method != http.MethodGet {
			for _, text := range resp.Header.Values("Warning") {
				c.warned(r, text)
			}
		}
		return resp, nil
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err != nil {
		return nil, err
	}
	e := &statusError{req: r, code: resp.StatusCode, message: plainly(resp, text)}
	var s status
	if json.Unmarshal(text, &s) == nil && s.Message != "" {
		e.reason, e.message = s.Reason, s.Message
		e.after = time.Duration(s.Details.RetryAfterSeconds) * time.Second
	}
	if n, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil {
		e.after = time.Duration(n) * time.Second
	}
	return nil, e
}

// plainly says what an answer is that is no Status, as those of a proxy before the server: its code, and
// the first line of the text if it is one for people.
func plainly(resp *http.Response, text []byte) string {
	line, _, _ := strings.Cut(strings.TrimSpace(string(text)), "\n")
	if line == "" || len(line) > 200 || strings.HasPrefix(line, "<") {
		return resp.Status
	}
	return resp.Status + ": " + line
}

// call makes a request, unless the store is closed, and returns the answer. What was certainly not
// done, and reads, are tried again.
func (c *client) call(ctx context.Context, r request) ([]byte, error) {
	if c.ctx.Err() != nil {
		return nil, fmt.Errorf("%w: the store was closed", store.ErrUnavailable)
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	for try := 1; ; try++ {
		answer, err := c.once(ctx, r)
		if err == nil || try == readTries || !again(r, err) {
			return answer, err
		}
		if async.Sleep(ctx, pauseAfter(err, try)) != nil {
			return nil, err
		}
	}
}

func (c *client) once(ctx context.Context, r request) ([]byte, error) {
	resp, err := c.send(ctx, r)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return io.ReadAll(resp.Body)
}

// again reports whether a request that failed may be made once more.
func again(r request, err error) bool {
	var s *statusError
	if errors.As(err, &s) {
		// Too many requests are refused before anything is done.
		return s.code == http.StatusTooManyRequests || r.method == http.MethodGet && s.code/100 == 5
	}
	var op *net.OpError
	return r.method == http.MethodGet || errors.As(err, &op) && op.Op == "dial"
}

// pauseAfter is how long to wait before another try: as the server says, else
// longer after each failure, and at random so that the hosts of a cluster do not
// come back all at once.
func pauseAfter(err error, failures int) time.Duration {
	var s *statusError
	if errors.As(err, &s) && s.after > 0 {
		return s.after + rand.N(s.after/2+1)
	}
	limit := retryMax
	if failures < 6 {
		limit = min(limit, retryMin<<failures)
	}
	return limit/2 + rand.N(limit/2)
}

// write makes a request that writes, or would.
func (c *client) write(ctx context.Context, dry bool, r request) ([]byte, error) {
	if dry {
		// What the schema lacks would be dropped without a word.
		r.query = url.Values{"dryRun": {"All"}, "fieldValidation": {"Strict"}}
	}
	return c.call(ctx, r)
}

// patchStatus patches the object at a path with its status.
func (c *client) patchStatus(ctx context.Context, dry bool, path, contentType string, patch []byte) ([]byte, error) {
	return c.write(ctx, dry, request{method: http.MethodPatch, path: path + "/status", contentType: contentType, body: patch})
}

// events makes one watch of a path, which the server is to keep for some time, and calls
// take for each event but errors until the watch ends; an error of take ends it. It
// calls opened when the server has begun. The error is nil where the server ended
// the watch.
func (c *client) events(ctx context.Context, path string, query url.Values, keep time.Duration, opened func(context.Context), take func(event) error) error {
	query.Set("watch", "1")
	query.Set("allowWatchBookmarks", "true")
	query.Set("timeoutSeconds", strconv.Itoa(int(keep/time.Second)))
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	quiet := time.AfterFunc(silence, func() { cancel(errSilent) })
	defer quiet.Stop()
	resp, err := c.send(ctx, request{method: http.MethodGet, path: path, query: query})
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	opened(ctx)
	dec := json.NewDecoder(resp.Body)
	for {
		var e event
		if err := dec.Decode(&e); err != nil {
			switch cause := context.Cause(ctx); {
			case cause != nil:
				return cause
			case errors.Is(err, io.EOF):
				return nil
			}
			return err
		}
		quiet.Reset(silence)
		if e.Type == "ERROR" {
			return e.status(path)
		}
		if err := take(e); err != nil {
			return err
		}
	}
}

// page is a part of a list of the API's.
type page struct {
	Metadata struct {
		ResourceVersion string `json:"resourceVersion"`
		Continue        string `json:"continue"`
	} `json:"metadata"`
	Items []json.RawMessage `json:"items"`
}

// pages reads a list page by page, as it is at one revision, which it returns, and calls take for each
// page: with first those of before are to be forgotten. The error is the API's.
func (c *client) pages(ctx context.Context, path string, query url.Values, take func(first bool, items []json.RawMessage)) (resourceVersion string, err error) {
	query.Set("limit", strconv.Itoa(pageSize))
	for {
		raw, err := c.call(ctx, request{method: http.MethodGet, path: path, query: query})
		if isCode(err, http.StatusGone) && query.Has("continue") {
			query.Del("continue") // the revision of the first page is no more: begin at a later one
			continue
		}
		if err != nil {
			return "", err
		}
		var p page
		if err := json.Unmarshal(raw, &p); err != nil {
			return "", fmt.Errorf("list of %s: %w", path, err)
		}
		take(!query.Has("continue"), p.Items)
		if p.Metadata.Continue == "" {
			return p.Metadata.ResourceVersion, nil
		}
		query.Set("continue", p.Metadata.Continue)
	}
}

// readNode reads a Node.
func (c *client) readNode(ctx context.Context, node string, into any) error {
	raw, err := c.call(ctx, request{method: http.MethodGet, path: nodePath(node)})
	if err != nil {
		return fmt.Errorf("read Node %s: %w", node, c.explain(ctx, err))
	}
	if err := json.Unmarshal(raw, into); err != nil {
		return fmt.Errorf("read Node %s: %w", node, err)
	}
	return nil
}
