package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/control/journal"
	"github.com/routerd/routerd/store"
)

// reservePatience bounds the search for the datastore: cleanup goes on without
// it.
const reservePatience = 5 * time.Second

// reserve lists the addresses that this host holds ready in the datastore. Where
// that cannot be reached they stay, and it is said how they go.
func (cl *cleanup) reserve(ctx context.Context) ([]thing, error) {
	if cl.cfg.Datastore.Own() {
		return nil, nil // it is this host's own, and stopped: nobody else is short of them
	}
	node, err := cl.cfg.Name()
	if err != nil {
		return nil, err
	}
	look, cancel := context.WithTimeout(ctx, reservePatience)
	defer cancel()
	n := 0
	err = withDatastore(look, cl.cfg, func(ctx context.Context, s store.Store) (err error) {
		n, err = ipam.Held(ctx, s, node)
		return err
	})
	if err != nil {
		fmt.Fprintf(cl.out, "left alone: the addresses that node %s holds ready, for the datastore cannot be reached (%v); run this again when it can, or give them back with routerctl delete node %s\n", node, err, node)
		return nil, nil
	}
	if n == 0 {
		return nil, nil
	}
	return []thing{{fmt.Sprintf("reserve of %d addresses in the datastore", n), func(ctx context.Context) error {
		if err := cl.forgetReserve(); err != nil {
			return err
		}
		return withDatastore(ctx, cl.cfg, func(ctx context.Context, s store.Store) error {
			_, err := ipam.GiveBack(ctx, s, node)
			return err
		})
	}}}, nil
}

// forgetReserve has this host forget what it holds ready.
func (cl *cleanup) forgetReserve() error {
	path := filepath.Join(cl.cfg.WorkloadDir(), "journal")
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	j, err := journal.Open(path, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	return errors.Join(ipam.ForgetReserve(j), j.Close())
}
