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
// policies and sessions is what then becomes of them, and nothing else does. -plan.seed says which changes, -plan.changes how many.
func TestPlanned(t *testing.T) {
	t.Parallel()
	p := newPlanned(t, "planned", topology(3, 1, store.Direct))
	p.changes(t, *planChanges)
	// A host whose daemon is gone is named, and so is the reason.
	if err := p.Kill(await.Context(t), "node3", unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	poll(t, "node3 is gone", func() string {
		text := routerctl(t, p.Lab, "node2", poolManifest("planned", "10.77.0.0/24", "vxlanMode: Always"), "plan", "-f", "-")
		if !strings.Contains(text, "\n  node3\n    not known: its daemon is not there") {
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
}

func newPlanned(t *testing.T, suffix string, top lab.Topology) *planned {
	t.Helper()
	p := &planned{Lab: bringUp(t, suffix, top), rand: rand.New(rand.NewPCG(*planSeed, 0)), last: map[string]map[string]string{}}
	p.store = openStore(t, p.Lab)
	p.wait(t, "the lab is at rest")
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
}

// choose chooses a change.
func (p *planned) choose(t *testing.T) (what, manifest string) {
	pick := func(of ...string) string { return of[p.rand.IntN(len(of))] }
	resource := func(kind, name, spec string) string {
		return fmt.Sprintf("apiVersion: projectcalico.org/v3\nkind: %s\nmetadata: {name: %s}\nspec: {%s}\n", kind, name, spec)
	}
	switch p.rand.IntN(10) {
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
		mesh := pick("true", "false")
		return "mesh " + mesh, resource("BGPConfiguration", "default", "nodeToNodeMeshEnabled: "+mesh+", asNumber: 64512")
	case 6:
		key, value := pick("none", "planned"), pick("yes", "no", "")
		return "a node's label " + key + "=" + value, p.labelled(t, key, value, "get", "nodes", "-o", "json")
	case 7:
		value := pick("yes", "no", "")
		return "a pod's label planned=" + value, p.labelled(t, "planned", value, "get", "workloadendpoints", "-A", "-o", "json")
	case 8:
		return "a set", resource("GlobalNetworkSet", "planned", "nets: ["+pick("10.8.0.1", "10.8.0.2", "10.8.0.1, 10.8.0.2")+"]")
	}
	spec := fmt.Sprintf("selector: %q, order: %s, types: [Ingress, Egress], egress: [{action: Allow}], ingress: [{action: Allow, source: {selector: %q}}, {action: %s}]",
		pick("all()", "has(nothing)"), pick("10", "20"), pick("all()", "planned == 'yes'"), pick("Allow", "Deny"))
	return "a policy: " + spec, resource("GlobalNetworkPolicy", "planned-"+pick("a", "b"), spec)
}

// labelled is one of the resources that routerctl prints, with another value of a label; empty: without it.
func (p *planned) labelled(t *testing.T, key, value string, get ...string) string {
	t.Helper()
	var list struct{ Items []map[string]any }
	if err := json.Unmarshal([]byte(routerctl(t, p.Lab, "node1", "", get...)), &list); err != nil {
		t.Fatal(err)
	}
	r := list.Items[p.rand.IntN(len(list.Items))]
	meta, _ := r["metadata"].(map[string]any)
	labels, _ := meta["labels"].(map[string]any)
	if labels == nil {
		labels = map[string]any{}
	}
	if labels[key] = value; value == "" {
		delete(labels, key)
	}
	meta["labels"] = labels
	delete(meta, "resourceVersion")
	out, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// wait waits until the kernels stand still.
func (p *planned) wait(t *testing.T, what string) {
	t.Helper()
	poll(t, what, func() string {
		same := true
		for _, h := range p.Hosts() {
			now := plannedKernel(t, p.Lab, h)
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
	for _, h := range p.Hosts() {
		if late := changed(p.last[h], plannedKernel(t, p.Lab, h)); len(late) > 0 {
			t.Fatalf("before %s, %s: something changed late: %q", what, h, late)
		}
	}
	sessions, err := p.sessions(t)
	if err != nil {
		t.Fatal(err)
	}
	rules := map[string]map[string]string{}
	for _, h := range p.Hosts() {
		rules[h] = plannedRules(t, p.Lab, h)
	}
	text, _ := tryRouterctl(t, p.Lab, "node2", manifest, "plan", "--all", "-f", "-") // it ends with 1 where apply wants --force
	routerctl(t, p.Lab, "node2", manifest, "apply", "--force", "-f", "-")
	poll(t, what, func() string {
		for _, h := range p.Hosts() {
			now := plannedKernel(t, p.Lab, h)
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
		if diff := cmp.Diff(plannedSessions(text), comeAndGone(sessions, now)); diff != "" {
			return fmt.Sprintf("sessions (-planned +happened):\n%s\n%s", diff, text)
		}
		return ""
	})
	for _, h := range p.Hosts() {
		p.last[h] = plannedKernel(t, p.Lab, h)
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
		if slices.Contains([]string{"link", "address", "neighbour", "fdb", "route"}, kind) {
			if strings.Contains(said, "vxlan-v6") {
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

// sessions lists the sessions of each host, as HOST ADDRESS: one that another BGPPeer is for starts anew.
func (p *planned) sessions(t *testing.T) ([]string, error) {
	t.Helper()
	var out []string
	for _, h := range p.Hosts() {
		n, err := p.Node(await.Context(t), h)
		if err != nil {
			return nil, err
		}
		for _, s := range n.GetPeers() {
			out = append(out, h+" "+s.GetAddress())
		}
	}
	return inOrder(out), nil
}

func comeAndGone(before, after []string) []string {
	var out []string
	for _, s := range after {
		if !slices.Contains(before, s) {
			out = append(out, s+" comes")
		}
	}
	for _, s := range before {
		if !slices.Contains(after, s) {
			out = append(out, s+" ends")
		}
	}
	return inOrder(out)
}

// plannedSessions is which sessions come and end by a plan.
func plannedSessions(text string) []string {
	_, text, _ = strings.Cut(text, "\nBGP:\n")
	text, _, _ = strings.Cut(text, "\nHosts:\n")
	var out []string
	in := ""
	for line := range strings.Lines(text) {
		said, ok := strings.CutPrefix(strings.TrimRight(line, "\n"), "    session with ")
		if f := strings.Fields(line); !ok && len(f) == 1 {
			in = f[0]
		}
		for _, fate := range []string{" comes", " ends"} {
			if who, _, found := strings.Cut(said, ", AS "); ok && found && strings.HasSuffix(said, fate) {
				f := strings.Fields(who)
				out = append(out, in+" "+f[len(f)-1]+fate)
			}
		}
	}
	return inOrder(out)
}

func inOrder(list []string) []string { return slices.Sorted(slices.Values(list)) }
