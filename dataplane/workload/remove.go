package workload

import (
	"context"
	"fmt"
	"slices"
	"strings"
)

// Marked returns the host ends that carry an alias of routerd, by name: what
// can be told to be ours without any other knowledge.
func (w *Wire) Marked(ctx context.Context) ([]string, error) {
	all, err := w.Devices(ctx)
	if err != nil {
		return nil, err
	}
	var out []string
	for name, alias := range all {
		if strings.HasPrefix(alias, aliasPrefix) {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out, nil
}

// RemoveMarked removes a wire by its host end, whoever the workload is. A
// device that is not there, or carries no alias of ours by now, is left alone.
func (w *Wire) RemoveMarked(ctx context.Context, device string) error {
	host, err := w.lookup(device)
	if err != nil {
		return err
	}
	if host == nil || host.Type() != "veth" || !strings.HasPrefix(host.Attrs().Alias, aliasPrefix) {
		return nil
	}
	if err := w.reaper.delete(ctx, host); err != nil {
		return fmt.Errorf("remove the wire of a workload: %w", err)
	}
	return nil
}
