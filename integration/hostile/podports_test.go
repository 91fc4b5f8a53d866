package hostile

import (
	"encoding/hex"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/ns"
	"github.com/routerd/routerd/store"
)

// TestPodsKeptFromHosts: pods reach neither BGP's port of any host, where a
// connection that comes with a host's address would pass for the host's session, nor
// what hosts serve on their loopback. Other ports of other hosts are open.
func TestPodsKeptFromHosts(t *testing.T) {
	t.Parallel()
	for _, mode := range []store.Encapsulation{store.VXLAN, store.Direct} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			l := bringUp(t, "ports-"+strings.ToLower(string(mode)), topology(3, 1, mode))
			for _, host := range []string{"node2", "node3"} {
				listen(t, l, host, "0.0.0.0:8080")
			}
			// As kube-proxy sets it.
			output(t, l, "node1", "sysctl", "-qw", "net.ipv4.conf.all.route_localnet=1")
			listen(t, l, "node1", "127.0.0.1:8081")

			const pod = "node1/pod1"
			poll(t, "a pod reaches ports of another host", func() string { return connects(t, l, pod, address(t, l, "node2"), 8080) })
			for _, host := range l.Hosts() {
				if connects(t, l, pod, address(t, l, host), 179) == "" {
					t.Errorf("%s connects to BGP's port of %s", pod, host)
				}
			}
			if err := connectSigned(t, l, "node2", address(t, l, "node1"), hex.EncodeToString(clusterKey(t, l).Key)); err != nil {
				t.Errorf("node2 does not connect to BGP's port of node1, as its own daemon does: the test tests nothing: %v", err)
			}

			// A pod sends to 127.0.0.1 by a route to its host: by the link's address of
			// the host, which answers for all.
			for _, command := range []string{
				"sysctl -qw net.ipv4.conf.eth0.route_localnet=1",
				"ip address del 127.0.0.1/8 dev lo",
				"ip rule add pref 1 to 127.0.0.1 lookup 99",
				"ip rule del pref 0",
				"ip route add 127.0.0.1 via 169.254.1.1 dev eth0 onlink table 99",
			} {
				output(t, l, pod, strings.Fields(command)...)
			}
			if why := connects(t, l, "node1", "127.0.0.1", 8081); why != "" {
				t.Fatalf("the host does not reach its own port: %s", why)
			}
			seen := hits(t, l, "node1")
			_ = connects(t, l, pod, "127.0.0.1", 8081)
			poll(t, "what the pod sends to 127.0.0.1 is counted as dropped", func() string {
				if now := hits(t, l, "node1"); now <= seen {
					return fmt.Sprintf("%d packets, %d before", now, seen)
				}
				return ""
			})
		})
	}
}

// listen accepts connections in a host's namespace until the test ends.
func listen(t *testing.T, l *lab.Lab, host, at string) {
	t.Helper()
	var lis net.Listener
	err := ns.Do(l.Space(host), func() (err error) {
		lis, err = net.Listen("tcp", at)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := lis.Accept()
			if err != nil {
				return
			}
			_ = c.Close()
		}
	}()
	t.Cleanup(func() {
		_ = lis.Close()
		<-done
	})
}

// connects says why a place does not connect to a port; empty: it does.
func connects(t *testing.T, l *lab.Lab, where, addr string, port int) string {
	t.Helper()
	var c net.Conn
	err := ns.Do(l.Space(where), func() (err error) {
		c, err = net.DialTimeout("tcp", net.JoinHostPort(addr, fmt.Sprint(port)), 500*time.Millisecond)
		return err
	})
	if err != nil {
		return err.Error()
	}
	_ = c.Close()
	return ""
}

func address(t *testing.T, l *lab.Lab, where string) string {
	t.Helper()
	a, err := l.Addr(where)
	if err != nil {
		t.Fatal(err)
	}
	return a.String()
}

// hits counts what a host dropped because it was for its loopback.
func hits(t *testing.T, l *lab.Lab, host string) (sum int) {
	t.Helper()
	out, err := l.Output(await.Context(t), host, "nft", "list", "ruleset")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(out) {
		if strings.Contains(line, "loopback address of the host") {
			var n int
			if _, after, ok := strings.Cut(line, "counter packets "); ok {
				_, _ = fmt.Sscan(after, &n)
			}
			sum += n
		}
	}
	return sum
}
