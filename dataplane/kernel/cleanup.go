package kernel

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/internal/nl"
)

// Leftovers returns everything of ours that is in the kernel: what a Kernel
// of which no source wants anything would remove, in the order of removal. It
// changes nothing. It is for a Kernel that is not run.
func (k *Kernel) Leftovers(ctx context.Context) ([]dataplane.Object, error) {
	if k.started.Load() {
		return nil, errors.New("leftovers: the writer runs")
	}
	k.listing.ask("leftovers are asked for")
	if err := k.check(ctx); err != nil {
		return nil, err
	}
	keys := k.want.Keys()
	slices.SortFunc(keys, func(a, b key) int { return -compareKeys(a, b) })
	var out []dataplane.Object
	for _, key := range keys {
		if s, ok := k.want.Tracker.Have(key); ok {
			out = append(out, s.whole(key))
		}
	}
	return out, nil
}

// Sweep removes everything of ours from the kernel and returns what is still
// there, which is nothing if the error is nil. Killed in the middle it can be
// called again. It is for a Kernel that is not run.
func (k *Kernel) Sweep(ctx context.Context) (left []dataplane.Object, err error) {
	left, err = k.Leftovers(ctx)
	if err != nil || len(left) == 0 {
		return left, err
	}
	k.Replace(dataplane.SourceWorkload, nil)
	k.Replace(dataplane.SourceCore, nil)
	k.Synced(dataplane.SourceWorkload)
	k.Synced(dataplane.SourceCore)
	// Each turn removes something; what is refused is held back.
	for ctx.Err() == nil && k.writer.turn() {
		if k.listing.needed() {
			if err := k.check(ctx); err != nil {
				return left, err
			}
		}
	}
	if left, err = k.Leftovers(ctx); err != nil || len(left) == 0 {
		return left, err
	}
	errs := []error{fmt.Errorf("%d objects are still there", len(left))}
	for _, o := range left[:min(len(left), logEach)] {
		errs = append(errs, fmt.Errorf("%s: %w", o.Key(), k.want.Failure(o.Key())))
	}
	return left, errors.Join(errs...)
}

// DeleteTable deletes an nftables table of family inet and reports whether
// there was one. With look it only looks.
func (k *Kernel) DeleteTable(name string, look bool) (found bool, err error) {
	err = k.ns.do(func() error {
		found, err = deleteTable(name, look)
		return err
	})
	return found, err
}

// deleteTable is DeleteTable in the calling thread's network namespace
// (linux/netfilter/nf_tables.h).
func deleteTable(name string, look bool) (found bool, err error) {
	c, err := nl.Dial(unix.NETLINK_NETFILTER, 0, 0)
	if errors.Is(err, unix.EPROTONOSUPPORT) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer c.Close()
	// What is beside the table of IP packets has its name.
	for _, family := range []uint8{unix.NFPROTO_INET, unix.NFPROTO_ARP} {
		one, err := deleteTableOf(c, family, name, look)
		found = found || one
		if err != nil {
			return found, err
		}
	}
	return found, nil
}

func deleteTableOf(c *nl.Conn, family uint8, name string, look bool) (found bool, err error) {
	var b nl.Batch
	table := func(message uint16) {
		b.Reset()
		b.Begin(unix.NFNL_SUBSYS_NFTABLES<<8|message, 0, family, unix.NFNETLINK_V0, 0, 0)
		b.Text(unix.NFTA_TABLE_NAME, name)
	}
	table(unix.NFT_MSG_GETTABLE)
	switch err := c.Do(&b, nil); {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.EINVAL), errors.Is(err, unix.EOPNOTSUPP):
		return false, nil // EINVAL: the kernel has no nftables
	case err != nil:
		return false, fmt.Errorf("look for the nftables table %s: %w", name, err)
	case look:
		return true, nil
	}
	// Its rules go first, in a transaction of their own: rules whose sets go at the same time
	// were seen to drop what passes in that moment. The attribute has the same number there.
	for _, message := range []uint16{unix.NFT_MSG_DELRULE, unix.NFT_MSG_DELTABLE} {
		table(message)
		errs, err := c.Transaction(unix.NFNL_SUBSYS_NFTABLES, &b)
		if err := errors.Join(err, errs[0]); err != nil && !errors.Is(err, unix.ENOENT) {
			return true, fmt.Errorf("delete the nftables table %s: %w", name, err)
		}
	}
	return true, nil
}
