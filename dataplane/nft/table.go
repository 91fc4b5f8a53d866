package nft

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/dataplane/filter"
)

// Config says how a table is kept.
type Config struct {
	Log *slog.Logger // required

	// LogGroup is the group of nfnetlink_log that rules with the action Log write
	// to; 0: the kernel's log.
	LogGroup uint16

	// FlowGroup is the group that every rule writes to which decides about a
	// flow, with a prefix that says how, and staged rules too; 0: none does. It
	// costs little while nobody listens.
	FlowGroup uint16

	// LogRate is how many packets a second each rule logs at most, after a burst
	// of five times as many; see [Counter.Unlogged]. It holds for what can meet
	// every packet of a flow. 0: no bound.
	LogRate uint32

	// Mark is the bit of the packet mark that carries "allowed" from the policies
	// before connection tracking and before destination NAT to the later hooks.
	// It is used only where there is such a policy. 0: [DefaultMark].
	Mark uint32

	// Shared leaves the table open to other writers, whose changes are then
	// repaired. Otherwise nobody else can write to it, where the kernel can do
	// that (Linux 6.9).
	Shared bool

	// OnRepair is called after somebody else's change was put right, or could not
	// be; in that case again when it was after all. It must not block or call the table. Nil: nobody is told.
	OnRepair func(Repair)
}

// DefaultMark is the lowest bit of those that Calico uses.
const DefaultMark = 0x10000

// Repair is a foreign change of the table.
type Repair struct {
	At     time.Time     // when it was noticed
	Took   time.Duration // until it was put right
	Writes int           // messages to the kernel
	Err    error         // it was not put right yet
}

// Status says how the table is.
type Status struct {
	Loaded  bool   // the kernel has had a complete ruleset from us
	Owned   bool   // nobody else can write to the table
	Pending bool   // the kernel has not got what was told last
	Err     string // why, in that case
	Since   time.Time

	Endpoints, Chains, Rules, Sets, Elements int // as they should be

	Transactions, Messages uint64 // written to the kernel
	Repairs                uint64 // foreign changes put right
	LastRepair             time.Time
	LastRepairTook         time.Duration // from the kernel's notice
	LongestRepair          time.Duration
}

// Table keeps the table "inet routerd" of one network namespace. Its methods
// may be called from any goroutine.
type Table struct {
	cfg    Config
	events *events

	mu      sync.Mutex
	conn    conn
	desired *desired
	arp     arpTable
	closed  bool
	known   bool      // the journal is all that differs from the kernel
	broken  time.Time // since when somebody else's change stands; zero: none does
	status  Status
	limit   int // of a transaction's bytes, see mostBatch
	again   async.Signal
}

// Open returns a table of the network namespace of the calling thread. What is
// in the kernel stays in force until the first [Table.Apply] or
// [Table.Replace].
func Open(cfg Config) (*Table, error) {
	if cfg.Mark == 0 {
		cfg.Mark = DefaultMark
	}
	c, err := open()
	if err != nil {
		return nil, err
	}
	ev, err := listen(c.Port())
	if err != nil {
		c.Close()
		return nil, err
	}
	return &Table{
		cfg: cfg, events: ev, conn: c, desired: newDesired(cfg), limit: mostBatch,
		again: async.NewSignal(),
	}, nil
}

// Close closes the sockets of a table that [Table.Run] was not called for. The
// rules stay in force.
func (t *Table) Close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.shut()
	return t.events.close()
}

// shut closes the socket of requests. The lock is held.
func (t *Table) shut() {
	if !t.closed {
		t.closed = true
		t.conn.Close()
	}
}

// Apply takes a step, in one transaction. The first step must hold the whole
// ruleset, as the calculator's first one does: it takes the place of what the
// kernel has from before, of which it leaves alone what is the same.
//
// On an error the kernel has what it had before. The step is not lost: it is
// tried again with the next one, and by [Table.Run] until it succeeds. Only
// after [ErrUnfit] is another ruleset needed, by [Table.Replace].
func (t *Table) Apply(d filter.Delta) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.desired == nil {
		return ErrUnfit
	}
	if err := t.desired.apply(&d); err != nil {
		t.desired = nil
		t.fail(err)
		return fmt.Errorf("%w: %w", ErrUnfit, err)
	}
	return t.write()
}

