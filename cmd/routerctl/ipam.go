package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net/netip"
	"slices"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"github.com/spf13/cobra"

	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/store"
)

func (a ipamCommands) ipamCommand() *cobra.Command {
	c := &cobra.Command{Use: "ipam", Short: "Manage IP addresses: pools, blocks, assignments", Example: "  routerctl ipam show --show-blocks"}
	var showBlocks, showBorrowed, showConfiguration bool
	var ip string
	show := &cobra.Command{
		Use:   "show",
		Short: "Show the usage of pools and blocks, or of an address",
		Long: `Show how many addresses of each pool, and with --show-blocks of each block, are in
use, reserved and free. With --ip, show who has an address.

An address that was in use before it was reserved counts as both. A record that cannot
be decoded is named; the others are shown, and the exit code is 1.`,
		Example: "  routerctl ipam show\n  routerctl ipam show --show-blocks\n  routerctl ipam show --ip=192.168.12.5",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case showConfiguration:
				return a.withStore(cmd, func(ctx context.Context, s store.Store) error { return showIPAMConfig(ctx, s, a.stdout) })
			case showBorrowed:
				return a.withStore(cmd, func(ctx context.Context, s store.Store) error { return showBorrowedAddresses(ctx, s, a.stdout) })
			case !cmd.Flags().Changed("ip"):
				return a.withStore(cmd, func(ctx context.Context, s store.Store) error { return showUsage(ctx, s, a.stdout, showBlocks) })
			}
			addr, err := netip.ParseAddr(ip)
			if err != nil {
				return usagef("--ip %q: must be an address such as 192.168.12.5", ip)
			}
			return a.withStore(cmd, func(ctx context.Context, s store.Store) error { return showAddress(ctx, s, a.stdout, addr) })
		},
	}
	show.Flags().BoolVar(&showBlocks, "show-blocks", false, "also show each block")
	show.Flags().BoolVar(&showBorrowed, "show-borrowed", false, "show addresses in use on a node that does not hold their block")
	show.Flags().BoolVar(&showConfiguration, "show-configuration", false, "show the settings of IPAM")
	show.Flags().StringVar(&ip, "ip", "", "show who has this address")
	c.AddCommand(show, a.ipamCheckCommand(), a.ipamReleaseCommand(), a.ipamConfigureCommand(), a.ipamSplitCommand())
	return c
}

// usage counts the addresses of a pool or a block. They are floats because an
// IPv6 pool has more than an integer holds.
type usage struct {
	cidr                        netip.Prefix
	total, used, reserved, free float64
	blocks                      []usage
}

// poolUsage computes the usage of every pool, in order of their CIDRs, and of
// blocks that lie in no pool, under an invalid CIDR at the end.
func poolUsage(pools, blocks, reservations []netip.Prefix, byBlock map[netip.Prefix]*store.Block) []usage {
	var all []usage
	left := slices.Clone(blocks)
	for _, p := range pools {
		u := count(p, reservations)
		for _, b := range blocks {
			if !p.Overlaps(b) || b.Bits() < p.Bits() {
				continue
			}
			bu := blockUsage(b, byBlock[b], reservations)
			u.used += bu.used
			u.free -= bu.total - bu.reserved - bu.free // used and not reserved
			u.blocks = append(u.blocks, bu)
			left = slices.DeleteFunc(left, func(l netip.Prefix) bool { return l == b })
		}
		all = append(all, u)
	}
	orphans := usage{}
	for _, b := range left {
		orphans.blocks = append(orphans.blocks, blockUsage(b, byBlock[b], reservations))
	}
	if len(left) > 0 {
		all = append(all, orphans)
	}
	return all
}

// count returns the usage of an empty prefix.
func count(p netip.Prefix, reservations []netip.Prefix) usage {
	u := usage{cidr: p, total: size(p)}
	for _, r := range reservations {
		switch {
		case r.Overlaps(p) && r.Bits() <= p.Bits():
			u.reserved = u.total
		case r.Overlaps(p):
			u.reserved += size(r)
		}
	}
	u.free = u.total - u.reserved
	return u
}

func size(p netip.Prefix) float64 { return math.Exp2(float64(p.Addr().BitLen() - p.Bits())) }

func blockUsage(p netip.Prefix, b *store.Block, reservations []netip.Prefix) usage {
	u := count(p, reservations)
	addr := p.Addr()
	for _, a := range b.Allocations {
		if a != nil {
			u.used++
			if !slices.ContainsFunc(reservations, func(r netip.Prefix) bool { return r.Contains(addr) }) {
				u.free--
			}
		}
		addr = addr.Next()
	}
	return u
}

// outermost sorts prefixes and drops those inside of others, so that each
// address is counted once. Two prefixes are either nested or apart.
func outermost(prefixes []netip.Prefix) []netip.Prefix {
	var out []netip.Prefix
	for _, p := range slices.SortedFunc(slices.Values(prefixes), netip.Prefix.Compare) {
		if len(out) == 0 || !out[len(out)-1].Overlaps(p) {
			out = append(out, p)
		}
	}
	return out
}

