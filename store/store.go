package store

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

// Revision is a revision of the datastore: etcd's. An object's revision is the
// mod_revision of its key; zero means "never stored".
type Revision int64

// Object is one stored object.
type Object struct {
	Key      Key
	Revision Revision

	// Value is the decoded form: a pointer to one of the v3 types, *[Node],
	// *[WorkloadEndpoint], *[Block], *[Affinity], *[Handle], *[IPAMConfig],
	// *[Secret], *[Incarnation], *[Change], *[Unconfirmed], *[Service],
	// *[EndpointSlice] or *[ServiceCIDR].
	// Values that came from a [Store] are shared: do not change them, change a
	// copy (see [Clone]).
	Value any

	// Raw is the JSON that is stored. Writing an object that was read keeps
	// the members of Raw that Value's type does not know.
	Raw []byte
}

// Cond is what must hold of a key for a transaction to take place.
type Cond struct {
	kind condKind
	rev  Revision
}

type condKind uint8

const (
	condAny condKind = iota
	condAbsent
	condRevision
)

// Always sets no condition.
func Always() Cond { return Cond{} }

// IfAbsent holds when the key does not exist.
func IfAbsent() Cond { return Cond{kind: condAbsent} }

// IfRevision holds when the key exists and was last written at rev.
func IfRevision(rev Revision) Cond { return Cond{kind: condRevision, rev: rev} }

// RemoveOp deletes an object on condition that it is as it was read.
func RemoveOp(o Object) Op {
	return Op{If: IfRevision(o.Revision), Action: Remove, Object: Object{Key: o.Key}}
}

// CheckAbsent is the condition that a key does not exist.
func CheckAbsent(key Key) Op { return Op{If: IfAbsent(), Action: Check, Object: Object{Key: key}} }

// Revision returns the revision that c asks for, if it is an [IfRevision].
func (c Cond) Revision() (Revision, bool) { return c.rev, c.kind == condRevision }

// Absent reports whether c is [IfAbsent].
func (c Cond) Absent() bool { return c.kind == condAbsent }

// Action is what an [Op] does to its key.
type Action uint8

// The actions of an [Op].
const (
	Check  Action = iota // only test the condition
	Put                  // write Object
	Remove               // delete the key; a key that does not exist is not an error
)

// Role says what an op is to its transaction where the datastore writes one
// object at a time, as Kubernetes' API does: see [Store.Txn]. A datastore that
// does all in one step has no use for it.
type Role uint8

// The roles of an [Op].
const (
	// Decides: with this op the transaction takes place. There is at most one Put
	// or Remove that decides.
	Decides Role = iota

	// Prepares: it comes before the op that decides, and does no harm if that
	// never comes.
	Prepares

	// Follows: it comes after the op that decides. If it never comes, whoever
	// meets the objects next makes it good.
	Follows
)

// Op is one step of a transaction.
type Op struct {
	If     Cond
	Action Action
	Role   Role
	Object Object // for Check and Remove only its Key counts; for Put also Value and Raw

	// Status says of a Put that it changes nothing but the object's status. Kubernetes' API
	// takes that at a place of its own; a datastore that keeps objects whole writes the object.
	Status bool
}

// MaxOps is how many ops a transaction may have: the default limit of etcd's
// servers.
const MaxOps = 128

// Event is one change of one key.
type Event struct {
	Key    Key
	Object Object // after the change; its Value is nil when the key was deleted
	Err    error  // the key holds something that cannot be decoded; Value is nil, Raw is what is there
}

// Deleted reports whether the event says that the key is gone.
func (e Event) Deleted() bool { return e.Object.Value == nil && e.Err == nil }

// Batch is a step of a watch: all changes of one or more consecutive
// revisions, in order. A consumer that is slower than the changes finds, of a
// key that changed several times since the batch before, only the last change.
type Batch struct {
	Events   []Event
	Revision Revision // of the store after these events

	// Synced is set on the batch that completes the present state: the first
	// one of a watch, and each that follows a resynchronisation. What was known
	// before and is not there any more has been reported as deleted by then.
	Synced bool

	// Err says why the store cannot be reached; Events is then empty. The watch
	// goes on by itself; the batch is a notice, sent once per outage.
	Err error

	// Places says how far the watch is with these events, for a [Resumer]. Do not
	// change it. Nil: no watch can go on from there.
	Places map[string]Revision

	// Withheld lists the kinds of which the store does not tell what is new. Where
	// nothing is known of one, Synced is of the others alone. Do not change it.
	Withheld map[Kind]Withheld

	// OwnOnly is set as long as of WorkloadEndpoints those of one node are followed, or the
	// others' are not all told yet: see [NodeWatcher].
	OwnOnly bool
}

// Withheld says why a store does not tell of a kind, such as for want of a right.
type Withheld struct {
	Err   error
	Known bool // all was told as it was before, by this watch or an earlier one, and holds
}

// Known is what an earlier watch told.
type Known struct {
	Kinds   []Kind              // of which Objects are all there were
	Objects []Object            // with their Revision
	Places  map[string]Revision // of a batch after which this was known
	OwnOnly bool                // as in that batch: of WorkloadEndpoints Objects has those of one node
}

// Resumer is a datastore whose watches go on where those of an earlier process
// were, so that a start need not read the state.
type Resumer interface {
	// WatchFrom is [Store.Watch], but of what is known it asks only for what
	// changed since, as far as the datastore still has that.
	WatchFrom(ctx context.Context, known Known, kinds ...Kind) <-chan Batch
}

