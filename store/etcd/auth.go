package etcd

import (
	"context"
	"errors"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
)

// session attaches etcd's token to calls, when there is a user, and makes every
// call fail fast rather than wait for a connection that cannot be had. The
// etcd client could do the first by itself, but then it wants an answer from
// etcd before there is a client at all, and a daemon must be able to start
// while etcd is away.
type session struct {
	user, password string
	lock           chan struct{} // of size one; a mutex whose waiting obeys a context
	token          string
}

func newSession(user, password string) *session {
	return &session{user: user, password: password, lock: make(chan struct{}, 1)}
}

// fetch returns the token, or a new one when the one at hand is refused, which
// names it. It is empty when there is no user or etcd's authentication is off.
func (s *session) fetch(ctx context.Context, cc *grpc.ClientConn, refused *string) (string, error) {
	if s.user == "" {
		return "", nil
	}
	select {
	case s.lock <- struct{}{}:
		defer func() { <-s.lock }()
	case <-ctx.Done():
		return "", ctx.Err()
	}
	if refused == nil && s.token != "" || refused != nil && s.token != *refused {
		return s.token, nil
	}
	resp, err := etcdserverpb.NewAuthClient(cc).Authenticate(ctx, &etcdserverpb.AuthenticateRequest{Name: s.user, Password: s.password})
	switch {
	case errors.Is(rpctypes.Error(err), rpctypes.ErrAuthNotEnabled):
		s.token = ""
	case err != nil:
		return "", err
	default:
		s.token = resp.Token
	}
	return s.token, nil
}

func (s *session) unary(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	// The etcd client asks for the opposite; the last one counts.
	opts = append(opts, grpc.WaitForReady(false))
	if s.user == "" || method == etcdserverpb.Auth_Authenticate_FullMethodName {
		return invoke(ctx, method, req, reply, cc, opts...)
	}
	token, err := s.fetch(ctx, cc, nil)
	if err != nil {
		return err
	}
	err = invoke(withToken(ctx, token), method, req, reply, cc, opts...)
	if !tokenRefused(err) {
		return err
	}
	if token, err = s.fetch(ctx, cc, &token); err != nil {
		return err
	}
	return invoke(withToken(ctx, token), method, req, reply, cc, opts...)
}

func (s *session) stream(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	token, err := s.fetch(ctx, cc, nil)
	if err != nil {
		return nil, err
	}
	return open(withToken(ctx, token), desc, cc, method, append(opts, grpc.WaitForReady(false))...)
}

func withToken(ctx context.Context, token string) context.Context {
	if token == "" {
		return ctx
	}
	return metadata.AppendToOutgoingContext(ctx, rpctypes.TokenFieldNameGRPC, token)
}

// tokenRefused reports an error that a new token mends: etcd forgets tokens
// when it restarts and when its users change.
func tokenRefused(err error) bool {
	if err == nil {
		return false
	}
	err = rpctypes.Error(err)
	return errors.Is(err, rpctypes.ErrInvalidAuthToken) || errors.Is(err, rpctypes.ErrAuthOldRevision) || errors.Is(err, rpctypes.ErrUserEmpty)
}
