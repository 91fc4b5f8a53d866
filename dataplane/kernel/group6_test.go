package kernel

import (
	"testing"

	"github.com/routerd/routerd/dataplane"
)

// TestIPv4OverIPv6NextHop: an IPv4 route leads to an IPv6 gateway (RFC 8950),
// alone and in a group beside an IPv4 one.
func TestIPv4OverIPv6NextHop(t *testing.T) {
	t.Parallel()
	l, k, objs := twoWays(t)
	six := dataplane.NextHop{ID: 13, Link: "up2", Gateway: addr("fe80::1"), OnLink: true}
	k.put(objs[0], six, route("192.168.4.0/26", 13), group(20, 11, 13), route("192.168.5.0/26", 20), route("fd20::/64", 13))
	l.shows("ip route show proto 77", `
192.168.4.0/26 nhid 13 via inet6 fe80::1 dev up2 onlink
192.168.5.0/26 nhid 20
nexthop via 10.0.0.2 dev up0 weight 1 onlink
nexthop via inet6 fe80::1 dev up2 weight 1 onlink`)
	l.shows("ip -6 route show proto 77", "fd20::/64 nhid 13 via fe80::1 dev up2 metric 1024 onlink pref medium")
	k.settled()
	k.stop()
	next := l.start()
	next.wait(next.Replace(dataplane.SourceWorkload, nil))
	next.wait(next.Replace(dataplane.SourceCore, []dataplane.Object{
		objs[0], six, route("192.168.4.0/26", 13), group(20, 11, 13), route("192.168.5.0/26", 20), route("fd20::/64", 13),
	}))
	next.ready()
	if n := next.writer.writes.Load(); n != 0 {
		t.Errorf("%d messages after a restart", n)
	}
}
