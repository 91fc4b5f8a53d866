package etcd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/internal/backend"
)

// explain turns the error of a call into one of package store's vocabulary. ctx
// is the call's. A call that its own caller gave up is not the store's fault
// and stays a plain [context.Canceled].
func (s *Store) explain(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	err = rpctypes.Error(err)
	if errors.Is(ctx.Err(), context.Canceled) {
		return context.Cause(ctx)
	}
	if errors.Is(err, rpctypes.ErrRequestTooLarge) || errors.Is(err, rpctypes.ErrTooManyOps) {
		return &backend.CallError{Kind: store.ErrInvalid, Message: fmt.Sprintf("%s: the transaction is larger than etcd allows: %v", s.where, err), Cause: err}
	}
	if late := cmp.Or(ctx.Err(), err); errors.Is(late, context.DeadlineExceeded) {
		return &backend.CallError{Kind: store.ErrUnavailable, Message: s.where + ": no answer in time" + s.hint(err), Cause: late}
	}
	cause := err
	if denied(err) {
		cause = errors.Join(store.ErrDenied, err)
	}
	return &backend.CallError{Kind: store.ErrUnavailable, Message: s.place(err) + ": " + s.sentence(err), Cause: cause}
}

// denied reports whether an error of a call says that the user lacks the right to make it.
func denied(err error) bool { return errors.Is(rpctypes.Error(err), rpctypes.ErrPermissionDenied) }

// place says where it went wrong. Behind routerd's own socket the etcd that it
// could not reach is the place, not the socket.
func (s *Store) place(err error) string {
	if !strings.HasPrefix(s.where, "unix:") {
		return s.where
	}
	_, rest, dialled := strings.Cut(err.Error(), "dial tcp ")
	addr, _, ok := strings.Cut(rest, ": ")
	if !dialled || !ok {
		return s.where
	}
	return addr
}

// hint is what a deadline's error still tells of the connection.
func (s *Store) hint(err error) string {
	if d := diagnose(err.Error(), s.secure); d != "" {
		return " (" + d + ")"
	}
	return ""
}

// sentence says what an error means and what to do about it.
func (s *Store) sentence(err error) string {
	switch {
	case errors.Is(err, rpctypes.ErrAuthFailed):
		return "authentication failed: check the user name and the password"
	case errors.Is(err, rpctypes.ErrUserEmpty):
		return "authentication is required: set a user name and a password"
	case denied(err):
		return "permission denied: the user needs a role that reads and writes " + store.RootPath + " and /routerd/, or the less of configs/etcd/roles.sh"
	case errors.Is(err, rpctypes.ErrNoSpace):
		return "the database is full: compact and defragment it, then disarm the NOSPACE alarm"
	case errors.Is(err, rpctypes.ErrNoLeader):
		return "the cluster has no leader: more than half of its members must be up"
	}
	if d := diagnose(err.Error(), s.secure); d != "" {
		return d
	}
	// The plain description, without the ornaments of gRPC.
	if st, ok := status.FromError(err); ok && st.Code() != codes.Unknown {
		return st.Message()
	}
	return err.Error()
}

// diagnose finds the cause of a failed connection in the text of an error:
// gRPC hands it up in no other form. secure says that TLS was tried. It returns
// "" when it finds none.
func diagnose(text string, secure bool) string {
	// In TLS 1.3 the server refuses a client's certificate after the client is
	// done with the handshake; the client may then find the connection closed
	// before it reads why.
	closed := "the server closed the connection: it may want https://, or it stopped just now"
	if secure {
		closed = "the server closed the connection: it stopped just now, or it may refuse the client's certificate: then set the certificate and key files to a pair that its authority signed"
	}
	for _, c := range []struct{ part, meaning string }{
		{"connection refused", "connection refused: is etcd running there?"},
		{"connect: no such file or directory", "there is no such socket: is the datastore running?"},
		{"connect: permission denied", "permission denied: only root may open the socket"},
		{"no such host", "the host name cannot be resolved"},
		{"no route to host", "no route to host"},
		{"network is unreachable", "the network is unreachable"},
		{"certificate signed by unknown authority", "the server's certificate is signed by an unknown authority: set the CA file to the authority that signed it"},
		{"certificate has expired or is not yet valid", "the server's certificate has expired or is not yet valid: renew it, or mend this host's clock"},
		{"x509: certificate is valid for", "the server's certificate is for other names: " + after(text, "x509: ")},
		{"x509: cannot validate certificate for", "the server's certificate is for other names: " + after(text, "x509: ")},
		{"tls: certificate required", "the server wants a client certificate: set the certificate and key files"},
		{"tls: bad certificate", "the server refuses the client's certificate: set the certificate and key files to a pair that its authority signed"},
		{"tls: unknown certificate authority", "the server refuses the client's certificate: set the certificate and key files to a pair that its authority signed"},
		{"remote error: tls: expired certificate", "the client's certificate has expired: renew it"},
		{"first record does not look like a TLS handshake", "the server does not speak TLS: use http://"},
		{"i/o timeout", "no answer: the host is down or a firewall drops the packets"},
		{"error reading server preface", closed},
		{"broken pipe", closed},
		{"connection reset by peer", closed},
	} {
		if strings.Contains(text, c.part) {
			return c.meaning
		}
	}
	return ""
}

// after returns the rest of text from mark on, without trailing quotes.
func after(text, mark string) string {
	_, rest, _ := strings.Cut(text, mark)
	return strings.TrimRight(rest, "\"")
}
