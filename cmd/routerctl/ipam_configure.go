package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"net/netip"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"github.com/spf13/cobra"

	"github.com/routerd/routerd/store"
)

func (a ipamCommands) ipamConfigureCommand() *cobra.Command {
	var strict bool
	var limit int
	c := &cobra.Command{
		Use:   "configure",
		Short: "Change the IPAM settings of the cluster",
		Long: `Change the settings of IPAM for the whole cluster.

With strict affinity a host assigns addresses only from its own blocks and never
borrows. A limit of blocks per host requires it.`,
		Example: "  routerctl ipam configure --strictaffinity=true --max-blocks-per-host=4",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			f := cmd.Flags()
			if !f.Changed("strictaffinity") && !f.Changed("max-blocks-per-host") {
				return usagef("give --strictaffinity or --max-blocks-per-host")
			}
			if limit < 0 {
				return usagef("--max-blocks-per-host %d: must be 0 (20, the default limit) or more", limit)
			}
			return a.withStore(cmd, func(ctx context.Context, s store.Store) error {
				return configureIPAM(ctx, s, a.stdout, func(c *store.IPAMConfig) {
					if f.Changed("strictaffinity") {
						c.StrictAffinity = strict
					}
					if f.Changed("max-blocks-per-host") {
						c.MaxBlocksPerHost = limit
					}
				})
			})
		},
	}
	c.Flags().BoolVar(&strict, "strictaffinity", false, "assign addresses only from the host's own blocks")
	c.Flags().IntVar(&limit, "max-blocks-per-host", 0, "number of blocks that a host may hold; 0: 20")
	return c
}

func configureIPAM(ctx context.Context, s store.Store, w io.Writer, change func(*store.IPAMConfig)) error {
	for try := 1; ; try++ {
		obj, err := s.Get(ctx, store.IPAMConfigKey())
		next := store.DefaultIPAMConfig()
		op := store.Op{If: store.IfAbsent(), Action: store.Put}
		switch {
		case err == nil:
			next = *obj.Value.(*store.IPAMConfig)
			op.If, op.Object.Raw = store.IfRevision(obj.Revision), obj.Raw
		case !errors.Is(err, store.ErrNotFound):
			return err
		}
		change(&next)
		switch {
		case next.MaxBlocksPerHost > 0 && !next.StrictAffinity:
			return fmt.Errorf("a limit of %d blocks per host needs strict affinity: give --strictaffinity=true, or --max-blocks-per-host=0", next.MaxBlocksPerHost)
		case !next.StrictAffinity && !next.AutoAllocateBlocks:
			return errors.New("without auto_allocate_blocks affinity has to be strict: no host could borrow addresses")
		}
		op.Object.Key, op.Object.Value = store.IPAMConfigKey(), &next
		if _, err = s.Txn(ctx, op); err == nil {
			fmt.Fprintf(w, "Successfully set StrictAffinity to: %t\nSuccessfully set MaxBlocksPerHost to: %d\n", next.StrictAffinity, next.MaxBlocksPerHost)
			return nil
		}
		if !errors.Is(err, store.ErrConflict) || try == writeTries {
			return err
		}
	}
}

func (a ipamCommands) ipamSplitCommand() *cobra.Command {
	var name, cidr string
	var force bool
	c := &cobra.Command{
		Use:   "split NUMBER",
		Short: "Split a pool into smaller ones",
		Long: `Split a pool into NUMBER pools of the same size and settings, in one transaction.
NUMBER is a power of two. Blocks and addresses stay as they are.

Lock the datastore first with "routerctl datastore lock", so that no address is
assigned meanwhile. Otherwise --force is required.`,
		Example: "  routerctl datastore lock\n  routerctl ipam split 4 --name=default-ipv4-ippool\n  routerctl datastore unlock",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			var n int
			if _, err := fmt.Sscanf(args[0], "%d", &n); err != nil || n < 2 || n > 64 || bits.OnesCount(uint(n)) != 1 {
				return usagef("%q: must be a power of two from 2 to 64", args[0])
			}
			if (name == "") == (cidr == "") {
				return usagef("name the pool by either --name or --cidr")
			}
			return a.withStore(cmd, func(ctx context.Context, s store.Store) error {
				return splitPool(ctx, s, a.stdout, n, name, cidr, force)
			})
		},
	}
	c.Flags().StringVar(&name, "name", "", "name of the pool")
	c.Flags().StringVar(&cidr, "cidr", "", "CIDR of the pool")
	c.Flags().BoolVar(&force, "force", false, "split even if the datastore is not locked")
	return c
}

