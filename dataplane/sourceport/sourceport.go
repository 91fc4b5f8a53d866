// Package sourceport makes VXLAN send from its own port to some peers.
//
// The kernel takes the source port of VXLAN from a hash of the packet inside,
// so that networks can spread the load (RFC 7348, section 5). A translator of
// ports, or a firewall that lets in only whom its host has sent to, knows one
// port: the one that a keepalive opened. One nftables table of our own
// ("routerd-sourceport", to be seen with nft list ruleset) rewrites the source
// port of the data to such peers, without connection tracking; packets to
// others pass one lookup in a set. There is no table while there is no such
// peer.
package sourceport

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane/internal/nl"
)

// Table keeps the nftables table of one network namespace. Its methods may be
// called from any goroutine.
type Table struct {
	log    *slog.Logger
	conn   *nl.Conn
	events *netlink.Conn

	mu    sync.Mutex
	set   bool // Set was called
	port  uint16
	peers []netip.AddrPort
}

// sendBuffer holds a transaction with some ten thousands of peers, of 40 bytes
// each: it is one message to the socket. Memory is used only when needed.
const sendBuffer = 4 << 20

// Open returns a table that leaves everything as it is until [Table.Set]. It
// works in the network namespace of the calling thread.
func Open(log *slog.Logger) (*Table, error) {
	conn, err := nl.Dial(unix.NETLINK_NETFILTER, sendBuffer, 0)
	if err != nil {
		return nil, err
	}
	events, _, err := nl.Listen(unix.NETLINK_NETFILTER, 0, unix.NFNLGRP_NFTABLES)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return &Table{log: log, conn: conn, events: events}, nil
}

// Set makes VXLAN's data to these addresses and ports leave from a port, that
// to all others as the kernel will. On error nothing has changed.
func (t *Table) Set(port uint16, peers []netip.AddrPort) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.set && t.port == port && slices.Equal(t.peers, peers) {
		return nil
	}
	if err := t.write(port, peers); err != nil {
		return err
	}
	t.set, t.port, t.peers = true, port, slices.Clone(peers)
	return nil
}

// write does the transaction. The lock is held.
func (t *Table) write(port uint16, peers []netip.AddrPort) error {
	errs, err := t.conn.Transaction(unix.NFNL_SUBSYS_NFTABLES, &replace(port, peers).Batch)
	_, refused := nl.First(errs)
	if err := errors.Join(err, refused); err != nil {
		return fmt.Errorf("write the nftables table %s: %w", TableName, err)
	}
	return nil
}

// Run puts the table back when somebody else removes it, or a part of it, as
// flushing the ruleset does. It returns when ctx ends, and closes the table.
func (t *Table) Run(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { t.events.Close() })
	defer stop()
	defer t.conn.Close()
	for {
		msgs, err := t.events.Receive()
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, unix.ENOBUFS):
			t.restore("notices were lost")
			continue
		case err != nil:
			return fmt.Errorf("listen to nftables: %w", err)
		}
		if slices.ContainsFunc(msgs, t.removed) {
			t.restore("somebody removed it")
		}
	}
}

// removed reports whether a notice says that somebody else removed something of
// our table.
func (t *Table) removed(m netlink.Message) bool {
	if m.Header.PID == t.conn.Port() || len(m.Data) < 4 {
		return false
	}
	switch uint16(m.Header.Type) & 0xff {
	case unix.NFT_MSG_DELTABLE, unix.NFT_MSG_DELCHAIN, unix.NFT_MSG_DELRULE, unix.NFT_MSG_DELSET, unix.NFT_MSG_DELSETELEM:
	default:
		return false
	}
	return nl.Find(m.Data[4:], unix.NFTA_TABLE_NAME).Text() == TableName // 1, as the table's name is in all of them
}

func (t *Table) restore(reason string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.set || len(t.peers) == 0 {
		return
	}
	if err := t.write(t.port, t.peers); err != nil {
		t.set = false // the next call of Set tries again, whatever it says
		t.log.Error("the nftables table that fixes VXLAN's source port is gone", "table", TableName, "error", err)
		return
	}
	t.log.Warn("put back the nftables table that fixes VXLAN's source port", "table", TableName, "reason", reason)
}

// Close closes a table that [Table.Run] was not called for.
func (t *Table) Close() error { return errors.Join(t.conn.Close(), t.events.Close()) }
