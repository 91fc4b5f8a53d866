package vrouter

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/routerd/routerd/dataplane"
)

func form(t *testing.T, s string) dataplane.Form {
	t.Helper()
	if s == "" {
		return dataplane.Form{}
	}
	f, err := dataplane.ParseForm(s)
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
		may     string // published by this host
		lost    string // by probes
		asked   string // by probes, without an answer; empty: nobody probes
		probing bool

		target, form string
		reason       string // a part of it
	}{
		{name: "settled", moved: a, accepts: a, may: a, target: a, form: a},
		{name: "the peer does not take it in yet", moved: b, accepts: b, may: b, target: b, form: b, reason: "node peer does not accept vxlan/1/4789: no module"},
		{name: "the peer does, and nobody was told yet", moved: b, accepts: a + " " + b, may: b, target: a, form: b},
		{name: "everybody was told", moved: b, accepts: a + " " + b, may: a + " " + b, target: a, form: a},
		{name: "this host cannot", moved: b, accepts: a + " " + b, may: a + " " + b, cannot: a, target: b, form: b, reason: "this host cannot send vxlan/1/4789"},
		{name: "probes get lost", moved: b, accepts: a + " " + b, may: a + " " + b, lost: a, target: b, form: b, reason: "get lost"},
		{name: "probes get lost in all", moved: b, accepts: a + " " + b, may: a + " " + b, lost: a + " " + b, target: b, form: b, reason: "get lost"},
		{name: "probes get lost in what is in use", moved: a, others: c, accepts: a + " " + c, may: a + " " + c, lost: a, target: a, form: a},
		{name: "probes get lost, and nothing was before", others: c, accepts: a + " " + c, may: a + " " + c, lost: a, target: a, form: a},
		{name: "not probed yet", moved: b, accepts: a + " " + b, may: a + " " + b, probing: true, target: b, form: b, reason: "waits for the probe"},
		{name: "probed without an answer", moved: b, accepts: a + " " + b, may: a + " " + b, probing: true, asked: a, target: a, form: a},
		{name: "not probed, and nothing to stay on", accepts: a, may: a, probing: true, target: a, form: a},
		{name: "not probed, and what was before is gone", moved: b, others: c, accepts: a + " " + c, may: a + " " + c, probing: true, target: a, form: a},
		{name: "a new peer in another form", moved: a, others: c, accepts: c, may: a + " " + c, target: c, form: c, reason: "does not accept"},
		{name: "a new peer in a form that nobody was told", moved: b, others: c, accepts: c, may: a, target: c, form: a, reason: "does not accept"},
		{name: "nothing in common", moved: b, accepts: "", may: a + " " + b, target: a, form: a, reason: "does not accept"},
		{name: "nothing published at all", accepts: a, target: a},
	} {
		t.Run(tt.name, func(t *testing.T) {
			in := func(list string) func(dataplane.Form) bool {
				return func(f dataplane.Form) bool { return slices.Contains(strings.Fields(list), f.String()) }
			}
			ch := choice{
				peer: "peer", wanted: form(t, a), accepts: in(tt.accepts), may: in(tt.may), probing: tt.probing,
				others: func() (out []dataplane.Form) {
					for s := range strings.FieldsSeq(tt.others) {
						out = append(out, form(t, s))
					}
					return out
				},
				can: func(f dataplane.Form) error {
					if in(tt.cannot)(f) {
						return errors.New("no device")
					}
					return nil
				},
				verdict: func(f dataplane.Form) (dataplane.Delivery, bool) {
					switch {
					case in(tt.lost)(f):
						return dataplane.Delivery{Form: f, Result: dataplane.No, Reason: "swallowed"}, true
					case in(tt.asked)(f):
						return dataplane.Delivery{Form: f}, true
					}
					return dataplane.Delivery{}, false
				},
				refusal: func(dataplane.Form) string { return "no module" },
			}
			if tt.moved != "" {
				ch.moved = []dataplane.Form{form(t, tt.moved)}
			}
			d := ch.decide()
			if d.target != form(t, tt.target) || d.form != form(t, tt.form) || !strings.Contains(d.reason, tt.reason) || (d.reason == "") != (tt.reason == "") {
				t.Errorf("%+v, want target %s, form %s, reason with %q", d, tt.target, tt.form, tt.reason)
			}
		})
	}
}