func splitPool(ctx context.Context, s store.Store, w io.Writer, n int, name, cidr string, force bool) error {
	info, err := s.Get(ctx, store.Key{Kind: store.KindClusterInformation, Name: store.DefaultName})
	if err != nil && !errors.Is(err, store.ErrNotFound) {
		return err
	}
	ci, ok := info.Value.(*v3.ClusterInformation)
	if locked := ok && ci.Spec.DatastoreReady != nil && !*ci.Spec.DatastoreReady; !locked && !force {
		return errors.New("the datastore is not locked, so addresses might be assigned meanwhile: lock it with `routerctl datastore lock`, or give --force")
	}
	pools, _, err := s.List(ctx, store.KindIPPool, "")
	if err != nil && !errors.Is(err, store.ErrDecode) {
		return err
	}
	for _, o := range pools {
		p, ok := o.Value.(*v3.IPPool)
		if !ok || p.Name != name && p.Spec.CIDR != cidr {
			continue
		}
		parts, err := splitInto(p, n)
		if err != nil {
			return err
		}
		ops := []store.Op{store.RemoveOp(o)}
		for _, part := range parts {
			if err := store.Validate(part); err != nil {
				return err
			}
			ops = append(ops, store.Op{If: store.IfAbsent(), Action: store.Put, Object: store.Object{
				Key: store.Key{Kind: store.KindIPPool, Name: part.Name}, Value: part,
			}})
		}
		if _, err := s.Txn(ctx, ops...); err != nil {
			return fmt.Errorf("split IPPool(%s): %w", p.Name, err)
		}
		for _, part := range parts {
			fmt.Fprintf(w, "IPPool(%s) created with %s\n", part.Name, part.Spec.CIDR)
		}
		fmt.Fprintf(w, "IPPool(%s) deleted\n", p.Name)
		return nil
	}
	return fmt.Errorf("IPPool(%s%s): %w", name, cidr, store.ErrNotFound)
}

// splitInto returns n pools like p that together have its addresses.
func splitInto(p *v3.IPPool, n int) ([]*v3.IPPool, error) {
	cidr, err := netip.ParsePrefix(p.Spec.CIDR)
	if err != nil {
		return nil, fmt.Errorf("IPPool(%s): spec.cidr: %w", p.Name, err)
	}
	length := cidr.Bits() + bits.TrailingZeros(uint(n))
	if length > p.Spec.BlockSize {
		return nil, fmt.Errorf("IPPool(%s): %d parts of %s would be /%d each, smaller than its blocks of /%d: split into at most %d",
			p.Name, n, cidr, length, p.Spec.BlockSize, 1<<(p.Spec.BlockSize-cidr.Bits()))
	}
	var out []*v3.IPPool
	for i := range n {
		part, ok := store.Clone(p).(*v3.IPPool)
		if !ok {
			return nil, fmt.Errorf("IPPool(%s): %w", p.Name, store.ErrDecode)
		}
		part.Name = fmt.Sprintf("split-%s-%d", p.Name, i)
		part.UID, part.ResourceVersion = "", ""
		part.Spec.CIDR = nth(cidr, length, i).String()
		out = append(out, part)
	}
	return out, nil
}

// nth returns the i-th prefix of a length in p.
func nth(p netip.Prefix, length, i int) netip.Prefix {
	addr := p.Masked().Addr().AsSlice()
	for bit := range length - p.Bits() {
		if i>>bit&1 == 1 {
			at := length - 1 - bit
			addr[at/8] |= 0x80 >> (at % 8)
		}
	}
	a, _ := netip.AddrFromSlice(addr)
	return netip.PrefixFrom(a, length)
}
