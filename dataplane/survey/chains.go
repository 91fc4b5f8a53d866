package survey

import (
	"bytes"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane/internal/nl"
)

// Chain is a base chain of nftables, iptables-nft's among them, that drops what is
// forwarded unless a rule of it lets it pass.
type Chain struct {
	Family string // ip, ip6 or inet
	Table  string
	Name   string
	// Lets says that a rule of its table names the devices of workloads, so that
	// whoever wrote it has thought of them.
	Lets bool
}

func (c Chain) String() string { return fmt.Sprintf("%s %s %s", c.Family, c.Table, c.Name) }

// workloads is how the names of workloads' devices begin.
const workloads = "cali"

// chains lists the chains that drop by default. On a kernel without nftables there
// are none.
func chains() ([]Chain, error) {
	const drop, hookForward = 0, 2 // NF_DROP, NF_INET_FORWARD
	var list []Chain
	named := map[Chain]bool{} // tables with rules that name workloads' devices
	messages, err := listed(unix.NFT_MSG_GETCHAIN)
	for _, m := range messages {
		c, attrs, ok := parseTable(m, unix.NFTA_CHAIN_TABLE)
		if hook := nl.Find(attrs, unix.NFTA_CHAIN_HOOK); ok && hook != nil && nl.Find(hook, unix.NFTA_HOOK_HOOKNUM).Net32() == hookForward {
			if p := nl.Find(attrs, unix.NFTA_CHAIN_POLICY); p != nil && p.Net32() == drop {
				c.Name = nl.Find(attrs, unix.NFTA_CHAIN_NAME).Text()
				list = append(list, c)
			}
		}
	}
	if len(list) > 0 {
		messages, err = listed(unix.NFT_MSG_GETRULE)
		for _, m := range messages {
			if t, attrs, ok := parseTable(m, unix.NFTA_RULE_TABLE); ok && bytes.Contains(nl.Find(attrs, unix.NFTA_RULE_EXPRESSIONS), []byte(workloads)) {
				named[t] = true
			}
		}
	}
	if errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EINVAL) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list the chains of nftables: %w", err)
	}
	for i, c := range list {
		list[i].Lets = named[Chain{Family: c.Family, Table: c.Table}]
	}
	return list, nil
}

// listed lists what nftables has of a kind.
func listed(kind uint16) ([]nl.Message, error) {
	var b nl.Batch
	b.Begin(unix.NFNL_SUBSYS_NFTABLES<<8|kind, 0, unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, 0)
	return nl.List(unix.NETLINK_NETFILTER, tries, &b)
}

// parseTable reads which table a message is of. Those of other families filter no
// packets that are routed.
func parseTable(m nl.Message, kind uint16) (c Chain, attrs []byte, ok bool) {
	const nfgenLen = 4 // struct nfgenmsg
	if len(m.Body) < nfgenLen {
		return c, nil, false
	}
	switch m.Body[0] {
	case unix.NFPROTO_IPV4:
		c.Family = "ip"
	case unix.NFPROTO_IPV6:
		c.Family = "ip6"
	case unix.NFPROTO_INET:
		c.Family = "inet"
	default:
		return c, nil, false
	}
	attrs = m.Body[nfgenLen:]
	c.Table = nl.Find(attrs, kind).Text()
	return c, attrs, true
}
