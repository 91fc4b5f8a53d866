package bgp

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/routerd/routerd/control/cluster/clustertest"
	"github.com/routerd/routerd/store"
)

// simulation is hosts that choose reflectors by a datastore that each of them hears of late, with sessions that take time to
// come up, in virtual time.
type simulation struct {
	t      testing.TB
	now    time.Time
	log    []store.Event // what the datastore has said, in order
	nodes  []*simNode
	up     map[[2]int]time.Time // sessions, since when
	leases []string             // of reflectors, the oldest first
	gone   map[string]time.Time // hosts that died, and when
	calm   time.Time            // since when nothing has died
	said   map[string]int       // how often a node has written
	text   map[string]string    // labels of nodes

	byNodes bool // nobody has a lease: who is there the Nodes say, late
	last    map[string]store.NodeReflection
	away    map[string]bool      // what their Nodes say
	mute    map[string]bool      // hosts of which that is wrong: their kubelets are gone, and they are there
	back    map[string]time.Time // hosts that came back, and when
}

type simNode struct {
	name  string
	index int
	view  *View
	read  int // of the log
	refl  reflecting
	alive bool
}

func newSimulation(t testing.TB, nodes int, label func(i int) string) *simulation {
	s := &simulation{
		t: t, now: time.Unix(1e9, 0), up: map[[2]int]time.Time{}, gone: map[string]time.Time{}, said: map[string]int{}, text: map[string]string{},
		last: map[string]store.NodeReflection{}, away: map[string]bool{}, back: map[string]time.Time{}, mute: map[string]bool{},
	}
	s.calm = s.now
	for i := range nodes {
		n := &simNode{name: fmt.Sprintf("node%d", i), index: i, view: &View{}, alive: true}
		s.nodes = append(s.nodes, n)
		s.text[n.name] = label(i)
		s.write(n.name, store.NodeReflection{})
	}
	for _, n := range s.nodes {
		n.view.self = n.name
		if _, err := n.view.Apply(clustertest.Step("", store.Batch{Synced: true, Events: s.log})); err != nil {
			t.Fatal(err)
		}
		n.read = len(s.log)
	}
	return s
}

// write has a node say something of itself.
func (s *simulation) write(name string, r store.NodeReflection) {
	s.said[name]++
	s.last[name] = r
	s.tell(name)
}

// tell has the datastore say what a node has written, and whether it counts as gone.
func (s *simulation) tell(name string) {
	n := &store.Node{}
	store.SetNodeReflection(n, s.last[name])
	notes := []string{fmt.Sprintf("%q:%q", store.AnnotationAccepts, "direct")} // it runs routerd
	if s.away[name] {
		notes = append(notes, fmt.Sprintf("%q:%q", store.AnnotationAway, "its kubelet is not heard from"))
	}
	for k, v := range n.Annotations {
		notes = append(notes, fmt.Sprintf("%q:%q", k, v))
	}
	slices.Sort(notes)
	i := slices.IndexFunc(s.nodes, func(n *simNode) bool { return n.name == name })
	s.log = append(s.log, labelled(s.t, bgpNode(s.t, name, fmt.Sprintf("10.1.0.%d/24", i+1)), s.text[name], strings.Join(notes, ",")))
}

// ask sets the annotation of the BGPConfiguration; empty: takes it away.
func (s *simulation) ask(value string) {
	c := conf(s.t, "default", `{}`)
	if value != "" {
		c = labelled(s.t, c, "", fmt.Sprintf("%q:%q", store.AnnotationReflectors, value))
	}
	s.log = append(s.log, c)
}

func (s *simulation) kill(i int) {
	n := s.nodes[i]
	n.alive, s.gone[n.name], s.calm = false, s.now, s.now
}

func (s *simulation) revive(i int) {
	n := s.nodes[i]
	n.alive, n.refl = true, reflecting{}
	if s.now.Sub(s.gone[n.name]) > 8*time.Second { // a new lease
		s.leases = slices.DeleteFunc(s.leases, func(name string) bool { return name == n.name })
	}
	delete(s.gone, n.name)
	s.calm, s.back[n.name] = s.now, s.now
}

// judge has the Nodes of hosts that have died say so, and no more when they are back.
func (s *simulation) judge() {
	for _, n := range s.nodes {
		away := s.away[n.name]
		switch {
		case !n.alive:
			away = away || s.now.Sub(s.gone[n.name]) >= goneAfter
		case s.now.Sub(s.back[n.name]) >= 5*time.Second:
			away = s.mute[n.name]
		}
		if away != s.away[n.name] {
			s.away[n.name] = away
			s.tell(n.name)
		}
	}
}

// goneAfter is when the Node of a host that has died says so.
const goneAfter = time.Minute