// NodeWatcher is a datastore whose watch can leave out the WorkloadEndpoints of other
// nodes, for as long as nobody asks for them.
type NodeWatcher interface {
	// WatchNode is [Resumer.WatchFrom], but the WorkloadEndpoints of other nodes than one are
	// followed only while they are in demand. Batch.OwnOnly says that they are not, or not all
	// told yet. That they are not in demand any more is no reason to report them as deleted:
	// they stay as they were told last, and when they are in demand again the difference comes
	// before OwnOnly ends.
	WatchNode(ctx context.Context, node string, others *Demand, known Known, kinds ...Kind) <-chan Batch
}

// Demand says whether something is asked for. The zero value says no. Its methods are
// safe for concurrent use.
type Demand struct {
	mu      sync.Mutex
	is      bool
	changed chan struct{} // closed at the next change; nil: nobody waits for it
}

// Set says whether it is asked for.
func (d *Demand) Set(is bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.is == is {
		return
	}
	d.is = is
	if d.changed != nil {
		close(d.changed)
		d.changed = nil
	}
}

// Is reports whether it is asked for, and returns a channel that is closed when that is
// not so any more.
func (d *Demand) Is() (is bool, changed <-chan struct{}) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.changed == nil {
		d.changed = make(chan struct{})
	}
	return d.is, d.changed
}

// Store is the datastore. Implementations are safe for concurrent use. Errors
// match [ErrNotFound], [ErrExists], [ErrConflict] or [ErrUnavailable] where
// these apply.
type Store interface {
	// Get reads one object. One that cannot be decoded is returned without its
	// Value, together with an error that matches [ErrDecode].
	Get(ctx context.Context, key Key) (Object, error)

	// List reads all objects of a kind in key order, within a namespace (a
	// node, for affinities) unless that is empty, and the revision at which
	// they were read. Objects that cannot be decoded are left out and reported
	// in the error, which matches [ErrDecode]; the others are returned with it.
	List(ctx context.Context, kind Kind, namespace string) ([]Object, Revision, error)

	// Txn does all ops in one step, or none: when a condition does not hold it
	// returns a *[ConflictError] that carries the present state of every key in
	// ops, so that the caller can try again without reading. It returns the
	// objects as written (Value, Raw and Revision set), one for each op; for
	// Check and Remove only the Key is set.
	//
	// No two ops may have one key, and there may be at most [MaxOps]: etcd
	// takes no more.
	//
	// A datastore that writes one object at a time cannot keep that. It refuses,
	// with [ErrInvalid], a transaction of which more than one Put or Remove
	// decides. Of others it looks at the conditions of the Checks, does the ops
	// that prepare, the one that decides, and those that follow, in this order. A
	// condition that does not hold ends it with the *[ConflictError], unless the
	// decision was taken: then the op is left out, and its answer has Revision 0.
	// What prepares may stand although the transaction did not take place; where
	// no op decides, each stands for itself.
	Txn(ctx context.Context, ops ...Op) ([]Object, error)

	// Watch delivers the present state of the kinds, then every change, in
	// order, until ctx ends, when the channel is closed. After a lost
	// connection or a compaction it reads the state again and delivers the
	// difference: never a gap, never a deletion of what exists.
	//
	// A datastore that writes one object at a time keeps the order within a kind.
	// Changes of two kinds may come in either order, and a batch's Revision is
	// then the highest that was told of any of them.
	//
	// etcd has the kinds of routerd's own beside those of Calico's. Of these it keeps the
	// order of each, and they come as soon as they are there: a batch's Revision is that of
	// Calico's kinds, and may be behind that of an object of routerd's own.
	Watch(ctx context.Context, kinds ...Kind) <-chan Batch

	// Close releases the connection.
	Close() error
}

// Piecewise is what a datastore that writes one object at a time has beside
// [Store].
type Piecewise interface {
	// Try asks whether ops would be done, each by itself, without doing them. The
	// error is that of the first that would not.
	Try(ctx context.Context, ops ...Op) error
}

// Errors that callers branch on.
var (
	ErrNotFound    = errors.New("not found")
	ErrExists      = errors.New("already exists")
	ErrConflict    = errors.New("changed meanwhile")
	ErrUnavailable = errors.New("datastore unavailable")
	ErrDecode      = errors.New("cannot be decoded")
	ErrInvalid     = errors.New("invalid")

	// ErrDenied: with ErrUnavailable, that the user lacks the right to it.
	ErrDenied = errors.New("permission denied")

	// ErrOneByOne: with ErrInvalid, that a transaction has several objects that a datastore
	// would have to write in one step which cannot do that. Nothing was written.
	ErrOneByOne = errors.New("the datastore writes one object at a time")
)

// ConflictError says that a condition of a transaction did not hold. It
// matches [ErrConflict], and also [ErrExists] or [ErrNotFound] when the first
// condition that failed was about existence.
type ConflictError struct {
	Key     Key      // of the first condition that failed
	Reason  error    // ErrExists, ErrNotFound or ErrConflict
	Current []Object // of each op's key, in order; Revision is 0 where the key does not exist, Value nil where it cannot be decoded
}

func (e *ConflictError) Error() string { return fmt.Sprintf("%s: %v", e.Key, e.Reason) }

// Is implements the matching that the type's comment promises.
func (e *ConflictError) Is(target error) bool { return target == ErrConflict || target == e.Reason }
