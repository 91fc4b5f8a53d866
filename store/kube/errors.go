package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/internal/backend"
)

// explain turns the error of a request into one of package store's vocabulary.
// ctx is the call's. A call that its own caller gave up stays a plain
// [context.Canceled].
func (c *client) explain(ctx context.Context, err error) error {
	var st *statusError
	switch {
	case err == nil:
		return nil
	case errors.Is(ctx.Err(), context.Canceled):
		return context.Cause(ctx)
	case errors.As(err, &st):
		return &backend.CallError{Kind: st.kind(), Message: fmt.Sprintf("%s: %s%s", c.base, st.message, c.cure(st)), Cause: err}
	case errors.Is(err, context.DeadlineExceeded):
		return &backend.CallError{Kind: store.ErrUnavailable, Message: c.base + ": no answer in time", Cause: err}
	}
	return &backend.CallError{Kind: store.ErrUnavailable, Message: c.base + ": " + c.diagnose(err), Cause: err}
}

// user says in words what shows who asks.
func (c *client) user() (user string) {
	if c.describe != nil {
		user, _ = c.describe()
	}
	return cmp.Or(user, "the token or certificate")
}

// authority says in words by what the server's certificate is judged.
func (c *client) authority() (authority string) {
	if c.describe != nil {
		_, authority = c.describe()
	}
	return cmp.Or(authority, "that of the system")
}

// manifest is where the daemon's rights are.
func (c *client) manifest() string {
	if c.native {
		return "configs/kubernetes/etcd/account.yaml"
	}
	return "configs/kubernetes/base/account.yaml"
}

// cure says what to do about an answer, where the server does not.
func (c *client) cure(e *statusError) string {
	switch {
	case e.code == http.StatusUnauthorized:
		return ": " + c.user() + " is refused: it may have expired, or be of another cluster. It is read again when it changes"
	case e.code == http.StatusForbidden && e.req.query.Has("fieldSelector") && strings.HasSuffix(e.req.path, "/secrets"):
		return fmt.Sprintf(": no role of this user names it: the rights to list and watch one Secret are given by its name, in resourceNames (docs/guides/kubernetes.md, Passwords of BGP), or take the Secret that %s names", c.manifest())
	case e.code == http.StatusForbidden:
		return fmt.Sprintf(": the role of this user lacks the right to %s it (%s); the daemon's rights are in %s: apply that", e.verb(), e.req.path, c.manifest())
	case e.tooLarge():
		return fmt.Sprintf(": the object has %d bytes, and the API's etcd takes about 1.5 million: make several of it", len(e.req.body))
	case strings.Contains(e.message, unknownField):
		return "; " + definitionsCure
	}
	return ""
}

const (
	// unknownField is in what the server says of a field that the schema lacks.
	unknownField = "unknown field"
	// definitionsCure is what to do then.
	definitionsCure = "the definition in the API lacks it: routerctl kubernetes crds | kubectl apply --server-side -f -, or the definitions of a later version of Calico"
)

// kind says which of package store's errors an answer is.
func (e *statusError) kind() error {
	switch e.code {
	case http.StatusNotFound:
		return store.ErrNotFound
	case http.StatusConflict:
		if e.reason == "AlreadyExists" {
			return store.ErrExists
		}
		return store.ErrConflict
	case http.StatusBadRequest, http.StatusUnprocessableEntity, http.StatusMethodNotAllowed,
		http.StatusRequestEntityTooLarge, http.StatusUnsupportedMediaType:
		return store.ErrInvalid
	}
	if e.tooLarge() {
		return store.ErrInvalid // it will be tomorrow
	}
	return store.ErrUnavailable
}

// Is has an answer match [store.ErrDenied] that says so.
func (e *statusError) Is(target error) bool {
	return target == store.ErrDenied && e.code == http.StatusForbidden
}

// tooLarge reports whether the server's etcd did not take a write for its size, which the
// server calls an error of its own. Both are etcd's words: its server's, and its client's.
func (e *statusError) tooLarge() bool {
	return e.code == http.StatusInternalServerError &&
		(strings.Contains(e.message, "request is too large") || strings.Contains(e.message, "trying to send message larger than max"))
}

// verb is the verb of RBAC that a request needs.
func (e *statusError) verb() string {
	switch e.req.method {
	case http.MethodPost:
		return "create"
	case http.MethodPut:
		return "update"
	case http.MethodGet:
		switch {
		case e.req.query.Has("watch"):
			return "watch"
		case e.req.query.Has("limit"):
			return "list"
		}
		return "get"
	}
	return strings.ToLower(e.req.method)
}

func isCode(err error, code int) bool {
	var s *statusError
	return errors.As(err, &s) && s.code == code
}

// diagnose says what the failure of a connection means.
func (c *client) diagnose(err error) string {
	text := err.Error()
	for _, m := range []struct{ part, meaning string }{
		{"connection refused", "connection refused: is the API server running there?"},
		{"no such host", "the host name cannot be resolved"},
		{"certificate signed by unknown authority", "the server's certificate is signed by an unknown authority: the one that counts is " + c.authority() + ". Set it to the one that signed the certificate"},
		{"certificate has expired or is not yet valid", "the server's certificate has expired or is not yet valid: renew it, or mend this host's clock"},
		{"x509: certificate is valid for", "the server's certificate is for other names: " + text},
		{"i/o timeout", "no answer: the host is down or a firewall drops the packets"},
	} {
		if strings.Contains(text, m.part) {
			return m.meaning
		}
	}
	return text
}
