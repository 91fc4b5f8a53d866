package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/routerd/routerd/store"
)

// tieredKinds are the kinds that stand in a tier.
func tieredKinds() []store.Kind {
	return []store.Kind{
		store.KindNetworkPolicy, store.KindGlobalNetworkPolicy, store.KindStagedNetworkPolicy, store.KindStagedGlobalNetworkPolicy,
	}
}

// tierOf returns the tier that a policy names.
func tierOf(v any) string {
	v = store.Clone(v)
	store.SetDefaults(v)
	return policyCells(v)["TIER"]
}

// empty refuses a tier that policies are in: they would deny all that they
// select, for a tier that does not exist ends with Deny. Those that are to be
// deleted too do not count.
func (d *deletion) empty(ctx context.Context, o store.Object, targets []target) error {
	if o.Key.Kind != store.KindTier {
		return nil
	}
	var in []string
	for _, kind := range tieredKinds() {
		list, _, err := d.store.List(ctx, kind, "")
		if err != nil && !errors.Is(err, store.ErrDecode) {
			return fmt.Errorf("delete %s: %w", o.Key, err)
		}
		for _, p := range list {
			going := slices.ContainsFunc(targets, func(t target) bool { return t.key == p.Key })
			if p.Value != nil && !going && tierOf(p.Value) == o.Key.Name {
				in = append(in, p.Key.String())
			}
		}
	}
	if len(in) == 0 {
		return nil
	}
	const most = 5
	names := strings.Join(in[:min(len(in), most)], ", ")
	if n := len(in) - most; n > 0 {
		names += fmt.Sprintf(" and %d more", n)
	}
	return fmt.Errorf("delete %s: it contains policies: %s; delete them first, or give them another spec.tier", o.Key, names)
}
