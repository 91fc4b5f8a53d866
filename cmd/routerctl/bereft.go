package main

import (
	"context"
	"fmt"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/manifest"
)

// sessionsDependOn reports whether BGP sessions depend on a kind.
func sessionsDependOn(k store.Kind) bool {
	return k == store.KindNode || k == store.KindBGPPeer || k == store.KindBGPConfiguration
}

// checkSessions refuses to write what would leave a node without any
// configured BGP session.
func (a *app) checkSessions(ctx context.Context, docs []manifest.Document) error {
	req := &apiv1.BGPBereftRequest{}
	for _, d := range docs {
		if !sessionsDependOn(d.Object.Key.Kind) {
			continue
		}
		raw, err := store.Encode(d.Object.Key, d.Object.Value, d.Object.Raw)
		if err != nil {
			return refuse(d, "%v", err)
		}
		req.Changes = append(req.Changes, &apiv1.BGPChange{Key: d.Object.Key.Path(), Value: raw})
	}
	return a.askBereft(ctx, req)
}

// checkDeletion is checkSessions for what is to be deleted.
func (a *app) checkDeletion(ctx context.Context, targets []target) error {
	req := &apiv1.BGPBereftRequest{}
	for _, t := range targets {
		if sessionsDependOn(t.key.Kind) {
			req.Changes = append(req.Changes, &apiv1.BGPChange{Key: t.key.Path()})
		}
	}
	return a.askBereft(ctx, req)
}

// askBereft asks the daemon. Where etcd is used directly, and while the daemon
// cannot tell, nothing is refused.
func (a *app) askBereft(ctx context.Context, req *apiv1.BGPBereftRequest) error {
	if len(req.GetChanges()) == 0 {
		return nil
	}
	direct, err := a.directStore()
	if err != nil || direct != nil {
		return err
	}
	var r *apiv1.BGPBereftResponse
	err = a.askBGP(ctx, func(b apiv1.BGPClient) error {
		var err error
		r, err = b.Bereft(ctx, req)
		return err
	})
	if err != nil && status.Code(err) != codes.InvalidArgument {
		fmt.Fprintf(a.stderr, "note: what becomes of the BGP sessions is not looked at: %v\n", err)
		return nil
	}
	if err != nil || len(r.GetNodes()) == 0 {
		return err
	}
	return fmt.Errorf("%s would have no configured BGP session any more: nothing was written; give them sessions first, or in the same command, or use --force",
		strings.Join(r.GetNodes(), ", "))
}
