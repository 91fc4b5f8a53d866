package operator

import (
	"errors"
	"fmt"
	"testing"

	"github.com/routerd/routerd/control/node"
	"github.com/routerd/routerd/store"
)

func TestRegistered(t *testing.T) {
	t.Parallel()
	away := fmt.Errorf("write IPAMBlock: %w: connection refused", store.ErrUnavailable)
	taken := errors.New("another host has the address")
	for name, tt := range map[string]struct {
		status node.Status
		want   string
	}{
		"at the start":                       {node.Status{}, "waiting for the first answer of the datastore"},
		"the datastore was never there":      {node.Status{Err: away}, away.Error()},
		"without its tunnel addresses":       {node.Status{Registered: true}, "waiting for the addresses of its tunnel devices"},
		"away before they were assigned":     {node.Status{Registered: true, Err: away}, away.Error()},
		"complete":                           {node.Status{Registered: true, Complete: true}, ""},
		"the datastore went away afterwards": {node.Status{Registered: true, Complete: true, Err: away}, ""},
		"something else went wrong":          {node.Status{Registered: true, Complete: true, Err: taken}, taken.Error()},
	} {
		got := ""
		if err := (view{node: tt.status}).registered(); err != nil {
			got = err.Error()
		}
		if got != tt.want {
			t.Errorf("%s: %q, want %q", name, got, tt.want)
		}
	}
}
