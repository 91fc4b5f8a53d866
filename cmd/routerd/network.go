package main

import (
	"context"
	"errors"

	"github.com/routerd/routerd/control/nodenetwork"
	"github.com/routerd/routerd/store/kube"
)

// kubernetes is what the daemon has of Kubernetes beside the datastore.
type kubernetes struct {
	store  *kube.Store
	names  *kube.Names
	others *nodenetwork.Others
}

// networkObstacle says what keeps pods from being attached here or from reaching others.
func (d *router) networkObstacle(ctx context.Context) error {
	if err := d.attachReady(); err != nil {
		return err
	}
	if r := d.operator.Report(ctx).Ready; !r.OK {
		return errors.New(r.Reason)
	}
	return nil
}