// there is what leases say.
func (s *simulation) there() Alive {
	a := Alive{Nodes: map[string]bool{}}
	for _, n := range s.nodes {
		a.Nodes[n.name] = n.alive || s.now.Sub(s.gone[n.name]) < 15*time.Second
	}
	for _, name := range s.leases {
		if died, dead := s.gone[name]; !dead || s.now.Sub(died) < 8*time.Second {
			a.Reflectors = append(a.Reflectors, name)
		}
	}
	return a
}

// has reports whether a node has a session with another configured.
func (n *simNode) has(other *simNode) bool {
	v := n.view
	return v.reflected(n.name, other.name) || v.meshed() && !v.released(n.name, other.name)
}

// second lets a second pass; delay is how many it takes a session to come up.
func (s *simulation) second(lag, delay func() int) {
	s.now = s.now.Add(time.Second)
	alive := s.there()
	if s.byNodes {
		s.judge()
	}
	for _, n := range s.nodes {
		if !n.alive {
			continue
		}
		if to := max(n.read, len(s.log)-lag()); to > n.read {
			if _, err := n.view.Apply(clustertest.Step("", store.Batch{Events: s.log[n.read:to]})); err != nil {
				s.t.Fatal(err)
			}
			n.read = to
		}
	}
	for i, a := range s.nodes {
		for j, b := range s.nodes[:i] {
			key := [2]int{j, i}
			_, has := s.up[key]
			switch on := a.alive && b.alive && a.has(b) && b.has(a); {
			case on && !has:
				s.up[key] = s.now.Add(time.Duration(delay()) * time.Second)
			case !on:
				delete(s.up, key)
			}
		}
	}
	for _, n := range s.nodes {
		if !n.alive {
			continue
		}
		synced := map[netip.Addr]bool{}
		for _, o := range s.nodes {
			synced[n.view.nodes[o.name].addr.Addr()] = s.session(n, o, 0)
		}
		n.refl.see(n.view, n.name, synced, s.now)
		if s.byNodes {
			alive = n.view.present()
		}
		want := n.refl.says(n.view, n.name, alive, s.now)
		if want.Reflects && !s.byNodes && !slices.Contains(s.leases, n.name) {
			s.leases = append(s.leases, n.name)
			continue // it says so when it has the lease
		}
		if !want.Reflects {
			s.leases = slices.DeleteFunc(s.leases, func(name string) bool { return name == n.name })
		}
		if n.read == len(s.log) && !want.Equal(n.view.nodes[n.name].reflection) {
			s.write(n.name, want)
		}
	}
	s.check()
}

// session reports whether two nodes' session has been up for so long.
func (s *simulation) session(a, b *simNode, age time.Duration) bool {
	at, ok := s.up[[2]int{min(a.index, b.index), max(a.index, b.index)}]
	return ok && s.now.Sub(at) >= age
}

// check wants a way for routes between every two nodes that are there, unless somebody has just died: a session, or reflectors that
// have sessions with both.
func (s *simulation) check() {
	calm := 40 * time.Second
	if s.byNodes {
		calm += goneAfter
	}
	if s.now.Sub(s.calm) < calm {
		return
	}
	var serving []*simNode
	for _, n := range s.nodes {
		if n.alive && n.view.reflection().reflects(n.name) {
			serving = append(serving, n)
		}
	}
	by := func(a *simNode) (out []*simNode) {
		for _, r := range serving {
			if r == a || s.session(a, r, time.Second) && r.view.reflected(r.name, a.name) {
				out = append(out, r)
			}
		}
		return out
	}
	for i, a := range s.nodes {
		for _, b := range s.nodes[:i] {
			way := !a.alive || !b.alive || s.session(a, b, 0)
			for _, x := range by(a) {
				for _, y := range by(b) {
					way = way || x == y || s.session(x, y, time.Second)
				}
			}
			if !way {
				s.t.Fatalf("after %s: no way between %s and %s: reflectors %v, leases %v\n%s", s.now.Sub(time.Unix(1e9, 0)), a.name, b.name, names(serving), s.leases, s.state())
			}
		}
	}
}

func names(list []*simNode) (out []string) {
	for _, n := range list {
		out = append(out, n.name)
	}
	return out
}

func (s *simulation) state() string {
	var out strings.Builder
	for _, n := range s.nodes {
		fmt.Fprintf(&out, "%s alive %t reflects %t by %v behind %d\n", n.name, n.alive, n.view.nodes[n.name].reflection.Reflects, n.view.nodes[n.name].reflection.By, len(s.log)-n.read)
	}
	for key, at := range s.up {
		fmt.Fprintf(&out, "%d-%d since %s ", key[0], key[1], s.now.Sub(at))
	}
	for _, e := range s.log[max(0, len(s.log)-14):] {
		fmt.Fprintf(&out, "\n%s %s", e.Key.Name, e.Object.Raw)
	}
	return out.String()
}

