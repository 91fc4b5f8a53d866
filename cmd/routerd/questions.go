package main

import (
	"context"

	"github.com/routerd/routerd/control/operator"
)

// questions passes on what hosts ask each other, as *[etcd.Store] does.
type questions interface {
	Ask(ctx context.Context, node string, question []byte) ([]byte, error)
	AskAll(ctx context.Context, nodes []string, question []byte, yield func(node string, answer []byte)) error
	Questions(ctx context.Context, node string, answer func(context.Context, []byte) []byte)
}

// asking has the operator's answers ask other hosts and see which are there, if the datastore can.
func (d *router) asking(c *operator.Config) {
	if d.asks != nil {
		c.Ask, c.AskAll = d.asks.Ask, d.asks.AskAll
	}
	if d.hosts != nil {
		c.Presences = d.hosts
	}
}