func showUsage(ctx context.Context, s store.Store, w io.Writer, showBlocks bool) error {
	var pools, reservations []netip.Prefix
	byBlock := map[netip.Prefix]*store.Block{}
	var problems []error
	for _, k := range []store.Kind{store.KindIPPool, store.KindIPReservation, store.KindIPAMBlock} {
		objects, _, err := s.List(ctx, k, "")
		if err != nil && !errors.Is(err, store.ErrDecode) {
			return err
		}
		problems = append(problems, err)
		for _, o := range objects {
			switch v := o.Value.(type) {
			case *v3.IPPool:
				pools = append(pools, parsePrefixes(v.Spec.CIDR)...)
			case *v3.IPReservation:
				reservations = append(reservations, parsePrefixes(v.Spec.ReservedCIDRs...)...)
			case *store.Block:
				byBlock[o.Key.CIDR()] = v
			}
		}
	}
	slices.SortFunc(pools, netip.Prefix.Compare)
	all := poolUsage(pools, slices.SortedFunc(maps.Keys(byBlock), netip.Prefix.Compare), outermost(reservations), byBlock)
	if err := printUsage(w, all, showBlocks); err != nil {
		return err
	}
	return errors.Join(problems...)
}

func parsePrefixes(list ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, s := range list {
		if p, err := netip.ParsePrefix(s); err == nil {
			out = append(out, p.Masked())
		}
	}
	return out
}

func printUsage(w io.Writer, all []usage, showBlocks bool) error {
	var rows [][]string
	row := func(grouping string, u usage) {
		part := func(n float64) string { return fmt.Sprintf("%.5g (%.f%%)", n, 100*n/u.total) }
		rows = append(rows, []string{grouping, u.cidr.String(), fmt.Sprintf("%.5g", u.total), part(u.used), part(u.reserved), part(u.free)})
	}
	for _, u := range all {
		if u.cidr.IsValid() {
			row("IP Pool", u)
		}
		if showBlocks {
			for _, b := range u.blocks {
				row("Block", b)
			}
		}
	}
	return printBox(w, []string{"GROUPING", "CIDR", "IPS TOTAL", "IPS IN USE", "IPS RESERVED", "IPS FREE"}, rows)
}

// showBorrowedAddresses lists what is in use on a node that does not hold the
// block, with calicoctl's columns.
func showBorrowedAddresses(ctx context.Context, s store.Store, w io.Writer) error {
	var rows [][]string
	var problems []error
	err := store.Pages(ctx, s, store.KindIPAMBlock, "", func(objs []store.Object) error {
		for _, o := range objs {
			b, _ := o.Value.(*store.Block)
			all, err := ipam.Allocations(o.Key.CIDR(), b)
			if err != nil {
				problems = append(problems, err)
				continue
			}
			for _, a := range all {
				if a.Node == b.Holder() || !a.ReleasedAt.IsZero() {
					continue
				}
				kind, who := "Workload", a.Handle
				if pod := a.Attributes[ipam.AttrPod]; pod != "" {
					kind, who = "Pod", a.Attributes[ipam.AttrNamespace]+"/"+pod
				} else if t := a.Attributes[ipam.AttrType]; t != "" {
					kind = t
				}
				rows = append(rows, []string{a.Addr.String(), a.Node, o.Key.Name, cmp.Or(b.Holder(), "-"), kind, who})
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := printBox(w, []string{"IP", "BORROWING-NODE", "BLOCK", "BLOCK OWNER", "TYPE", "ALLOCATED-TO"}, rows); err != nil {
		return err
	}
	return errors.Join(problems...)
}

// showIPAMConfig prints the settings that are in force.
func showIPAMConfig(ctx context.Context, s store.Store, w io.Writer) error {
	obj, err := s.Get(ctx, store.IPAMConfigKey())
	c := store.DefaultIPAMConfig()
	switch {
	case err == nil:
		c = *obj.Value.(*store.IPAMConfig)
	case !errors.Is(err, store.ErrNotFound):
		return err
	}
	return printBox(w, []string{"PROPERTY", "VALUE"}, [][]string{
		{"StrictAffinity", fmt.Sprint(c.StrictAffinity)},
		{"AutoAllocateBlocks", fmt.Sprint(c.AutoAllocateBlocks)},
		{"MaxBlocksPerHost", fmt.Sprint(c.MaxBlocksPerHost)},
		{"IPCooldownSeconds", fmt.Sprint(int(c.Cooldown().Seconds()))},
	})
}

// showAddress says who has an address.
func showAddress(ctx context.Context, s store.Store, w io.Writer, addr netip.Addr) error {
	objects, _, err := s.List(ctx, store.KindIPAMBlock, "")
	if err != nil && !errors.Is(err, store.ErrDecode) {
		return err
	}
	for _, o := range objects {
		b := o.Value.(*store.Block)
		i, ok := b.Ordinal(addr)
		if at := b.Attribute(i); ok && at != nil {
			printAttribute(w, addr, b, *at)
			return err
		}
	}
	fmt.Fprintf(w, "%s is not assigned\n", addr)
	return err
}

func printAttribute(w io.Writer, addr netip.Addr, b *store.Block, a store.Attribute) {
	if a.ReleasedAt != nil {
		fmt.Fprintf(w, "IP %s was released at %s and rests before it is used again\n", addr, a.ReleasedAt.UTC().Format("2006-01-02 15:04:05 UTC"))
		return
	}
	fmt.Fprintf(w, "IP %s is in use\n", addr)
	handle := "<none>"
	if a.HandleID != nil {
		handle = *a.HandleID
	}
	fmt.Fprintf(w, "Handle ID: %s\n", handle)
	if len(a.Secondary) == 0 {
		fmt.Fprintln(w, "No attributes defined")
	} else {
		fmt.Fprintln(w, "Attributes:")
		for _, k := range slices.Sorted(maps.Keys(a.Secondary)) {
			fmt.Fprintf(w, "  %s: %s\n", k, a.Secondary[k])
		}
	}
	who := "no node"
	if n := b.Holder(); n != "" {
		who = "node " + n
	}
	fmt.Fprintf(w, "Block: %s of %s\n", b.CIDR, who)
}
