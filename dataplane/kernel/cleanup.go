package kernel

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
)

// Leftovers returns everything of ours that is in the kernel: what a Kernel
// that nobody wants anything of would remove, in the order of removal. It
// changes nothing. It is for a Kernel that is not run.
func (k *Kernel) Leftovers(ctx context.Context) ([]dataplane.Object, error) {
	if k.started.Load() {
		return nil, errors.New("leftovers: the writer runs")
	}
	k.doubt("leftovers are asked for")
	if err := k.check(ctx); err != nil {
		return nil, err
	}
	keys := k.want.Keys()
	slices.SortFunc(keys, func(a, b dataplane.Key) int { return -dataplane.CompareKeys(a, b) })
	var out []dataplane.Object
	for _, key := range keys {
		if o, ok := k.want.Have(key); ok {
			out = append(out, o)
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
	for ctx.Err() == nil && k.turn() {
		if k.dirty != "" {
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
		errs = append(errs, fmt.Errorf("%s: %w", o.Key(), k.want.Trouble(o.Key())))
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
	raw, socket, err := dial(unix.NETLINK_NETFILTER, "nfnetlink", 1<<16)
	if errors.Is(err, unix.EPROTONOSUPPORT) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	c := &conn{c: raw, raw: socket, buf: make([]byte, 1<<16)}
	defer c.Close()
	var b builder
	head := []byte{unix.NFPROTO_INET, unix.NFNETLINK_V0, 0, 0}
	b.begin(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETTABLE, 0, head...)
	b.attrString(unix.NFTA_TABLE_NAME, name)
	b.end()
	switch err := c.ask(&b, func(message) {}); {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.EINVAL), errors.Is(err, unix.EOPNOTSUPP):
		return false, nil // EINVAL: the kernel has no nftables
	case err != nil:
		return false, fmt.Errorf("look for the nftables table inet %s: %w", name, err)
	case look:
		return true, nil
	}
	// Changes travel between the two marks of a transaction (nfnetlink batch).
	mark := []byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, unix.NFNL_SUBSYS_NFTABLES}
	b.reset()
	b.begin(unix.NFNL_MSG_BATCH_BEGIN, 0, mark...)
	b.end()
	b.begin(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_DELTABLE, unix.NLM_F_ACK, head...)
	b.attrString(unix.NFTA_TABLE_NAME, name)
	b.end()
	b.begin(unix.NFNL_MSG_BATCH_END, 0, mark...)
	b.end()
	first, err := c.send(&b)
	if err != nil {
		return true, err
	}
	return true, c.acknowledged(first+1, "delete the nftables table inet "+name)
}

// acknowledged waits for the answer to the message of that number.
func (c *conn) acknowledged(seq uint32, what string) error {
	for {
		data, err := c.receive()
		if err != nil {
			return err
		}
		for m := range messages(data) {
			if m.seq != seq || m.typ != unix.NLMSG_ERROR {
				continue
			}
			if err := parseError(m); err != nil && !errors.Is(err, unix.ENOENT) {
				return fmt.Errorf("%s: %w", what, err)
			}
			return nil
		}
	}
}
