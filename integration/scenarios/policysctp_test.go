package scenarios

import (
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/lab"
)

// speaks reports whether this kernel has a protocol of streams.
func speaks(protocol int) bool {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, protocol)
	if err != nil {
		return false
	}
	unix.Close(fd)
	return true
}

// testSCTP holds a policy against SCTP's handshakes: by label, port and
// protocol, over both families, near and far.
func testSCTP(t *testing.T, l *lab.Lab, _ familyMode) {
	const open, shut = 30010, 30011
	s := openStore(t, l)
	create(t, s, tiersOfCases)
	label(t, l, s, "node1/pod1", "app", "alpha")
	var all, denied []*attempt
	for _, to := range []string{"node2/pod1", "node3/pod1"} {
		label(t, l, s, to, "role", "server")
		serve(t, l, to, unix.IPPROTO_SCTP, open, shut)
		for _, f := range dataplane.Families() {
			a := addrOf(t, l, to, f)
			all = append(all, &attempt{from: "node1/pod1", to: a, protocol: unix.IPPROTO_SCTP, port: open})
			denied = append(denied,
				&attempt{from: "node1/pod1", to: a, protocol: unix.IPPROTO_SCTP, port: shut},
				&attempt{from: "node1/pod2", to: a, protocol: unix.IPPROTO_SCTP, port: open})
		}
	}
	create(t, s, policyManifest("sctp", "role == 'server'", fmt.Sprintf(
		"ingress: [{action: Allow, protocol: SCTP, source: {selector: app == 'alpha'}, destination: {ports: [%d]}}, {action: Deny, protocol: 132}]", open)))
	settledBy(t, l, s)
	tryAll(t, l, all, 30*time.Second)
	for _, a := range all {
		if !a.passed {
			t.Errorf("%s does not pass (%v)", a, a.err)
		}
	}
	tryAll(t, l, denied, time.Second)
	for _, a := range denied {
		if a.passed {
			t.Errorf("%s passes", a)
		}
	}
}
