package hostile

import (
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/store"
)

// ephemeral is the first of the ports that the kernel chooses (ip_local_port_range).
const ephemeral = 32768

// listensOnly: a host has the sockets that docs/security.md lists under "What listens", and
// no other that somebody on the underlay or in a pod could reach.
func listensOnly(t *testing.T, l *lab.Lab, mode store.Encapsulation) {
	for host, want := range map[string][]string{
		"node1": {"tcp 179", "tcp 2379"},
		"node2": {"tcp 179"},
	} {
		if mode == store.VXLAN {
			want = append(want, "raw 17", "tcp 7747", "udp 4789", "udp 7747", "udp of the kernel's choice")
		}
		poll(t, host+" listens to what docs/security.md says", func() string {
			got := make(map[string]bool)
			for line := range strings.Lines(output(t, l, host, "ss", "-Hlntuw")) {
				f := strings.Fields(line)
				at := strings.LastIndexByte(f[4], ':')
				what := f[0] + " " + f[4][at+1:]
				if n, err := strconv.Atoi(f[4][at+1:]); err == nil && n >= ephemeral {
					what = f[0] + " of the kernel's choice"
				}
				got[what] = true
			}
			slices.Sort(want)
			return cmp.Diff(want, slices.Sorted(maps.Keys(got)))
		})
	}
}
