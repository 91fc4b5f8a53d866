package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/config"
	"github.com/routerd/routerd/control/join"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store/etcd"
)

// newIssuer makes what takes new hosts in, if this host's datastore serves others.
func (d *router) newIssuer(s *etcd.Store) {
	serves := d.etcd.Listen()
	if !serves.IsValid() {
		return
	}
	d.issuer = join.NewIssuer(join.Config{
		Tokens: s.Joins(), Names: s, Authority: d.etcd, DatastorePort: serves.Port(),
		Listen:    netip.AddrPortFrom(serves.Addr(), uint16(d.cfg.Datastore.Embedded.JoinPort)), //nolint:gosec // Validate has checked it
		ValidName: config.ValidNodeName,
		Log:       d.log.With("component", "join"),
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
	if d.issuer == nil {
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
	t, err := d.issuer.Issue(ctx, host, ttl)
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
	case d.etcd == nil:
		return fmt.Sprintf("the datastore is at %v: make the token on the host that keeps it; to an etcd of your own, hosts join by its certificates in their configuration", d.cfg.Datastore.Endpoints)
	}
	return "the datastore of this host serves nobody else: set datastore.embedded.listen to an address of this host and a port, such as 10.1.0.11:2379, and restart routerd"
}

// servedAddress is by which other hosts reach the datastore.
func (d *router) servedAddress() (string, error) {
	if a := d.etcd.Listen().Addr(); !a.IsUnspecified() {
		return a.String(), nil
	}
	found := d.node.Status().Addresses
	for _, f := range []dataplane.Family{dataplane.IPv4, dataplane.IPv6} {
		if a, ok := found[f]; ok {
			return a.Prefix.Addr().String(), nil
		}
	}
	return "", errors.New("the datastore serves all addresses, and this host's own is not known yet: name one by --address")
}
