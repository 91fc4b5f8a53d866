package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/manifest"
)

// newPools returns the documents of pools that the store does not hold yet.
func newPools(ctx context.Context, s store.Store, docs []manifest.Document) ([]manifest.Document, error) {
	var out []manifest.Document
	for _, d := range docs {
		if d.Object.Key.Kind != store.KindIPPool {
			continue
		}
		o, err := s.Get(ctx, d.Object.Key)
		switch {
		case errors.Is(err, store.ErrNotFound):
			out = append(out, d)
		case err != nil && o.Revision == 0:
			return nil, err
		}
	}
	return out, nil
}

// checkHost asks the daemon whether new pools overlap addresses or routes of
// its host. Where etcd is used directly there is no daemon to ask; each host
// then says so itself, in its Node's conditions.
func (a *app) checkHost(ctx context.Context, s store.Store, docs []manifest.Document) error {
	direct, err := a.direct()
	if err != nil || direct.isSet() {
		return err
	}
	pools, err := newPools(ctx, s, docs)
	if err != nil || len(pools) == 0 {
		return err
	}
	var r *apiv1.OverlapsResponse
	err = a.askOperator(ctx, func(op apiv1.OperatorClient) error {
		req := &apiv1.OverlapsRequest{}
		for _, d := range pools {
			req.Cidrs = append(req.Cidrs, cidrOf(d))
		}
		var err error
		r, err = op.Overlaps(ctx, req)
		if status.Code(err) == codes.Unimplemented {
			fmt.Fprintln(a.stderr, "note: this host's routes are not checked: its routerd is older than routerctl")
			return nil
		}
		return err
	})
	if err != nil {
		return err
	}
	var errs []error
	for _, d := range pools {
		for _, o := range r.GetOverlaps() {
			if o.GetCidr() == cidrOf(d) {
				errs = append(errs, refuse(d, "spec.cidr: %q: IPPool(%s) overlaps %s of this host, %s; choose a range that does not overlap it, "+
					"or give --ignore-host-routes if it is meant to lead to the workloads", cidrOf(d), d.Object.Key.Name, o.GetWith(), r.GetNode()))
			}
		}
	}
	return errors.Join(errs...)
}

// cidrOf is the CIDR of a pool's document.
func cidrOf(d manifest.Document) string {
	if p, ok := d.Object.Value.(*v3.IPPool); ok {
		if cidr, err := netip.ParsePrefix(p.Spec.CIDR); err == nil {
			return cidr.Masked().String()
		}
	}
	return ""
}
