package main

import "context"

// questions passes on what hosts ask each other, as *[etcd.Store] does.
type questions interface {
	Ask(ctx context.Context, node string, question []byte) ([]byte, error)
	Questions(ctx context.Context, node string, answer func(context.Context, []byte) []byte)
}

// ask is how this host asks another; nil: it cannot.
func (d *router) ask() func(context.Context, string, []byte) ([]byte, error) {
	if d.asks == nil {
		return nil
	}
	return d.asks.Ask
}

// answer answers what other hosts ask, while this host holds its name.
func (d *router) answer(ctx context.Context) error {
	select {
	case <-d.presence.Held():
		d.asks.Questions(ctx, d.name, d.operator.Answer)
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
