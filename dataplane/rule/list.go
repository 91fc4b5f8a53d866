package rule

import (
	"fmt"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/internal/nl"
)

// Rule is a policy routing rule.
type Rule struct {
	Family   dataplane.Family
	Priority uint32
	Not      bool
	From, To netip.Prefix // invalid: all
	In, Out  string       // devices; empty: all
	Mark     uint32       // of the packets that it takes; 0: all
	Narrow   bool         // it looks at more: a port, a protocol, a user, a tunnel
	Action   string       // lookup, goto, blackhole, unreachable or prohibit
	Table    uint32       // of lookup
	Protocol uint8        // RTPROT_* of who made it
}

// String returns the rule as ip-rule(8) takes it after "add" and "del".
func (r Rule) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "priority %d", r.Priority)
	if r.Not {
		b.WriteString(" not")
	}
	if r.From.IsValid() {
		fmt.Fprintf(&b, " from %s", r.From)
	} else {
		b.WriteString(" from all")
	}
	if r.To.IsValid() {
		fmt.Fprintf(&b, " to %s", r.To)
	}
	if r.Mark != 0 {
		fmt.Fprintf(&b, " fwmark %#x", r.Mark)
	}
	if r.In != "" {
		fmt.Fprintf(&b, " iif %s", r.In)
	}
	if r.Out != "" {
		fmt.Fprintf(&b, " oif %s", r.Out)
	}
	fmt.Fprintf(&b, " %s", r.Action)
	if r.Action == "lookup" {
		fmt.Fprintf(&b, " %d", r.Table)
	}
	return b.String()
}

// tries is how often a listing begins anew that changes interrupt.
const tries = 5

// List returns the policy routing rules of the calling thread's network namespace that
// do something, those that the kernel makes by itself left out. With an error it has
// those of the families that could be listed.
func List() ([]Rule, error) {
	var all []Rule
	for _, f := range dataplane.Families() {
		var b nl.Batch
		b.Begin(unix.RTM_GETRULE, 0, header(f)...)
		messages, err := nl.List(unix.NETLINK_ROUTE, tries, &b)
		if err != nil {
			return all, fmt.Errorf("list the %s rules: %w", f, err)
		}
		for _, m := range messages {
			if r, ok := parse(f, m.Body); ok && !r.kernels() {
				all = append(all, r)
			}
		}
	}
	return all, nil
}

// kernels reports whether the kernel made the rule by itself: local, main and default
// for all packets.
func (r Rule) kernels() bool {
	all := !r.Not && !r.From.IsValid() && !r.To.IsValid() && r.In == "" && r.Out == "" && r.Mark == 0 && !r.Narrow
	return all && r.Action == "lookup" && (r.Table == unix.RT_TABLE_LOCAL || r.Table == unix.RT_TABLE_MAIN || r.Table == unix.RT_TABLE_DEFAULT)
}

// parse reads struct fib_rule_hdr and what follows it.
func parse(f dataplane.Family, b []byte) (Rule, bool) {
	if len(b) < unix.SizeofRtMsg {
		return Rule{}, false
	}
	const invert = 0x2 // FIB_RULE_INVERT
	r := Rule{Family: f, Table: uint32(b[4]), Not: nl.Value(b[8:]).Uint32()&invert != 0}
	switch b[7] {
	case unix.FR_ACT_TO_TBL:
		r.Action = "lookup"
	case unix.FR_ACT_GOTO:
		r.Action = "goto"
	case unix.FR_ACT_BLACKHOLE:
		r.Action = "blackhole"
	case unix.FR_ACT_UNREACHABLE:
		r.Action = "unreachable"
	case unix.FR_ACT_PROHIBIT:
		r.Action = "prohibit"
	default:
		return Rule{}, false // does nothing
	}
	r.Narrow = b[3] != 0 // TOS
	for t, v := range nl.Attributes(b[unix.SizeofRtMsg:]) {
		switch t {
		case unix.FRA_SRC:
			r.From = prefixOf(v, b[2])
		case unix.FRA_DST:
			r.To = prefixOf(v, b[1])
		case unix.FRA_IIFNAME:
			r.In = v.Text()
		case unix.FRA_OIFNAME:
			r.Out = v.Text()
		case unix.FRA_PRIORITY:
			r.Priority = v.Uint32()
		case unix.FRA_FWMARK:
			r.Mark = v.Uint32()
		case unix.FRA_TABLE:
			r.Table = v.Uint32()
		case unix.FRA_PROTOCOL:
			r.Protocol = v.Uint8()
		case unix.FRA_TUN_ID, unix.FRA_L3MDEV, unix.FRA_UID_RANGE, unix.FRA_IP_PROTO, unix.FRA_SPORT_RANGE, unix.FRA_DPORT_RANGE, unix.FRA_FLOW:
			r.Narrow = true
		}
	}
	return r, true
}

func prefixOf(v nl.Value, bits byte) netip.Prefix {
	p, err := v.Addr().Prefix(int(bits))
	if err != nil {
		return netip.Prefix{}
	}
	return p
}

// Takes reports whether the rule may decide about packets to or from a range instead
// of the main table.
func (r Rule) Takes(p netip.Prefix) bool {
	if dataplane.FamilyOf(p.Addr()) != r.Family || r.Mark != 0 || r.Narrow || r.Not || r.Action == "goto" || r.Action == "lookup" && r.Table == unix.RT_TABLE_MAIN {
		return false
	}
	return r.From.IsValid() && r.From.Overlaps(p) || r.To.IsValid() && r.To.Overlaps(p)
}
