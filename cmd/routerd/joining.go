package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/config"
	"github.com/routerd/routerd/control/join"
	"github.com/routerd/routerd/control/member"
	"github.com/routerd/routerd/store/embedded"
)

// newIssuer makes what takes new hosts in, and members.
func (m *membership) newIssuer(server *embedded.Server, log *slog.Logger) *join.Issuer {
	serves := server.Listen()
	return join.NewIssuer(join.Config{
		Tokens: m.store.Joins(), Names: m.store, Authority: server, DatastorePort: serves.Port(),
		Members:   memberIssuer{orders: m.store.Orders(), verify: m.verifier(), server: server},
		Listen:    netip.AddrPortFrom(serves.Addr(), uint16(m.cfg.Datastore.Embedded.JoinPort)), //nolint:gosec // Validate has checked it
		ValidName: config.ValidNodeName,
		Log:       log,
	})
}

// defaultTokenTTL is how long a join token is good.
const defaultTokenTTL = time.Hour

// clusterService answers `routerctl cluster`.
type clusterService struct {
	apiv1.UnimplementedClusterServer
	d *router
}

func (s clusterService) JoinToken(ctx context.Context, r *apiv1.JoinTokenRequest) (*apiv1.JoinTokenResponse, error) {
	d := s.d
	issuer := d.member.theIssuer()
	if issuer == nil {
		return nil, status.Error(codes.FailedPrecondition, d.whyNoTokens())
	}
	ttl := defaultTokenTTL
	if r.GetTtl() != nil {
		ttl = r.GetTtl().AsDuration()
	}
	host := r.GetAddress()
	if host == "" {
		var err error
		if host, err = d.servedAddress(); err != nil {
			return nil, status.Error(codes.FailedPrecondition, err.Error())
		}
	}
	t, err := issuer.Issue(ctx, host, ttl)
	if err != nil {
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	text, err := t.Encode()
	if err != nil {
		return nil, err
	}
	return &apiv1.JoinTokenResponse{Token: text, Expires: timestamppb.New(t.Expires), Host: host}, nil
}

// whyNoTokens says why no host can join here, and what to do.
func (d *router) whyNoTokens() string {
	switch {
	case d.network != nil:
		return "the datastore of this host is Kubernetes' API: hosts join with what Kubernetes gives them (docs/guides/kubernetes.md)"
	case d.member.role() != member.Voter:
		return fmt.Sprintf("the datastore is at %v: make the token on the host that keeps it; to an etcd of your own, hosts join by its certificates in their configuration", d.cfg.Datastore.Endpoints)
	}
	return "the datastore of this host serves nobody else: set datastore.embedded.listen to an address of this host and a port, such as 10.1.0.11:2379, and restart routerd"
}

// servedAddress is by which other hosts reach the datastore.
func (d *router) servedAddress() (string, error) {
	server, _ := d.member.current()
	if server == nil {
		return "", errors.New("the datastore of this host does not run")
	}
	if a := server.Listen().Addr(); !a.IsUnspecified() {
		return a.String(), nil
	}
	a, err := d.nodeAddress()
	if err != nil {
		return "", fmt.Errorf("the datastore serves all addresses, and %w: name one by --address", err)
	}
	return a.String(), nil
}
