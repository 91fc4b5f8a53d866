package scenarios

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/ns"
	"github.com/routerd/routerd/store"
)

// fromGuide returns the first text in a fence after a heading of docs/guides/bgp.md.
func fromGuide(t *testing.T, heading string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", "..", "docs", "guides", "bgp.md"))
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile("(?s)\n" + regexp.QuoteMeta(heading) + "\n.*?\n```[a-z]*\n(.*?)```\n").FindSubmatch(b)
	if m == nil {
		t.Fatalf("docs/guides/bgp.md has no text in a fence after %q", heading)
	}
	return string(m[1])
}

// inRack makes a switch with an address in the first rack, that hosts have an address of their own in.
func inRack(t *testing.T, l *lab.Lab, name, addr string) *tor {
	t.Helper()
	s := &tor{t: t, l: l, name: name, port: "port", space: l.Space(name), dir: t.TempDir(), procs: map[string]*exec.Cmd{}}
	if err := ns.Create(s.space); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.remove)
	s.sysctl(s.space, "net/ipv4/ip_forward", "1")
	s.ip(s.space, "link set lo up")
	s.ip(l.Space("spine"), "link add "+name+" master rack1 type veth peer name "+s.port+" netns "+s.space)
	s.ip(s.space, "addr add "+addr+"/24 dev "+s.port)
	s.ip(s.space, "link set "+s.port+" up")
	s.ip(l.Space("spine"), "link set "+name+" up")
	return s
}

// TestSwitches runs what docs/guides/bgp.md says that a switch of FRR or BIRD needs, and a node for it, as they stand there but for the
// switches' addresses, and for BFD's interval: a busy machine is no failure. Two switches and two hosts: sessions with passwords and BFD, routes both ways and those that filters keep away,
// shared traffic, a drain, and a restart that the switches do not notice.
func TestSwitches(t *testing.T) {
	beside(t)
	secrets := t.TempDir()
	if err := os.Mkdir(filepath.Join(secrets, "tor"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(secrets, "tor", "password"), []byte("s3cret"), 0o600); err != nil {
		t.Fatal(err)
	}
	top := topology(2, 1, store.VXLANCrossSubnet)
	for i := range top.Nodes {
		top.Nodes[i].Config = map[string]any{"bgp": map[string]any{"secretDir": secrets}}
	}
	l := bringUp(t, "switches", top)
	hosts := l.Hosts()
	const served, refused, fabric = "198.51.100.7", "192.0.2.7", "203.0.113.0/24"
	at := func(addr string) *strings.Replacer {
		return strings.NewReplacer("10.1.0.1;", addr+";", "10.1.0.1 as", addr+" as", "router-id 10.1.0.1\n", "router-id "+addr+"\n", "peerIP: 10.1.0.1\n", "peerIP: "+addr+"\n")
	}
	frr, bird := inRack(t, l, "swf", "10.1.0.2"), inRack(t, l, "swb", "10.1.0.3")
	frr.startFRRWith(at("10.1.0.2").Replace(fromGuide(t, "### FRR")))
	frr.start("bfdd", "/usr/lib/frr/bfdd", "-f", frr.file("bfdd.conf", ""), "-i", filepath.Join(frr.dir, "bfdd.pid"),
		"-z", filepath.Join(frr.dir, "zserv"), "--vty_socket", frr.dir, "--bfdctl", filepath.Join(frr.dir, "bfdctl"), "-P", "0", "--log", "stdout")
	bird.file("bird.conf", "log stderr all;\n"+at("10.1.0.3").Replace(fromGuide(t, "### BIRD 2")))
	bird.runBIRD()

	// Both are announced before the sessions are there: what a switch does not have by then it refuses.
	for _, h := range hosts {
		for _, a := range []string{refused, served} {
			routerctl(t, l, h, "", "bgp", "inject", "add", a+"/32", "--owner", "lb", "--ttl", "1h")
		}
	}
	both := []*tor{frr, bird}
	for i, s := range both {
		peer := at(fmt.Sprintf("10.1.0.%d", i+2)).Replace(fromGuide(t, "## What a switch needs"))
		peer = strings.NewReplacer("name: tor-rack-1", "name: "+s.name, "rack == 'r1'", "all()", "300ms x 3", "3s x 10").Replace(peer)
		routerctl(t, l, hosts[0], peer, "apply", "-f", "-")
	}
	up := func() {
		t.Helper()
		for _, h := range hosts {
			for _, s := range both {
				s.host = h
				s.waitPeer("up, and watched", func(p *apiv1.BGPPeer) bool { return p.GetState() == "up" && strings.HasPrefix(p.GetBfd(), "Up") })
			}
		}
	}
	// goesTo waits until each switch sends what is served to these hosts and no others.
	goesTo := func(to ...string) {
		t.Helper()
		for _, s := range both {
			poll(t, fmt.Sprintf("the way of %s to %v", s.name, to), func() string {
				out := s.ip(s.space, "-4 route show "+served)
				for _, h := range to {
					if !strings.Contains(out, "via "+addr(t, l, h).String()+" ") {
						return out
					}
				}
				if strings.Count(out, "via ") != len(to) {
					return out
				}
				return ""
			})
		}
	}
	up()
	goesTo(hosts...)
	for _, h := range hosts {
		poll(t, h+"'s routes to what the switches announce", func() string {
			out := output(t, l, h, "ip", "-4", "route", "show", fabric)
			if !strings.Contains(out, "via 10.1.0.2 ") || !strings.Contains(out, "via 10.1.0.3 ") {
				return out
			}
			return ""
		})
	}
	for _, s := range both {
		poll(t, "the routes of "+s.name+" to pods", func() string {
			pods := s.ip(s.space, "-4 route show root 192.168.0.0/16")
			for _, h := range hosts {
				if !strings.Contains(pods, "via "+addr(t, l, h).String()+" ") {
					return pods
				}
			}
			return ""
		})
		if out := s.ip(s.space, "-4 route show "+refused); out != "" {
			t.Errorf("%s accepted what its filter is to refuse:\n%s", s.name, out)
		}
	}

	routerctl(t, l, hosts[0], "", "node", "drain")
	goesTo(hosts[1])
	routerctl(t, l, hosts[0], "", "node", "undrain")
	goesTo(hosts...)

	for _, end := range []unix.Signal{unix.SIGTERM, unix.SIGKILL} {
		watches := []*recorder{watchTor(t, frr), watchTor(t, bird)}
		if err := l.Kill(await.Context(t), hosts[0], end); err != nil {
			t.Fatal(err)
		}
		if err := l.Restart(await.Context(t), hosts[0]); err != nil {
			t.Fatal(err)
		}
		up()
		goesTo(hosts...)
		for i, w := range watches {
			for _, line := range w.stop(t, served) {
				if strings.HasPrefix(line, "Deleted ") || strings.Contains(line, "via ") {
					t.Errorf("a restart (%v) moved the way of %s: %s", end, both[i].name, line)
				}
			}
		}
	}
}
