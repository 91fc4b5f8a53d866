package scenarios

import (
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/store"
)

var (
	planChanges = flag.Int("plan.changes", 5, "how many random changes TestPlanned makes")      //nolint:gochecknoglobals // flags of the tests
	planSeed    = flag.Uint64("plan.seed", 20261126, "by what TestPlanned chooses its changes") //nolint:gochecknoglobals // likewise
)

// TestPlanned makes random changes, each planned first: what the plan says of a host's routes, devices,
// policies, sessions and annotations is what then becomes of them, and nothing else does. -plan.seed says which changes, -plan.changes how many.
func TestPlanned(t *testing.T) {
	t.Parallel()
	p := newPlanned(t, "planned", topology(3, 1, store.Direct))
	p.changes(t, *planChanges)
	// A host whose daemon is gone is named, and so is the reason.
	if err := p.Kill(await.Context(t), "node3", unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	poll(t, "node3 is gone", func() string {
		text := routerctl(t, p.Lab, "node2", poolManifest("unseen", "10.78.0.0/24", "vxlanMode: Always"), "plan", "-f", "-")
		if !strings.Contains(text, "\n  node3\n    not known: its daemon is absent") {
			return text
		}
		return ""
	})
}

// TestPlannedDual does so where hosts and pods have addresses of both families.
func TestPlannedDual(t *testing.T) {
	t.Parallel()
	top := topology(3, 1, store.Direct)
	top.Underlay, top.Pool6 = lab.UnderlayDual, &lab.Pool{Encapsulation: store.Direct}
	newPlanned(t, "plannedd", top).changes(t, (*planChanges+1)/2)
}

// planned is a lab in which changes are planned.
type planned struct {
	*lab.Lab
	store store.Store
	rand  *rand.Rand
	last  map[string]map[string]string // what each host's kernel had after the last change
	bgp   plannedBGP                   // the sessions after the last change
}

func newPlanned(t *testing.T, suffix string, top lab.Topology) *planned {
	t.Helper()
	p := &planned{Lab: bringUp(t, suffix, top), rand: rand.New(rand.NewPCG(*planSeed, 0)), last: map[string]map[string]string{}}
	p.store = openStore(t, p.Lab)
	poll(t, "the lab is at rest", func() string {
		now, err := p.sessions(t)
		if err != nil {
			return err.Error()
		}
		for s, since := range now.since {
			if since.IsZero() {
				return fmt.Sprintf("the session of %s with %s is not up", s.host, s.peer)
			}
		}
		p.bgp = now
		return p.reached(t)
	})
	p.wait(t)
	return p
}

// changes makes n changes.
func (p *planned) changes(t *testing.T, n int) {
	t.Helper()
	for i := range n {
		what, manifest := p.choose(t)
		p.change(t, fmt.Sprintf("change %d, seed %d: %s", i, *planSeed, what), manifest)
		t.Logf("change %d came as planned: %s", i, what)
	}
	p.nothingLate(t, "at the end")
}

// nothingLate fails the test where something changed after a plan had come true.
func (p *planned) nothingLate(t *testing.T, what string) {
	t.Helper()
	for _, h := range p.Hosts() {
		if late := changed(p.last[h], p.now(t, h)); len(late) > 0 {
			t.Fatalf("%s, %s: something changed late: %q", what, h, late)
		}
	}
	p.noLateSession(t, what)
}

// choose chooses a change.
func (p *planned) choose(t *testing.T) (what, manifest string) {
	pick := func(of ...string) string { return of[p.rand.IntN(len(of))] }
	resource := func(kind, name, spec string) string {
		return fmt.Sprintf("apiVersion: projectcalico.org/v3\nkind: %s\nmetadata: {name: %s}\nspec: {%s}\n", kind, name, spec)
	}
	switch p.rand.IntN(12) {
	case 0, 1, 2:
		name, pool := defaultPool, p.Topology().Pool
		if p6 := p.Topology().Pool6; p6 != nil && p.rand.IntN(2) == 0 {
			name, pool = defaultPool6, *p6
		}
		spec := fmt.Sprintf("cidr: %s, blockSize: %d, ipipMode: Never, vxlanMode: %s, natOutgoing: %s, nodeSelector: %q, disabled: %s", pool.CIDR, pool.BlockSize,
			pick("Never", "Always", "CrossSubnet"), pick("false", "true"), pick("all()", "has(none)"), pick("false", "false", "true"))
		return "pool " + name + ": " + spec, resource("IPPool", name, spec)
	case 3:
		spec := fmt.Sprintf("vxlanVNI: %s, vxlanPort: %s, vxlanMTU: %s", pick("4096", "4097"), pick("4789", "4790"), pick("1400", "1450"))
		return "numbers: " + spec, resource("FelixConfiguration", "default", spec)
	case 4:
		spec := fmt.Sprintf("node: %s, peerIP: %s, asNumber: %s", pick("node1", "node2"), pick("10.9.9.9", "10.9.9.10"), pick("64999", "65000"))
		return "a peer: " + spec, resource("BGPPeer", "planned-"+pick("a", "b"), spec)
	case 5:
		spec := fmt.Sprintf("nodeToNodeMeshEnabled: %s, asNumber: 64512, listenPort: %s", pick("true", "false"), pick("179", "179", "1790"))
		return "BGP: " + spec, resource("BGPConfiguration", "default", spec)
	case 6:
		hold, spec := pick("90s", "60s"), fmt.Sprintf("nodeSelector: %q, peerSelector: %q", pick("all()", "planned == 'yes'"), pick("all()", "planned == 'yes'"))
		spec += "}\nmetadata: {name: planned-nodes, annotations: {" + store.AnnotationHoldTime + ": " + hold + "}"
		return "peers by selector: " + spec, fmt.Sprintf("apiVersion: projectcalico.org/v3\nkind: BGPPeer\nspec: {%s}\n", spec)
	case 7:
		key, value := pick("none", "planned"), pick("yes", "no", "")
		return "a node's label " + key + "=" + value, p.changed(t, func(r map[string]any) { setLabel(r, key, value) }, "get", "nodes", "-o", "json")
	case 8:
		value := pick("yes", "no", "")
		return "a pod's label planned=" + value, p.changed(t, func(r map[string]any) { setLabel(r, "planned", value) }, "get", "workloadendpoints", "-A", "-o", "json")
	case 9:
		return "a set", resource("GlobalNetworkSet", "planned", "nets: ["+pick("10.8.0.1", "10.8.0.2", "10.8.0.1, 10.8.0.2")+"]")
	case 10:
		spec := fmt.Sprintf("cidr: 10.77.0.0/24, blockSize: 28, ipipMode: Never, vxlanMode: %s, natOutgoing: %s, nodeSelector: %q, disabled: %s",
			pick("Never", "Always", "CrossSubnet"), pick("false", "true"), pick("all()", "planned == 'yes'"), pick("false", "false", "true"))
		return "another pool: " + spec, resource("IPPool", "planned", spec)
	}
	spec := fmt.Sprintf("selector: %q, order: %s, types: [Ingress, Egress], egress: [{action: Allow}], ingress: [{action: Allow, source: {selector: %q}}, {action: %s}]",
		pick("all()", "has(nothing)"), pick("10", "20"), pick("all()", "planned == 'yes'"), pick("Allow", "Deny"))
	return "a policy: " + spec, resource("GlobalNetworkPolicy", "planned-"+pick("a", "b"), spec)
}

// changed is one of the resources that routerctl prints, with a change.
func (p *planned) changed(t *testing.T, change func(r map[string]any), get ...string) string {
	t.Helper()
	var list struct{ Items []map[string]any }
	if err := json.Unmarshal([]byte(routerctl(t, p.Lab, "node1", "", get...)), &list); err != nil {
		t.Fatal(err)
	}
	r := list.Items[p.rand.IntN(len(list.Items))]
	change(r)
	if meta, ok := r["metadata"].(map[string]any); ok {
		delete(meta, "resourceVersion")
	}
	out, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// setLabel gives a resource another value of a label; empty: none.
func setLabel(r map[string]any, key, value string) {
	meta, _ := r["metadata"].(map[string]any)
	labels, _ := meta["labels"].(map[string]any)
	if labels == nil {
		labels = map[string]any{}
	}
	if labels[key] = value; value == "" {
		delete(labels, key)
	}
	meta["labels"] = labels
}

// now is what a host's kernel has, and what the host has written into annotations of its Node.
func (p *planned) now(t *testing.T, host string) map[string]string {
	t.Helper()
	out := plannedKernel(t, p.Lab, host)
	o, err := p.store.Get(await.Context(t), store.ResourceKey(store.KindNode, host))
	if err != nil {
		t.Fatal(err)
	}
	n, _ := o.Value.(*store.Node)
	for name, value := range n.Annotations {
		if value != "" && (strings.HasPrefix(name, "routerd.io/") || strings.HasPrefix(name, "projectcalico.org/")) {
			out["annotation "+name] = "annotation " + name + ": " + value
		}
	}
	return out
}

// reached names a block to which a host has no route.
func (p *planned) reached(t *testing.T) string {
	t.Helper()
	blocks, _, err := p.store.List(await.Context(t), store.KindIPAMBlock, "")
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range p.Hosts() {
		have := p.now(t, h)
		for _, b := range blocks {
			if have["route "+b.Key.CIDR().String()] == "" {
				return h + " has no route to " + b.Key.CIDR().String()
			}
		}
	}
	return ""
}

// wait waits until the kernels stand still.
func (p *planned) wait(t *testing.T) {
	t.Helper()
	poll(t, "the kernels stand still", func() string {
		same := true
		for _, h := range p.Hosts() {
			now := p.now(t, h)
			same = same && len(changed(p.last[h], now)) == 0
			p.last[h] = now
		}
		if !same {
			return "the kernels still change"
		}
		return ""
	})
}

// change plans a change, makes it, and compares.
func (p *planned) change(t *testing.T, what, manifest string) {
	t.Helper()
	p.nothingLate(t, "before "+what)
	rules := map[string]map[string]string{}
	for _, h := range p.Hosts() {
		rules[h] = plannedRules(t, p.Lab, h)
	}
	var after plannedBGP
	text, _ := tryRouterctl(t, p.Lab, "node2", manifest, "plan", "--all", "-f", "-") // it ends with 1 where apply wants --force
	routerctl(t, p.Lab, "node2", manifest, "apply", "--force", "-f", "-")
	for _, h := range p.Hosts() {
		if diff := cmp.Diff(blocksInPlan(text, h, "Hosts", "takes block"), blocksInPlan(text, h, "BGP", "announces")); diff != "" {
			t.Errorf("%s: blocks that %s takes and announces (-takes +announces):\n%s\n%s", what, h, diff, text)
		}
	}
	poll(t, what, func() string {
		for _, h := range p.Hosts() {
			now := p.now(t, h)
			if diff := cmp.Diff(inOrder(p.promised(t, text, h)), inOrder(changed(p.last[h], now))); diff != "" {
				return fmt.Sprintf("%s (-planned +happened):\n%s\n%s", h, diff, text)
			}
		}
		for _, h := range p.Hosts() {
			if diff := cmp.Diff(plannedNames(text, h), whatChanged(rules[h], plannedRules(t, p.Lab, h))); diff != "" {
				return fmt.Sprintf("rules of %s (-planned +happened):\n%s\n%s", h, diff, text)
			}
		}
		now, err := p.sessions(t)
		if err != nil {
			return err.Error() // a busy machine may have no answer for a moment
		}
		if diff := cmp.Diff(p.bgp.planned(text), p.bgp.fates(now)); diff != "" {
			return fmt.Sprintf("sessions (-planned +happened):\n%s\n%s", diff, text)
		}
		after = now
		return now.down()
	})
	p.bgp = after
	for _, h := range p.Hosts() {
		p.last[h] = p.now(t, h)
	}
}

// promised is what a plan says of a host's kernel. Addresses that hosts were yet to take are known by now.
func (p *planned) promised(t *testing.T, text, host string) []string {
	t.Helper()
	var pairs, pairs6 []string
	for _, h := range p.Hosts() {
		o, err := p.store.Get(await.Context(t), store.ResourceKey(store.KindNode, h))
		if err != nil {
			t.Fatal(err)
		}
		n, _ := o.Value.(*store.Node)
		addr, _, _ := strings.Cut(n.Spec.IPv4VXLANTunnelAddr, "/")
		addr6, _, _ := strings.Cut(n.Spec.IPv6VXLANTunnelAddr, "/")
		pairs, pairs6 = append(pairs, "(an address that "+h+" takes)", addr), append(pairs6, "(an address that "+h+" takes)", addr6)
	}
	names, names6 := strings.NewReplacer(pairs...), strings.NewReplacer(pairs6...)
	var out []string
	for _, said := range linesOf(text, host) {
		kind, _, _ := strings.Cut(said[2:], " ")
		if slices.Contains([]string{"link", "address", "neighbour", "fdb", "route", "annotation"}, kind) {
			if strings.Contains(said, "takes)/128 ") { // whichever name the device has: two may be there for a while
				said = names6.Replace(said)
			}
			out = append(out, names.Replace(said))
		}
	}
	return out
}

// linesOf returns what a plan says of things on a host that come, go or change.
func linesOf(text, host string) []string {
	var out []string
	_, text, _ = strings.Cut(text, "\nHosts:\n")
	in := ""
	for line := range strings.Lines(text) {
		said, ok := strings.CutPrefix(strings.TrimRight(line, "\n"), "    ")
		if !ok {
			in = strings.TrimSpace(line)
		} else if in == host && strings.ContainsAny(said[:1], "+-~") {
			out = append(out, said)
		}
	}
	return out
}

// blocksInPlan returns what a part of a plan says of a host's blocks behind a word.
func blocksInPlan(text, host, part, word string) []string {
	var out []string
	_, text, _ = strings.Cut(text, "\n"+part+":\n")
	text, _, _ = strings.Cut(text, "\n\n")
	in := ""
	for line := range strings.Lines(text) {
		said, ok := strings.CutPrefix(line, "    "+word+" ")
		if !strings.HasPrefix(line, "   ") {
			in = strings.TrimSpace(line)
		} else if ok && in == host {
			out = append(out, strings.Fields(said)...)
		}
	}
	return inOrder(out)
}
