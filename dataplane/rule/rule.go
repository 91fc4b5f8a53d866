// Package rule leads packets of single sockets into a routing table of its own.
//
// A probe goes where no packet of a workload does yet: into a tunnel that is not in
// use, or plainly to a peer whose packets travel through a tunnel. That takes a route,
// and one in the main table would take the workloads' packets to the same address
// along. So such routes stand in the table [Table], and a rule for each device and
// family says that who has bound its socket, or the packet, to the device looks there
// first (ip-rule(8), oif). What is forwarded is bound to no device.
//
// With the first rule of its own a network namespace looks up IPv4 routes rule by
// rule, which costs each some nanoseconds; so there is none but while something is to be
// probed that takes one.
//
// [List] says which rules there are, whoever made them.
package rule

import (
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/internal/nl"
)

// Table is the number of the routing table of probes.
const Table = 7747

// priority of the rules: behind that of the kernel's local table, before all that
// people use.
const priority = 77

// key identifies a rule.
type key struct {
	family dataplane.Family
	link   string
}

// Rules keeps the rules of one network namespace. Its methods may be called from any
// goroutine.
type Rules struct {
	protocol uint8
	conn     *nl.Conn

	mu    sync.Mutex
	users map[key]int
}

// Open returns the rules of the calling thread's network namespace, of which there are
// none: what the previous run left is removed. The protocol (RTPROT_*) marks ours.
func Open(protocol uint8) (*Rules, error) {
	r, err := dial(protocol)
	if err != nil {
		return nil, err
	}
	if _, err := r.sweep(false); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return r, nil
}

// Sweep removes what a run left in the calling thread's network namespace and returns
// how many rules that were; with look it only counts them.
func Sweep(protocol uint8, look bool) (n int, err error) {
	r, err := dial(protocol)
	if err != nil {
		return 0, err
	}
	n, err = r.sweep(look)
	return n, errors.Join(err, r.Close())
}

func dial(protocol uint8) (*Rules, error) {
	conn, err := nl.Dial(unix.NETLINK_ROUTE, 0, 0)
	if err != nil {
		return nil, err
	}
	return &Rules{protocol: protocol, conn: conn, users: map[key]int{}}, nil
}

// Close ends the connection. The rules stay.
func (r *Rules) Close() error { return r.conn.Close() }

// Add has packets of a family look into [Table] first that are bound to a device. Each
// Add that succeeds wants its [Rules.Remove].
func (r *Rules) Add(f dataplane.Family, link string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	k := key{f, link}
	if r.users[k] == 0 {
		if err := r.change(unix.RTM_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_EXCL, k); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("add a rule for %s packets that are bound to %s: %w", f, link, err)
		}
	}
	r.users[k]++
	return nil
}

// Remove takes back one [Rules.Add].
func (r *Rules) Remove(f dataplane.Family, link string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	k := key{f, link}
	if r.users[k]--; r.users[k] > 0 {
		return nil
	}
	delete(r.users, k)
	if err := r.change(unix.RTM_DELRULE, 0, k); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove the rule for %s packets that are bound to %s: %w", f, link, err)
	}
	return nil
}

// change sends one message about a rule.
func (r *Rules) change(kind, flags uint16, k key) error {
	var b nl.Batch
	h := header(k.family)
	h[7] = unix.FR_ACT_TO_TBL
	b.Begin(kind, flags, h...)
	b.Text(unix.FRA_OIFNAME, k.link)
	b.Uint32(unix.FRA_PRIORITY, priority)
	b.Uint32(unix.FRA_TABLE, Table)
	b.Uint8(unix.FRA_PROTOCOL, r.protocol)
	return r.conn.Do(&b, nil)
}

// header is struct fib_rule_hdr with nothing but the family.
func header(f dataplane.Family) []byte {
	h := make([]byte, unix.SizeofRtMsg)
	h[0] = unix.AF_INET
	if f == dataplane.IPv6 {
		h[0] = unix.AF_INET6
	}
	return h
}

// sweep removes, or only counts, the rules that lead into our table.
func (r *Rules) sweep(look bool) (n int, err error) {
	all, err := List()
	if err != nil {
		return 0, err
	}
	for _, l := range all {
		if l.Table != Table || l.Protocol != r.protocol || l.Out == "" {
			continue
		}
		n++
		if look {
			continue
		}
		if err := r.change(unix.RTM_DELRULE, 0, key{l.Family, l.Out}); err != nil && !errors.Is(err, unix.ENOENT) {
			return 0, fmt.Errorf("remove the rule for %s packets that are bound to %s: %w", l.Family, l.Out, err)
		}
	}
	return n, nil
}