// rest lets time pass until all is as it stays.
func (s *simulation) rest() {
	zero := func() int { return 0 }
	s.calm = s.now
	for range 120 {
		s.second(zero, zero)
	}
	before := maps.Clone(s.said)
	for range 60 {
		s.second(zero, zero)
	}
	if fmt.Sprint(before) != fmt.Sprint(s.said) {
		s.t.Fatalf("it never rests: %v, %v\n%s", before, s.said, s.state())
	}
}

// sessions counts those that are up.
func (s *simulation) sessions() int { return len(s.up) }

func (s *simulation) serving() (out []string) {
	for _, n := range s.nodes {
		if n.alive && n.view.nodes[n.name].reflection.Reflects {
			out = append(out, n.name)
		}
	}
	return out
}

// TestReflectorsAnyOrder: whatever is asked for, whoever dies and comes back, however late who hears of what, routes have a way
// between any two nodes at any time, and in the end there are as many reflectors as are asked for, and no session too many.
func TestReflectorsAnyOrder(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		const n = 6
		racks := rapid.IntRange(1, 3).Draw(rt, "racks")
		label := rapid.SampledFrom([]string{store.LabelRack, store.LabelZone}).Draw(rt, "label") // a zone is a rack
		s := newSimulation(t, n, func(i int) string {
			text := fmt.Sprintf(`"%s":"r%d"`, label, i%racks)
			if i == 0 {
				text += `,"routerd.io/reflector":"never"`
			}
			return text
		})
		s.byNodes = rapid.Bool().Draw(rt, "byNodes")
		lag := func() int { return rapid.IntRange(0, 3).Draw(rt, "lag") }
		delay := func() int { return rapid.IntRange(0, 3).Draw(rt, "delay") }
		asked := ""
		for range rapid.IntRange(1, 8).Draw(rt, "steps") {
			switch i := rapid.IntRange(0, n-1).Draw(rt, "host"); rapid.IntRange(0, 4).Draw(rt, "what") {
			case 0, 1:
				asked = rapid.SampledFrom([]string{"", "1", "2", "1 per rack", "2 per rack", "3"}).Draw(rt, "ask")
				s.ask(asked)
			case 2:
				if s.nodes[i].alive {
					s.kill(i)
				}
			case 3:
				if !s.nodes[i].alive {
					s.revive(i)
				}
			case 4:
				one := rapid.Bool().Draw(rt, "one")
				for j, node := range s.nodes {
					if (!one || i == j) && len(s.gone) == 0 {
						s.mute[node.name] = !s.mute[node.name]
					}
				}
			}
			for range rapid.IntRange(0, 90).Draw(rt, "seconds") {
				s.second(lag, delay)
			}
		}
		clear(s.mute)
		for i, node := range s.nodes {
			if !node.alive {
				s.revive(i)
			}
		}
		s.rest()
		want, _ := store.ParseReflectors(asked)
		groups := map[string]int{}
		for _, node := range s.nodes {
			g := ""
			if want.Per != "" {
				g = s.text[node.name]
				if i := strings.Index(g, ","); i >= 0 {
					g = g[:i]
				}
			}
			if !strings.Contains(s.text[node.name], "never") {
				groups[g] = min(groups[g]+1, want.Count)
			}
		}
		total := 0
		for _, k := range groups {
			total += k
		}
		if got := s.serving(); len(got) != total {
			rt.Fatalf("%q: reflectors %v, want %d\n%s", asked, got, total, s.state())
		}
		if want.Count == 0 && s.sessions() != n*(n-1)/2 {
			rt.Fatalf("%d sessions in the mesh", s.sessions())
		}
		if want.Count > 0 && want.Per == "" {
			if clients := n - total; s.sessions() != total*clients+total*(total-1)/2 {
				rt.Fatalf("%q: %d sessions with %d reflectors and %d clients\n%s", asked, s.sessions(), total, clients, s.state())
			}
		}
	})
}

// TestReflectorReplaced: a reflector that has died is replaced when its lease is over, and does not come back into its place. Where
// nobody has a lease it is replaced when its Node says that it is gone.
func TestReflectorReplaced(t *testing.T) {
	t.Parallel()
	t.Run("leases", func(t *testing.T) { reflectorReplaced(t, false, 12*time.Second) })
	t.Run("Nodes", func(t *testing.T) { reflectorReplaced(t, true, goneAfter+5*time.Second) })
}

