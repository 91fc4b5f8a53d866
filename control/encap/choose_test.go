package encap

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/routerd/routerd/dataplane"
)

func encap(t *testing.T, s string) dataplane.Encap {
	t.Helper()
	if s == "" {
		return dataplane.Encap{}
	}
	f, err := dataplane.ParseEncap(s)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// TestDecide is the sender's rule.
func TestDecide(t *testing.T) {
	const a, b, c = "vxlan/1/4789", "ipip", "direct"
	for _, tt := range []struct {
		name    string
		moved   string
		others  string
		accepts string // of the peer
		cannot  string // of this host
		mayUse  string // published by this host
		lost    string // by probes
		asked   string // by probes, without an answer; empty: nobody probes
		probing bool

		target, encap string
		reason        string // a part of it
	}{
		{name: "settled", moved: a, accepts: a, mayUse: a, target: a, encap: a},
		{name: "the peer does not take it in yet", moved: b, accepts: b, mayUse: b, target: b, encap: b, reason: "node peer does not accept vxlan/1/4789: no module"},
		{name: "the peer does, and nobody was told yet", moved: b, accepts: a + " " + b, mayUse: b, target: a, encap: b},
		{name: "everybody was told", moved: b, accepts: a + " " + b, mayUse: a + " " + b, target: a, encap: a},
		{name: "this host cannot", moved: b, accepts: a + " " + b, mayUse: a + " " + b, cannot: a, target: b, encap: b, reason: "this host cannot send vxlan/1/4789"},
		{name: "probes get lost", moved: b, accepts: a + " " + b, mayUse: a + " " + b, lost: a, target: b, encap: b, reason: "get lost"},
		{name: "probes get lost in all", moved: b, accepts: a + " " + b, mayUse: a + " " + b, lost: a + " " + b, target: b, encap: b, reason: "get lost"},
		{name: "probes get lost in what is in use", moved: a, others: c, accepts: a + " " + c, mayUse: a + " " + c, lost: a, target: a, encap: a},
		{name: "probes get lost, and nothing was before", others: c, accepts: a + " " + c, mayUse: a + " " + c, lost: a, target: a, encap: a},
		{name: "not probed yet", moved: b, accepts: a + " " + b, mayUse: a + " " + b, probing: true, target: b, encap: b, reason: "waits for the probe"},
		{name: "probed without an answer", moved: b, accepts: a + " " + b, mayUse: a + " " + b, probing: true, asked: a, target: a, encap: a},
		{name: "not probed, and nothing to stay on", accepts: a, mayUse: a, probing: true, target: a, encap: a},
		{name: "not probed, and what was before is gone", moved: b, others: c, accepts: a + " " + c, mayUse: a + " " + c, probing: true, target: a, encap: a},
		{name: "a new peer in another form", moved: a, others: c, accepts: c, mayUse: a + " " + c, target: c, encap: c, reason: "does not accept"},
		{name: "a new peer in a form that nobody was told", moved: b, others: c, accepts: c, mayUse: a, target: c, encap: a, reason: "does not accept"},
		{name: "nothing in common", moved: b, accepts: "", mayUse: a + " " + b, target: a, encap: b, reason: "does not accept"},
		{name: "nothing in common, and what was before cannot be sent", moved: b, accepts: "", mayUse: a + " " + b, cannot: b, target: a, encap: a, reason: "does not accept"},
		{name: "nothing published at all", accepts: a, target: a},
	} {
		t.Run(tt.name, func(t *testing.T) {
			in := func(list string) func(dataplane.Encap) bool {
				return func(f dataplane.Encap) bool { return slices.Contains(strings.Fields(list), f.String()) }
			}
			ch := choice{
				peer: "peer", wanted: encap(t, a), accepts: in(tt.accepts), mayUse: in(tt.mayUse), probing: tt.probing,
				others: func() (out []dataplane.Encap) {
					for s := range strings.FieldsSeq(tt.others) {
						out = append(out, encap(t, s))
					}
					return out
				},
				can: func(f dataplane.Encap) error {
					if in(tt.cannot)(f) {
						return errors.New("no device")
					}
					return nil
				},
				verdict: func(f dataplane.Encap) (dataplane.Delivery, bool) {
					switch {
					case in(tt.lost)(f):
						return dataplane.Delivery{Encap: f, Result: dataplane.No, Reason: "swallowed"}, true
					case in(tt.asked)(f):
						return dataplane.Delivery{Encap: f}, true
					}
					return dataplane.Delivery{}, false
				},
				refusal: func(dataplane.Encap) string { return "no module" },
			}
			if tt.moved != "" {
				ch.moved = []dataplane.Encap{encap(t, tt.moved)}
			}
			d := ch.decide()
			if d.Target != encap(t, tt.target) || d.Encap != encap(t, tt.encap) || !strings.Contains(d.Reason, tt.reason) || (d.Reason == "") != (tt.reason == "") {
				t.Errorf("%+v, want target %s, form %s, reason with %q", d, tt.target, tt.encap, tt.reason)
			}
		})
	}
}
