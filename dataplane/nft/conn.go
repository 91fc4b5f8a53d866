package nft

import (
	"cmp"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane/internal/nl"
)

// sendBuffer must hold a transaction: it is one message to the socket.
// receiveBuffer holds the answers.
const (
	sendBuffer    = 256 << 20
	receiveBuffer = 8 << 20
)

// conn carries requests to nf_tables.
type conn struct{ *nl.Conn }

func open() (conn, error) {
	c, err := nl.Dial(unix.NETLINK_NETFILTER, sendBuffer, receiveBuffer)
	return conn{c}, err
}

// batch collects the messages of one transaction.
type batch struct {
	nl.Batch
	family   uint8  // of the table; 0: that of IP packets
	table    string // its name; empty: [TableName]
	subjects []subject
}

func (b *batch) tableName() string { return cmp.Or(b.table, TableName) }

// subject says what a message is about, for errors.
type subject struct {
	verb, what, name string
}

func (b *batch) empty() bool { return len(b.subjects) == 0 }

// add appends a request about something of our table.
func (b *batch) add(kind, flags uint16, s subject, fn func()) {
	b.subjects = append(b.subjects, s)
	beginOf(&b.Batch, cmp.Or(b.family, unix.NFPROTO_INET), kind, flags)
	fn()
}

func begin(b *nl.Batch, kind, flags uint16) { beginOf(b, unix.NFPROTO_INET, kind, flags) }

func beginOf(b *nl.Batch, family uint8, kind, flags uint16) {
	b.Begin(unix.NFNL_SUBSYS_NFTABLES<<8|kind, flags, family, unix.NFNETLINK_V0, 0, 0)
}

// refusedError is the kernel's no to one message of a transaction, of which
// nothing was done.
type refusedError struct {
	subject
	err error
}

func (e *refusedError) Error() string {
	return fmt.Sprintf("%s %s %s: %v", e.verb, e.what, e.name, e.err)
}

func (e *refusedError) Unwrap() error { return e.err }

// commit carries out a transaction: all of it or nothing.
func (c conn) commit(b *batch) error {
	errs, err := c.Transaction(unix.NFNL_SUBSYS_NFTABLES, &b.Batch)
	if err != nil {
		return fmt.Errorf("transaction of %d messages: %w", b.Len(), err)
	}
	if i, err := nl.First(errs); err != nil {
		return &refusedError{b.subjects[i], err}
	}
	return nil
}

// request asks for something and calls fn with the attributes of each answer.
func (c conn) request(kind uint16, ask func(*nl.Batch), fn func([]byte)) error {
	var b nl.Batch
	begin(&b, kind, 0)
	ask(&b)
	return c.Do(&b, func(_ int, m nl.Message) { fn(attributes(m)) })
}

// list is request for a dump.
func (c conn) list(kind uint16, ask func(*nl.Batch), fn func([]byte)) error {
	var b nl.Batch
	begin(&b, kind, 0)
	if ask != nil {
		ask(&b)
	}
	return c.Dump(&b, func(m nl.Message) { fn(attributes(m)) })
}

// attributes returns what follows struct nfgenmsg.
func attributes(m nl.Message) []byte { return m.Body[min(4, len(m.Body)):] }
