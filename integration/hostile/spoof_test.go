package hostile

import (
	"net/netip"
	"testing"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
)

// spoofSources sends with another pod's address, of this host or of another, as a pod:
// nobody hears it.
func spoofSources(t *testing.T, l *lab.Lab) {
	const pod, target = "node1/pod1", "node2/pod2"
	for _, f := range dataplane.Families() {
		dst := addrOf(t, l, target, f)
		for _, victim := range []string{"node1/pod2", "node2/pod1"} {
			addr := addrOf(t, l, victim, f)
			heard, err := l.Capture(target, "eth0", func(p lab.Packet) bool { return p.Payload().Src == addr })
			if err != nil {
				t.Fatal(err)
			}
			own := netip.PrefixFrom(addr, addr.BitLen()).String()
			add := []string{"ip", "address", "add", own, "dev", "eth0"}
			if f == dataplane.IPv6 {
				add = append(add, "nodad")
			}
			output(t, l, pod, add...)
			if out, err := l.Output(await.Context(t), pod, "ping", "-c", "5", "-i", "0.1", "-W", "1", "-I", addr.String(), dst.String()); err == nil {
				t.Errorf("%s was answered as %s (%s):\n%s", pod, victim, addr, out)
			}
			output(t, l, pod, "ip", "address", "del", own, "dev", "eth0")
			if got := heard.Stop(); len(got) > 0 {
				t.Errorf("%s heard %d packets as from %s, the first %s", target, len(got), victim, got[0])
			}
		}
	}
}
