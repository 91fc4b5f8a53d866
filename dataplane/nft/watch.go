package nft

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// events is a socket that gets the kernel's notices about tables.
type events struct {
	file *os.File
	own  uint32 // port of our own writes
}

// listen opens the socket. Notices of our own writes never reach it.
func listen(own uint32) (*events, error) {
	c, err := open(1 << (unix.NFNLGRP_NFTABLES - 1))
	if err != nil {
		return nil, err
	}
	if err := attach(c.fd, own); err != nil {
		c.close()
		return nil, fmt.Errorf("listen to nftables: %w", err)
	}
	if err := unix.SetNonblock(c.fd, true); err != nil {
		c.close()
		return nil, fmt.Errorf("listen to nftables: %w", err)
	}
	return &events{file: os.NewFile(uintptr(c.fd), "nftables"), own: own}, nil //nolint:gosec // a file descriptor
}

// attach has the kernel drop messages that follow from what a port wrote. All
// of a message are of one writer.
func attach(fd int, port uint32) error {
	const portAt = 12 // in the header of a netlink message, in the host's order
	big := binary.BigEndian.Uint32(binary.NativeEndian.AppendUint32(nil, port))
	prog, err := bpf.Assemble([]bpf.Instruction{
		bpf.LoadAbsolute{Off: portAt, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: big, SkipFalse: 1},
		bpf.RetConstant{Val: 0},
		bpf.RetConstant{Val: 1 << 30},
	})
	if err != nil {
		return err
	}
	raw := make([]unix.SockFilter, len(prog))
	for i, p := range prog {
		raw[i] = unix.SockFilter{Code: p.Op, Jt: p.Jt, Jf: p.Jf, K: p.K}
	}
	return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(raw)), Filter: &raw[0]}) //nolint:gosec // 4
}

func (e *events) close() error { return e.file.Close() }

// next waits until somebody else changed our table, or may have. It returns
// after ctx ended.
func (e *events) next(ctx context.Context) error {
	buf := make([]byte, 64<<10)
	for {
		n, err := e.file.Read(buf)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, unix.ENOBUFS):
			return nil // what was lost may have been about us
		case err != nil:
			return fmt.Errorf("listen to nftables: %w", err)
		}
		touched := false
		parse(buf[:n], func(m message) { touched = touched || m.port != e.own && ours(m) })
		if touched {
			return nil
		}
	}
}

// rest reads what else there is, for a number of milliseconds at most.
func (e *events) rest() {
	defer e.file.SetReadDeadline(time.Time{}) //nolint:errcheck // a file that takes the one takes the other
	if e.file.SetReadDeadline(time.Now().Add(time.Millisecond)) != nil {
		return
	}
	buf := make([]byte, 64<<10)
	for range 1000 {
		if _, err := e.file.Read(buf); err != nil && !errors.Is(err, unix.ENOBUFS) {
			return
		}
	}
}

// ours reports whether a notice is about our table.
func ours(m message) bool {
	if m.kind>>8 != unix.NFNL_SUBSYS_NFTABLES || len(m.data) < 4 || m.data[0] != unix.NFPROTO_INET {
		return false
	}
	switch m.kind & 0xff {
	case unix.NFT_MSG_NEWGEN, unix.NFT_MSG_TRACE:
		return false
	}
	is := false
	each(m.data[4:], func(a attr) {
		// 1, as the table's name is in all messages about what is in a table.
		is = is || a.kind == unix.NFTA_TABLE_NAME && a.str() == TableName
	})
	return is
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
	stop := context.AfterFunc(ctx, func() { t.events.file.Close() })
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
	if !t.status.Loaded || t.world == nil || t.closed {
		return // it is not ours to judge yet
	}
	t.known = false
	writes, err := t.sync()
	if err != nil {
		t.fail(err)
		t.wake()
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

func (t *Table) wake() {
	select {
	case t.again <- struct{}{}:
	default:
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
		for wait := shortestWait; !t.tryAgain(); wait = min(2*wait, longestWait) {
			select {
			case <-ctx.Done():
				return
			case <-time.After(wait):
			}
		}
	}
}

// tryAgain reports whether nothing is left to be written.
func (t *Table) tryAgain() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.status.Pending || t.world == nil || t.closed {
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
