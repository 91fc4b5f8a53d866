// Package felix finds what Calico's agent left in the packet filter of a host
// that it does not run on any more: chains of iptables, of either kind, the
// tables of its nftables mode, and ipsets. Felix leaves them on purpose when it
// stops, and they go on judging packets. It finds Calico's programs, too, where
// they run on.
//
// Rules of others are told from them by name: Felix's chains and sets begin
// with "cali", and its tables are called "calico". What kube-proxy or
// kube-router made is none of it.
package felix

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane/internal/nl"
)

// Backend is where something was found.
type Backend string

// The backends.
const (
	Legacy   Backend = "iptables-legacy"
	NFT      Backend = "iptables-nft"
	NFTables Backend = "nftables"
	IPSet    Backend = "ipset"
)

// Rest is what is left in one table, or all ipsets.
type Rest struct {
	Backend Backend
	IPv6    bool
	Table   string   // "" of ipsets
	Names   []string // of chains or sets, sorted
}

func (r Rest) String() string {
	family, what := "IPv4", "chains"
	if r.IPv6 {
		family = "IPv6"
	}
	switch {
	case r.Backend == IPSet:
		return fmt.Sprintf("%d ipsets", len(r.Names))
	case len(r.Names) == 1:
		what = "chain"
	}
	return fmt.Sprintf("%s table %s of %s (%d %s)", r.Backend, r.Table, family, len(r.Names), what)
}

// Judges reports whether packets meet it: sets do nothing by themselves.
func (r Rest) Judges() bool { return r.Backend != IPSet }

const (
	chainPrefix = "cali-"
	setPrefix   = "cali"
	ownTable    = "calico" // of Felix's nftables mode, whatever its chains are called
)

// Find looks in the network namespace of the calling thread. It loads no
// module and changes nothing. With an error the list has what could be seen.
func Find() ([]Rest, error) {
	var all []Rest
	var errs []error
	for _, look := range []func() ([]Rest, error){legacy, nftables, sets} {
		list, err := look()
		all = append(all, list...)
		errs = append(errs, err)
	}
	return all, errors.Join(errs...)
}

// legacy looks through the tables of ip_tables and ip6_tables.
func legacy() ([]Rest, error) {
	var all []Rest
	for _, f := range []xtables{ipTables(), ip6Tables()} {
		b, err := os.ReadFile("/proc/thread-self/net/" + f.list)
		if errors.Is(err, fs.ErrNotExist) {
			continue // the module is not loaded
		}
		if err != nil {
			return all, fmt.Errorf("list the tables of iptables: %w", err)
		}
		for table := range strings.FieldsSeq(string(b)) {
			chains, err := f.chains(table)
			if err != nil {
				return all, fmt.Errorf("read table %s of iptables-legacy: %w", table, err)
			}
			chains = slices.DeleteFunc(chains, func(c string) bool { return !strings.HasPrefix(c, chainPrefix) })
			if len(chains) > 0 {
				slices.Sort(chains)
				all = append(all, Rest{Legacy, f.ipv6, table, chains})
			}
		}
	}
	return all, nil
}

// place is a table of nftables.
type place struct {
	family byte
	table  string
}

// nftables looks through all chains of nftables; those of iptables-nft are
// among them.
func nftables() ([]Rest, error) {
	chains := make(map[place][]string)
	err := dump(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETCHAIN, nil, func(family byte, attrs []byte) {
		at, chain := place{family, nl.Find(attrs, unix.NFTA_CHAIN_TABLE).Text()}, nl.Find(attrs, unix.NFTA_CHAIN_NAME).Text()
		ip := family == unix.NFPROTO_IPV4 || family == unix.NFPROTO_IPV6
		if ip && (at.table == ownTable || strings.HasPrefix(chain, chainPrefix)) {
			chains[at] = append(chains[at], chain)
		}
	})
	var all []Rest
	for at, names := range chains {
		r := Rest{NFT, at.family == unix.NFPROTO_IPV6, at.table, names}
		if at.table == ownTable {
			r.Backend = NFTables
		}
		slices.Sort(r.Names)
		all = append(all, r)
	}
	slices.SortFunc(all, func(a, b Rest) int { return strings.Compare(a.String(), b.String()) })
	if errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EINVAL) {
		err = nil // the kernel has no nftables
	}
	return all, err
}

// The kernel's numbers (linux/netfilter/ipset/ip_set.h).
const (
	cmdList         = unix.NFNL_SUBSYS_IPSET<<8 | 7 // IPSET_CMD_LIST
	attrProtocol    = 1                             // IPSET_ATTR_PROTOCOL
	attrSetName     = 2                             // IPSET_ATTR_SETNAME
	attrFlags       = 6                             // IPSET_ATTR_FLAGS
	protocolVersion = 6
	flagNames       = 1 << 1 // IPSET_FLAG_LIST_SETNAME
)

// sets looks through the ipsets, where the kernel has them.
func sets() ([]Rest, error) {
	if _, err := os.Stat("/sys/module/ip_set"); err != nil {
		return nil, nil //nolint:nilerr // to ask would load it
	}
	ask := func(b *nl.Batch) {
		b.Uint8(attrProtocol, protocolVersion)
		b.Net32(attrFlags|unix.NLA_F_NET_BYTEORDER, flagNames)
	}
	var names []string
	err := dump(cmdList, ask, func(_ byte, attrs []byte) {
		if name := nl.Find(attrs, attrSetName).Text(); strings.HasPrefix(name, setPrefix) {
			names = append(names, name)
		}
	})
	if len(names) == 0 {
		return nil, err
	}
	slices.Sort(names)
	return []Rest{{Backend: IPSet, Names: names}}, err
}

// dump asks netfilter for a list.
func dump(kind uint16, ask func(*nl.Batch), fn func(family byte, attrs []byte)) error {
	var b nl.Batch
	b.Begin(kind, 0, unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, 0)
	if ask != nil {
		ask(&b)
	}
	const (
		nfgenLen = 4  // struct nfgenmsg
		tries    = 20 // tables under constant change interrupt many in a row
	)
	list, err := nl.List(unix.NETLINK_NETFILTER, tries, &b)
	if err != nil {
		return fmt.Errorf("list what netfilter has: %w", err)
	}
	for _, m := range list {
		if len(m.Body) >= nfgenLen {
			fn(m.Body[0], m.Body[nfgenLen:])
		}
	}
	return nil
}