// ErrUnfit says that a step did not fit the ruleset that was told before.
var ErrUnfit = errors.New("the step does not fit the ruleset")

// Replace makes a ruleset the one in force, whatever was before, in one
// transaction. Errors are those of [Table.Apply].
func (t *Table) Replace(rs *filter.Ruleset) error {
	d := whole(rs)
	t.mu.Lock()
	defer t.mu.Unlock()
	w := newDesired(t.cfg)
	if err := w.apply(&d); err != nil {
		return fmt.Errorf("%w: %w", ErrUnfit, err)
	}
	t.desired, t.known = w, false
	return t.write()
}

// whole returns the step from nothing to a ruleset.
func whole(rs *filter.Ruleset) filter.Delta {
	d := filter.Delta{Settings: &rs.Settings}
	for id, s := range rs.Sets {
		d.PutSets = append(d.PutSets, s)
		d.Members = append(d.Members, filter.MemberChange{Set: id, Add: slices.Collect(maps.Keys(rs.Members[id]))})
	}
	d.PutPolicies = slices.Collect(maps.Values(rs.Policies))
	d.PutEndpoints = slices.Collect(maps.Values(rs.Endpoints))
	return d
}

// write makes the kernel what it should be. The lock is held.
func (t *Table) write() error {
	writes, err := t.sync()
	if err != nil {
		t.fail(err)
		t.again.Set()
		return err
	}
	t.done(writes)
	return nil
}

// done takes note that the kernel has everything.
func (t *Table) done(writes int) {
	t.status.Loaded, t.status.Pending, t.status.Err, t.status.Since = true, false, "", time.Time{}
	if !t.broken.IsZero() {
		t.repaired(Repair{At: t.broken, Took: time.Since(t.broken), Writes: writes})
	}
}

func (t *Table) fail(err error) {
	if !t.status.Pending {
		t.status.Pending, t.status.Since = true, time.Now()
	}
	t.status.Err = err.Error()
}

// sync writes the difference and returns the number of messages. After an
// error, the next call begins with a dump.
func (t *Table) sync() (writes int, err error) {
	if t.closed {
		return 0, net.ErrClosed
	}
	known := t.known
	t.known = false
	var p *plan
	switch {
	case !known:
		t.arp.known = false
		p, err = t.compare()
	case t.desired.journal.empty():
		t.known = true
		return 0, nil
	default:
		var handles map[string][]handle
		if handles, err = t.handles(); err == nil {
			p = t.desired.differ(&t.desired.journal, handles)
		}
	}
	if err != nil {
		return 0, err
	}
	t.syncARP(p)
	for _, b := range p.batches(t.limit) {
		t.status.Transactions++
		t.status.Messages += uint64(len(b.subjects))
		writes += len(b.subjects)
		if err := t.conn.commit(b); err != nil {
			if t.arp.known && len(t.desired.arp) > 0 {
				t.arp.known = false // it may be what was refused: once more without
				return t.sync()
			}
			return writes, fmt.Errorf("write table %s: %w", TableName, err)
		}
	}
	t.changedARP()
	t.desired.journal = newJournal()
	t.known = true
	return writes, nil
}

// compare reads the kernel's table and plans the difference.
func (t *Table) compare() (*plan, error) {
	h, err := t.conn.dump()
	if err != nil {
		return nil, err
	}
	before, err := t.own(h)
	if err != nil {
		return nil, err
	}
	j, handles, ok := h.against(t.desired)
	if !ok {
		// Nothing of it can be used: all anew, in one transaction.
		t.cfg.Log.Warn("the nftables table is of another form and is made anew", "table", TableName)
		j, handles, _ = (&have{}).against(t.desired)
		before = append(before, func(b *batch) { b.delTable() }, t.putTable)
	}
	p := t.desired.differ(&j, handles)
	if ok {
		p.prepare = append(before, p.prepare...)
	} else {
		p.change = slices.Concat(before, p.prepare, p.change)
		p.prepare = nil
	}
	return p, nil
}