func reflectorReplaced(t *testing.T, byNodes bool, within time.Duration) {
	t.Parallel()
	s := newSimulation(t, 5, func(int) string { return "" })
	s.byNodes = byNodes
	zero := func() int { return 0 }
	s.ask("2")
	s.rest()
	if got := fmt.Sprint(s.serving()); got != "[node0 node1]" {
		t.Fatalf("reflectors %s, want the first two", got)
	}
	s.kill(0)
	for i := 0; len(s.serving()) < 2; i++ {
		if time.Duration(i)*time.Second > within {
			t.Fatalf("no other reflector after %d s\n%s", i, s.state())
		}
		s.second(zero, zero)
	}
	s.rest()
	s.revive(0)
	s.rest()
	if got := fmt.Sprint(s.serving()); got != "[node1 node2]" {
		t.Errorf("reflectors %s after the first one is back\n%s", got, s.state())
	}
	s.ask("")
	s.rest()
	if got := fmt.Sprint(s.serving()); got != "[]" || s.sessions() != 10 {
		t.Errorf("reflectors %s and %d sessions after they were taken back\n%s", got, s.sessions(), s.state())
	}
}

// TestReflectorReplacedUnheard: a reflector that dies while Kubernetes hears from no kubelet is replaced, also where the first
// in turn has died too; when Nodes are heard from again there are no more than are asked for.
func TestReflectorReplacedUnheard(t *testing.T) {
	t.Parallel()
	s := newSimulation(t, 6, func(int) string { return "" })
	s.byNodes = true
	zero := func() int { return 0 }
	s.ask("1")
	s.rest()
	for _, n := range s.nodes {
		s.mute[n.name] = true
	}
	s.rest()
	if got := fmt.Sprint(s.serving()); got != "[node0]" {
		t.Fatalf("reflectors %s while nobody is heard from", got)
	}
	s.kill(0)
	s.kill(1)
	for i := 0; len(s.serving()) == 0; i++ {
		if i > 40 {
			t.Fatalf("no other reflector after %d s\n%s", i, s.state())
		}
		s.second(zero, zero)
	}
	s.rest()
	if got := fmt.Sprint(s.serving()); got != "[node2]" {
		t.Errorf("reflectors %s after the first has died", got)
	}
	clear(s.mute)
	s.revive(0)
	s.revive(1)
	s.rest()
	if got := s.serving(); len(got) != 1 {
		t.Errorf("reflectors %s after all are back\n%s", got, s.state())
	}
}

// TestSessionOutlastsWord: a node that has its own reflector keeps the session with
// another one for as long as its Node says that it has routes by that: whoever goes
// counts on it.
func TestSessionOutlastsWord(t *testing.T) {
	t.Parallel()
	say := func(name, addr, rack, reflects, by string) store.Event {
		notes := fmt.Sprintf(`"routerd.io/reflectedBy":%q`, by)
		if reflects != "" {
			notes += fmt.Sprintf(`,"routerd.io/reflects":%q`, reflects)
		}
		return labelled(t, bgpNode(t, name, addr), fmt.Sprintf(`"rack":%q`, rack), notes)
	}
	v := &View{self: "node0"}
	apply := func(events ...store.Event) {
		t.Helper()
		if _, err := v.Apply(clustertest.Step("", store.Batch{Synced: true, Events: events})); err != nil {
			t.Fatal(err)
		}
	}
	apply(
		labelled(t, conf(t, "default", `{}`), "", fmt.Sprintf("%q:%q", store.AnnotationReflectors, "1 per rack")),
		say("node1", "10.1.0.2/24", "r0", "true", "node2"), say("node2", "10.1.0.3/24", "r1", "true", "node1"),
		say("node0", "10.1.0.1/24", "r0", "", "node1 node2"),
	)
	if !v.reflected("node0", "node2") {
		t.Error("the session ends before the node says that it has no routes by it")
	}
	if got := v.toServe("node0"); !slices.Equal(got, []string{"node1"}) {
		t.Errorf("it is to have sessions with %v, want its own reflector's alone", got)
	}
	apply(say("node0", "10.1.0.1/24", "r0", "", "node1"))
	if v.reflected("node0", "node2") {
		t.Error("the session stays")
	}
}

// TestReflectorsUnheard: where Kubernetes has heard from no kubelet for a while, though all hosts are there, nobody takes
// another for gone who is not: the mesh is there before its reflectors go.
func TestReflectorsUnheard(t *testing.T) {
	t.Parallel()
	s := newSimulation(t, 6, func(int) string { return "" })
	s.byNodes = true
	s.ask("2")
	s.rest()
	for _, n := range s.nodes {
		s.mute[n.name] = true
	}
	zero, slow := func() int { return 0 }, func() int { return 8 }
	for range 10 {
		s.second(zero, slow)
	}
	if got := fmt.Sprint(s.serving()); got != "[node0 node1]" {
		t.Errorf("reflectors %s while nobody is heard from", got)
	}
	s.ask("")
	for range 60 {
		s.second(zero, slow) // which checks that there is a way
	}
	if got := fmt.Sprint(s.serving()); got != "[]" || s.sessions() != 15 {
		t.Errorf("reflectors %s and %d sessions\n%s", got, s.sessions(), s.state())
	}
}
