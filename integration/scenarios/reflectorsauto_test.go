package scenarios

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/store"
)

// TestReflectorsAuto has five hosts choose two reflectors among themselves, replaces one that dies, and goes back to the mesh, under
// 1,000 packets a second: none is lost, and BGP withdraws no block of a host that is there.
func TestReflectorsAuto(t *testing.T) {
	beside(t)
	l := bringUp(t, "rrauto", topology(5, 1, store.VXLANCrossSubnet))
	hosts := l.Hosts()
	ofType := func(want string) func(*apiv1.BGPPeer) bool {
		return func(p *apiv1.BGPPeer) bool { return p.GetType() == want }
	}
	waitPeers(t, l, hosts, len(hosts)-1, ofType("node-to-node mesh"))
	var pairs [][2]string
	for i, h := range hosts {
		pairs = append(pairs, [2]string{h + "/pod1", hosts[(i+1)%len(hosts)] + "/pod1"}, [2]string{h + "/pod1", hosts[(i+2)%len(hosts)] + "/pod1"})
	}
	_, stop := flowsAt(t, l, 100, pairs...)
	// The first one has the datastore, and is not to be killed; so it is not willing.
	unwilling, reflectors, next, client := hosts[0], hosts[1:3], hosts[3], hosts[4]
	routerctl(t, l, unwilling, "", "label", "nodes", unwilling, store.LabelReflector+"="+store.NeverReflects)
	watches := map[string]*recorder{}
	for _, h := range hosts {
		if h != reflectors[0] { // which is killed
			watches[h] = watchBGP(t, l, h)
		}
	}

	routerctl(t, l, unwilling, "", "bgp", "reflectors", "auto", "--count", "2")
	waitPeers(t, l, reflectors, len(hosts)-1, ofType("reflector"))
	waitPeers(t, l, []string{unwilling, next, client}, 2, ofType("reflector"))
	if out := routerctl(t, l, client, "", "bgp", "reflectors", "status"); !strings.Contains(out, reflectors[0]+", "+reflectors[1]) || !strings.Contains(out, "Sessions of the mesh: 0, of 5 nodes") {
		t.Errorf("status says\n%s", out)
	}
	// A reflected route is there by both reflectors and by nobody else.
	out := routerctl(t, l, client, "", "bgp", "routes")
	if n := strings.Count(out, addr(t, l, next).String()+" "); n != 2 {
		t.Errorf("%s has %d paths to what %s has, want one of each reflector:\n%s", client, n, next, out)
	}

	from := time.Now()
	if err := l.Kill(await.Context(t), reflectors[0], unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	waitReflectors(t, l, client, reflectors[0], reflectors[1], next)
	took := time.Since(from)
	t.Logf("the reflector was replaced after %v", took)
	if took > 30*time.Second {
		t.Errorf("the reflector was replaced after %v", took)
	}
	waitSessionsWith(t, l, []string{unwilling, client}, reflectors[1], next)
	if err := l.Restart(await.Context(t), reflectors[0]); err != nil {
		t.Fatal(err)
	}
	waitReflectors(t, l, client, reflectors[1], next)
	waitPeers(t, l, []string{unwilling, reflectors[0], client}, 2, ofType("reflector"))

	routerctl(t, l, unwilling, "", "bgp", "reflectors", "off")
	waitReflectors(t, l, client)
	waitPeers(t, l, hosts, len(hosts)-1, ofType("node-to-node mesh"))
	for h, m := range watches {
		if gone := m.stop(t, " withdrawn "); len(gone) > 0 || !strings.Contains(m.out.text(), " session ") {
			t.Errorf("%s was without a route for a while, or nothing was heard of it:\n%s", h, m.out.text())
		}
	}
	stop()
}

// waitReflectors waits until a host names these reflectors, and no other ones.
func waitReflectors(t *testing.T, l *lab.Lab, host string, want ...string) {
	t.Helper()
	pollFor(t, time.Minute, fmt.Sprintf("reflectors %v", want), func() string {
		c, err := l.Client(host)
		if err != nil {
			return err.Error()
		}
		defer c.Close()
		r, err := apiv1.NewBGPClient(c).Reflectors(await.Context(t), &apiv1.BGPReflectorsRequest{})
		if err != nil {
			return err.Error()
		}
		var got []string
		for _, g := range r.GetGroups() {
			got = append(got, g.GetReflectors()...)
		}
		if !slices.Equal(got, want) {
			return fmt.Sprint(r)
		}
		return ""
	})
}

// waitSessionsWith waits until hosts have sessions with others that are up.
func waitSessionsWith(t *testing.T, l *lab.Lab, hosts []string, with ...string) {
	t.Helper()
	for _, h := range hosts {
		poll(t, fmt.Sprintf("sessions of %s with %v", h, with), func() string {
			r, err := l.Node(await.Context(t), h)
			if err != nil {
				return err.Error()
			}
			for _, name := range with {
				if !slices.ContainsFunc(r.GetPeers(), func(p *apiv1.BGPPeer) bool { return p.GetName() == name && p.GetState() == "up" }) {
					return name + ": " + fmt.Sprint(r.GetPeers())
				}
			}
			return ""
		})
	}
}

// watchBGP records what BGP of a host tells of changes.
func watchBGP(t *testing.T, l *lab.Lab, host string) *recorder {
	t.Helper()
	w := &recorder{out: &monitor{}}
	w.cmd = startRouterctl(t, l, host, w.out, "bgp", "watch")
	return w
}