func (t *Table) putTable(b *batch) {
	flags := uint32(0)
	if t.status.Owned {
		flags = flagOwner | flagPersist
	}
	b.putTable(flags)
}

// own makes the table ours if it can be. The messages to do so come first.
func (t *Table) own(h *have) ([]func(*batch), error) {
	switch {
	case h.there && h.flags&flagOwner != 0:
		if t.status.Owned {
			return nil, nil
		}
		return nil, fmt.Errorf("table %s belongs to another process that is running: is there a second routerd on this host?", TableName)
	case t.cfg.Shared, h.there && h.flags&flagPersist == 0:
		t.status.Owned = false
		if h.there {
			return nil, nil
		}
		return []func(*batch){t.putTable}, nil
	case h.there:
		t.status.Owned = true
		return []func(*batch){t.putTable}, nil
	}
	// A table of this name that is made and deleted again tells whether the
	// kernel knows the flags.
	b := new(batch)
	b.putTable(flagOwner | flagPersist)
	b.delTable()
	err := t.conn.commit(b)
	if err != nil && !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EINVAL) {
		return nil, fmt.Errorf("make table %s: %w", TableName, err)
	}
	t.status.Owned = err == nil
	return []func(*batch){t.putTable}, nil
}

// handles reads the rules of the chains that stay and change.
func (t *Table) handles() (map[string][]handle, error) {
	var names []string
	for name, there := range t.desired.journal.chains {
		if there && t.desired.chains[name] != nil {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return nil, nil
	}
	const few = 20 // beyond, one dump of all is cheaper
	if len(names) > few {
		names = []string{""}
	}
	var out map[string][]handle
	err := undisturbed(func() error {
		out = make(map[string][]handle, len(names))
		for _, name := range names {
			if err := t.conn.rules(name, func(chain string, h handle, _ []byte) { out[chain] = append(out[chain], h) }); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read the rules of table %s: %w", TableName, err)
	}
	return out, nil
}

// Status says how the table is.
func (t *Table) Status() Status {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.status
	if t.desired == nil {
		return s
	}
	s.Endpoints, s.Chains, s.Sets = len(t.desired.endpoints), len(t.desired.chains), len(t.desired.sets)
	for _, c := range t.desired.chains {
		s.Rules += len(c.rules)
	}
	for _, set := range t.desired.sets {
		s.Elements += len(set.elems)
	}
	return s
}

// Counters reads the counters of all rules, in no particular order; those of
// the rules of the kernel that one rule of a policy became are added up. A
// counter starts at 0 again when its rule changes or the table is made anew.
func (t *Table) Counters() ([]Counter, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.closed:
		return nil, net.ErrClosed
	case t.desired == nil:
		return nil, ErrUnfit
	}
	var sums map[Counter]*Counter
	err := undisturbed(func() (err error) {
		sums, err = t.sums()
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read the counters of table %s: %w", TableName, err)
	}
	out := make([]Counter, 0, len(sums))
	for _, c := range sums {
		out = append(out, *c)
	}
	return out, nil
}

// sums adds the counters of the kernel's rules up, by what they are counters of.
func (t *Table) sums() (map[Counter]*Counter, error) {
	sums := make(map[Counter]*Counter)
	at := make(map[string]int)
	return sums, t.conn.rules("", func(name string, h handle, exprs []byte) {
		c := t.desired.chains[name]
		i := at[name]
		at[name]++
		if c == nil || i >= len(c.rules) || c.rules[i].hash != h.hash || !c.rules[i].counter.counted() {
			return
		}
		key := c.rules[i].counter.key()
		sum := sums[key]
		if sum == nil {
			sum = &key
			sums[key] = sum
		}
		all, logged := countersOf(exprs)
		sum.Packets += all.packets
		sum.Bytes += all.bytes
		switch c.rules[i].logging {
		case logsNone:
			sum.Unlogged += all.packets
		case logsSome:
			sum.Unlogged += all.packets - min(logged.packets, all.packets)
		default:
		}
	})
}
