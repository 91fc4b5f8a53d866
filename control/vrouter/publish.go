package vrouter

import (
	"maps"
	"slices"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// publication is what this host should have published. It reports false while
// that cannot be told: before the kernel was seen to take in, or to refuse,
// what the pools ask for, this host would say that it takes in nothing.
func (t *table) publication() (store.NodeForms, bool) {
	self := t.nodes[t.self]
	if self == nil || len(t.hosts) == 0 {
		return store.NodeForms{}, false
	}
	seen := self.forms.NodeForms
	wanted := t.wantedForms()
	if !seen.Published {
		for f := range wanted {
			if st := t.kernel[f]; !st.done && st.err == nil && t.formErrs[f] == nil {
				return store.NodeForms{}, false
			}
		}
	}
	return store.NodeForms{
		Published: true, Accepts: t.publicAccepts(), Uses: t.publicUses(self), Sends: t.publicSends(self), Refuses: t.publicRefuses(self, wanted),
	}, true
}

// publicAccepts lists what is needed and the kernel takes in.
func (t *table) publicAccepts() []string {
	out := set[dataplane.Form]{}
	for f := range t.neededForms() {
		if t.formErrs[f] == nil && t.takesIn(f) && (t.published() || t.kernel[f].done) {
			out[f] = struct{}{}
		}
	}
	return formNames(out)
}

// publicUses lists what is sent or is to be. What was named before stays until
// the kernel has left it.
func (t *table) publicUses(self *node) []string {
	out := set[dataplane.Form]{}
	for f := range t.sending {
		out[f] = struct{}{}
	}
	if !t.confirmed {
		maps.Copy(out, self.forms.uses)
	}
	return formNames(out)
}

// publicSends names the mode of each pool that every peer was moved to.
func (t *table) publicSends(self *node) map[string]string {
	out := map[string]string{}
	for _, p := range t.pools {
		if t.behind[p.name] == 0 && t.confirmed {
			out[p.name] = t.modeOf(p).String()
		} else if m, ok := self.forms.sends[p.name]; ok {
			out[p.name] = m.String()
		}
	}
	return out
}

// maxReason bounds the length of a published reason.
const maxReason = 400

// publicRefuses says why the kernel does not take in what is wanted, or could
// not if it were.
func (t *table) publicRefuses(self *node, wanted set[dataplane.Form]) map[string]string {
	out := map[string]string{}
	if t.unsupported == nil {
		maps.Copy(out, self.forms.Refuses)
	}
	note := func(f dataplane.Form, err error) {
		s := err.Error()
		if len(s) > maxReason {
			s = s[:maxReason] + "…"
		}
		out[f.String()] = s
	}
	for f, err := range t.unsupported {
		if f.Driver == dataplane.DriverVXLAN {
			f.VNI, f.Port = t.settings.vni, t.settings.port
		}
		if t.hasHost(f.Outer) {
			note(f, err)
		}
	}
	for f := range wanted {
		if err := t.formErrs[f]; err != nil {
			note(f, err)
		} else if err := t.kernel[f].err; err != nil {
			note(f, err)
		} else if t.kernel[f].done {
			delete(out, f.String())
		}
	}
	return out
}

func formNames(s set[dataplane.Form]) []string {
	var out []string
	for _, f := range sortedForms(s) {
		out = append(out, f.String())
	}
	slices.Sort(out)
	return out
}

// offer is what is to be published and is not: nil where there is nothing, and
// while an earlier one is under way.
func (t *table) offer() *store.NodeForms {
	if t.inflight != nil {
		return nil
	}
	f, ok := t.publication()
	if !ok || sameForms(f, t.nodes[t.self].forms.NodeForms) {
		return nil
	}
	in := newNodeForms(f)
	t.inflight, t.inflightAt = &in, 0
	t.formsDirty = true
	t.rechooseAll()
	return &f
}

// written notes at which revision what was offered is in the store.
func (t *table) written(rev store.Revision) {
	if t.inflight == nil {
		return
	}
	t.inflightAt = rev
	if t.settleInflight() {
		t.rechooseAll()
		t.formsDirty = true
	}
}

// settleInflight forgets what was under way once the watch has shown it. From
// then on what the others wrote before it is known here too.
func (t *table) settleInflight() bool {
	self := t.nodes[t.self]
	if t.inflight == nil || t.inflightAt == 0 || self == nil || self.revision < t.inflightAt {
		return false
	}
	t.inflight, t.inflightAt = nil, 0
	return true
}
