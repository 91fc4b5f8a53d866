package main

import (
	"context"
	"fmt"
	"iter"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/manifest"
)

// sessionsDependOn reports whether BGP sessions depend on a kind.
func sessionsDependOn(k store.Kind) bool {
	switch k {
	case store.KindNode, store.KindBGPPeer, store.KindBGPConfiguration, store.KindBGPFilter:
		return true
	}
	return false
}

// checkWrites refuses to write what would cut somebody off.
func (a *app) checkWrites(ctx context.Context, docs []manifest.Document) error {
	var changes []*apiv1.BGPChange
	for _, d := range docs {
		raw, err := store.Encode(d.Object.Key, d.Object.Value, d.Object.Raw)
		if err != nil {
			return refuse(d, "%v", err)
		}
		changes = append(changes, &apiv1.BGPChange{Key: d.Object.Key.Path(), Value: raw})
	}
	return a.checkChanges(ctx, changes)
}

// checkDeletion is checkWrites for what is to be deleted.
func (a *app) checkDeletion(ctx context.Context, targets []target) error {
	var changes []*apiv1.BGPChange
	for _, t := range targets {
		changes = append(changes, &apiv1.BGPChange{Key: t.key.Path()})
	}
	return a.checkChanges(ctx, changes)
}

// checkChanges refuses what would leave a node without any configured BGP session, and what
// would end the operator's own SSH session.
func (a *app) checkChanges(ctx context.Context, changes []*apiv1.BGPChange) error {
	var sessions []*apiv1.BGPChange
	for _, c := range changes {
		if k, ok := store.ParsePath(c.GetKey()); ok && sessionsDependOn(k.Kind) {
			sessions = append(sessions, c)
		}
	}
	if err := a.askIsolated(ctx, sessions); err != nil {
		return err
	}
	return a.checkSession(ctx, changes)
}

// askIsolated asks the daemon. Where etcd is used directly, and while the daemon
// cannot say, nothing is refused.
func (a *app) askIsolated(ctx context.Context, changes []*apiv1.BGPChange) error {
	if len(changes) == 0 {
		return nil
	}
	direct, err := a.direct()
	if err != nil || direct.isSet() {
		return err
	}
	var r *apiv1.BGPIsolatedResponse
	err = ask(ctx, a.daemon, apiv1.NewBGPClient, func(b apiv1.BGPClient) error {
		var err error
		r, err = sendChanges(ctx, b, changes)
		return err
	})
	if err != nil && status.Code(err) != codes.InvalidArgument {
		fmt.Fprintf(a.stderr, "note: BGP sessions are not checked: %v\n", err)
		return nil
	}
	if err != nil || len(r.GetNodes()) == 0 {
		return err
	}
	return fmt.Errorf("%s would lose their last configured BGP session: nothing was written; configure others first, or in the same command, or use --force",
		strings.Join(r.GetNodes(), ", "))
}

// changesSize is how many bytes of resources one message carries: well below
// gRPC's limit of 4 MiB for a message, for a resource of etcd's limit, 1.5 MiB.
const changesSize = 1 << 20

// sendChanges asks in as many parts as it takes.
func sendChanges(ctx context.Context, b apiv1.BGPClient, changes []*apiv1.BGPChange) (*apiv1.BGPIsolatedResponse, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := b.Isolated(ctx)
	if err != nil {
		return nil, err
	}
	for part := range parts(changes) {
		if err := stream.Send(&apiv1.BGPIsolatedRequest{Changes: part}); err != nil {
			break // the answer says why
		}
	}
	return stream.CloseAndRecv()
}

// parts yields changes in as many parts as messages take.
func parts(changes []*apiv1.BGPChange) iter.Seq[[]*apiv1.BGPChange] {
	return func(yield func([]*apiv1.BGPChange) bool) {
		for len(changes) > 0 {
			n, size := 0, 0
			for n < len(changes) && (n == 0 || size < changesSize) {
				size += len(changes[n].GetKey()) + len(changes[n].GetValue())
				n++
			}
			if !yield(changes[:n]) {
				return
			}
			changes = changes[n:]
		}
	}
}
