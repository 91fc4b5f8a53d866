package felix

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane/internal/nl"
)

// Protocol is what Felix's routes to other hosts carry (rtm_protocol of rtnetlink(7)); those
// of Calico's BIRD have BIRD's.
const Protocol = 80

// Forwards reports whether the kernel forwards by routes that Calico left, Felix's or
// BIRD's, which keeps them when it ends ("persist"). It looks at the main tables in the
// network namespace of the calling thread.
func Forwards() (bool, error) {
	c, err := nl.Dial(unix.NETLINK_ROUTE, 0, 0)
	if err != nil {
		return false, fmt.Errorf("look for Calico's routes: %w", err)
	}
	defer c.Close()
	found := false
	for _, family := range []byte{unix.AF_INET, unix.AF_INET6} {
		var b nl.Batch
		b.Begin(unix.RTM_GETROUTE, 0, append([]byte{family}, make([]byte, unix.SizeofRtMsg-1)...)...)
		err := c.Dump(&b, func(m nl.Message) {
			// struct rtmsg: the table and the protocol are its fifth and sixth bytes.
			if len(m.Body) < unix.SizeofRtMsg || m.Body[4] != unix.RT_TABLE_MAIN {
				return
			}
			found = found || m.Body[5] == Protocol || m.Body[5] == unix.RTPROT_BIRD
		})
		if err != nil && !found {
			return false, fmt.Errorf("look for Calico's routes: %w", err)
		}
	}
	return found, nil
}
