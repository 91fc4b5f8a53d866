package main

import (
	"os"
	"slices"
	"testing"

	"github.com/routerd/routerd/cmd/routerctl/top"
	apiv1 "github.com/routerd/routerd/control/api/v1"
)

// TestNoColour: lines of a terminal stand out, and with NO_COLOR (https://no-color.org) none does.
func TestNoColour(t *testing.T) {
	t.Parallel()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	for value, want := range map[string]bool{"": true, "1": false} {
		getenv := func(name string) string {
			if name == "NO_COLOR" {
				return value
			}
			return ""
		}
		a := topCommands{&app{daemon: &daemon{getenv: getenv}}}
		f := &topFlags{screen: top.Screen{Order: "host", Devices: top.Uplink}}
		lines := a.topLines(&terminal{in: null, out: null}, f, top.Compare(nil, &apiv1.HostsResponse{Node: "node1"}))
		if got := slices.ContainsFunc(lines, func(l styled) bool { return l.sgr != "" }); got != want {
			t.Errorf("NO_COLOR=%s: coloured %t, want %t: %v", value, got, want, lines)
		}
	}
}
