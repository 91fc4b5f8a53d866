package main

import (
	"errors"
	"strings"
	"testing"

	apiv1 "github.com/routerd/routerd/control/api/v1"
)

// TestForeignRouteIsReported: a foreign route into a block, and one to the
// block that drops, shows in the status, the log and the metrics, and stays.
func TestForeignRouteIsReported(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	r := h.start()
	r.ready()
	r.program()
	good := func(n *apiv1.NodeResponse) error {
		for _, c := range n.GetHealth().GetConditions() {
			if c.GetName() == "ForeignRoutes" && !c.GetOk() {
				return errors.New(c.GetReason())
			}
		}
		return nil
	}
	for _, tt := range []struct{ add, route, prefix string }{
		{"add", "192.168.200.16/28 via 10.1.0.99 dev eth0 proto 4 metric 7", "192.168.200.16/28"},
		{"prepend", "blackhole 192.168.200.0/26 proto 12", "192.168.200.0/26"},
	} {
		r.when("no foreign route", good)
		h.ip("route " + tt.add + " " + tt.route)
		r.when("the foreign route in the status", func(n *apiv1.NodeResponse) error {
			err := good(n)
			if err == nil {
				return errors.New("all is well")
			}
			if !strings.Contains(err.Error(), tt.route+" (before route 192.168.200.0/26)") {
				return err
			}
			return nil
		})
		r.tells(1, "a route of another program takes packets from ours", tt.route)
		h.ip("route del " + tt.route)
		r.when("it is gone", good)
		r.tells(1, "takes no packets from ours any more", tt.route)
	}
}
