package nft

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/dataplane/internal/nl"
)

// events is a socket that gets the kernel's notices about tables.
type events struct {
	c   *netlink.Conn
	own uint32 // port of our own writes
}

// listen opens the socket. Notices of our own writes never reach it.
func listen(own uint32) (*events, error) {
	c, _, err := nl.Listen(unix.NETLINK_NETFILTER, receiveBuffer, unix.NFNLGRP_NFTABLES)
	if err != nil {
		return nil, err
	}
	// The kernel drops what follows from our writes. All of a message are of one
	// writer.
	const portAt = 12 // in the header of a netlink message, in the host's order
	big := binary.BigEndian.Uint32(binary.NativeEndian.AppendUint32(nil, own))
	prog, err := bpf.Assemble([]bpf.Instruction{
		bpf.LoadAbsolute{Off: portAt, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: big, SkipFalse: 1},
		bpf.RetConstant{Val: 0},
		bpf.RetConstant{Val: 1 << 30},
	})
	if err == nil {
		err = c.SetBPF(prog)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("filter notices of nftables: %w", err), c.Close())
	}
	return &events{c, own}, nil
}

func (e *events) close() error { return e.c.Close() }

// next waits until somebody else changed our table, or may have. It returns
// after ctx ended.
func (e *events) next(ctx context.Context) error {
	for {
		msgs, err := e.c.Receive()
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, unix.ENOBUFS):
			return nil // what was lost may have been about us
		case err != nil:
			return fmt.Errorf("listen to nftables: %w", err)
		}
		if slices.ContainsFunc(msgs, func(m netlink.Message) bool { return m.Header.PID != e.own && ours(m) }) {
			return nil
		}
	}
}

// rest reads what else there is, for a number of milliseconds at most.
func (e *events) rest() {
	defer e.c.SetReadDeadline(time.Time{}) //nolint:errcheck // a socket that takes the one takes the other
	if e.c.SetReadDeadline(time.Now().Add(time.Millisecond)) != nil {
		return
	}
	for range 1000 {
		if _, err := e.c.Receive(); err != nil && !errors.Is(err, unix.ENOBUFS) {
			return
		}
	}
}

// ours reports whether a notice is about our table.
func ours(m netlink.Message) bool {
	if m.Header.Type>>8 != unix.NFNL_SUBSYS_NFTABLES || len(m.Data) < 4 || m.Data[0] != unix.NFPROTO_INET {
		return false
	}
	switch m.Header.Type & 0xff {
	case unix.NFT_MSG_NEWGEN, unix.NFT_MSG_TRACE:
		return false
	}
	// 1, as the table's name is in all messages about what is in a table.
	return nl.Find(m.Data[4:], unix.NFTA_TABLE_NAME).Text() == TableName
}

// Between tries to write what the kernel refused.
const (
	shortestWait = 50 * time.Millisecond
	longestWait  = 10 * time.Second
)

// Run repairs what others change, and tries again what the kernel refused. It
// returns when ctx ends, and closes the table: the rules stay in force.
func (t *Table) Run(ctx context.Context) error {
	defer func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.shut()
	}()
	stop := context.AfterFunc(ctx, func() { t.events.close() })
	defer stop()
	retries := make(chan struct{})
	inner, cancel := context.WithCancel(ctx)
	go func() {
		defer close(retries)
		t.retry(inner)
	}()
	defer func() { cancel(); <-retries }()
	for {
		if err := t.events.next(ctx); err != nil {
			return err
		}
		at := time.Now()
		t.events.rest()
		t.repair(at)
	}
}

// repair compares the kernel with what should be there.
func (t *Table) repair(at time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.status.Loaded || t.desired == nil || t.closed {
		return // it is not ours to judge yet
	}
	t.known = false
	writes, err := t.sync()
	if err != nil {
		t.fail(err)
		t.again.Set()
		if t.broken.IsZero() {
			t.broken = at
		}
		t.cfg.Log.Error("somebody changed the nftables table and it could not be put right", "table", TableName, "error", err)
		t.tell(Repair{At: at, Took: time.Since(at), Writes: writes, Err: err})
		return
	}
	if writes > 0 && t.broken.IsZero() {
		t.repaired(Repair{At: at, Took: time.Since(at), Writes: writes})
	}
	t.done(writes)
}

// repaired takes note that somebody else's change was put right.
func (t *Table) repaired(r Repair) {
	t.broken = time.Time{}
	t.status.Repairs++
	t.status.LastRepair, t.status.LastRepairTook = r.At, r.Took
	t.status.LongestRepair = max(t.status.LongestRepair, r.Took)
	t.cfg.Log.Warn("put right what somebody changed in the nftables table", "table", TableName, "writes", r.Writes, "took", r.Took)
	t.tell(r)
}

func (t *Table) tell(r Repair) {
	if t.cfg.OnRepair != nil {
		t.cfg.OnRepair(r)
	}
}

// retry writes again what could not be written, later each time.
func (t *Table) retry(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.again:
		}
		for backoff := (async.Backoff{Min: shortestWait, Max: longestWait}); !t.tryAgain(); {
			if backoff.Wait(ctx) != nil {
				return
			}
		}
	}
}

// tryAgain reports whether nothing is left to be written.
func (t *Table) tryAgain() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.status.Pending || t.desired == nil || t.closed {
		return true
	}
	writes, err := t.sync()
	if err != nil {
		t.fail(err)
		return false
	}
	t.done(writes)
	t.cfg.Log.Info("the nftables table is as it should be again", "table", TableName)
	return true
}
