package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
)

// parts are what the daemon runs, and what is closed when it ends.
type parts struct {
	tasks   []func(context.Context) error
	closers []func() error
	// leave has the host leave before the parts are stopped.
	leave func(context.Context)
}

// runs has f run from when everything is made.
func (p *parts) runs(name string, f func(context.Context) error) {
	p.tasks = append(p.tasks, func(ctx context.Context) error {
		if err := f(ctx); err != nil && !errors.Is(err, context.Canceled) {
			return fmt.Errorf("%s: %w", name, err)
		}
		return nil
	})
}

// closes has f called at the end, before those that were given earlier.
func (p *parts) closes(f func() error) { p.closers = append(p.closers, f) }

// run runs every part. The first that ends with an error stops the others, and so does the end of stop, once the host has left.
func (p *parts) run(stop context.Context) error {
	ctx, cancel := context.WithCancel(context.WithoutCancel(stop))
	defer cancel()
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		select {
		case <-stop.Done():
			p.leave(ctx)
			cancel()
		case <-ctx.Done():
		}
		return nil
	})
	for _, f := range p.tasks {
		g.Go(func() error { return f(ctx) })
	}
	return g.Wait()
}

func (p *parts) close() error {
	var errs []error
	for _, f := range slices.Backward(p.closers) {
		errs = append(errs, f())
	}
	return errors.Join(errs...)
}

// after has a part wait for what comes first.
func after(first <-chan struct{}, run func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error {
		select {
		case <-first:
			return run(ctx)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// endless is a part that has no error of its own.
func endless(run func(context.Context)) func(context.Context) error {
	return func(ctx context.Context) error {
		run(ctx)
		return nil
	}
}

// serve serves until ctx ends, then lets calls in progress finish for a
// moment.
func serve(ctx context.Context, lis net.Listener, opts []grpc.ServerOption, register func(*grpc.Server)) error {
	s := grpc.NewServer(opts...)
	register(s)
	done := make(chan error, 1)
	go func() { done <- s.Serve(lis) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	force := time.AfterFunc(2*time.Second, s.Stop)
	s.GracefulStop()
	force.Stop()
	return <-done
}
