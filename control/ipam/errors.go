package ipam

import (
	"errors"
	"strings"
)

// Errors that callers branch on. They come wrapped in a text that says which
// pools and blocks are meant, mostly as an *[Error].
var (
	// ErrNoPool: no pool may serve the request. The *[Error] lists each pool
	// with the reason why it may not.
	ErrNoPool = errors.New("no usable IP pool")

	// ErrUnknownPool: a pool that the request names does not exist or is
	// disabled.
	ErrUnknownPool = errors.New("unknown IP pool")

	// ErrExhausted: the pools have no address left that this node may take.
	ErrExhausted = errors.New("no address left")

	// ErrBlockLimit: this node's blocks are full, and it may hold no more.
	ErrBlockLimit = errors.New("block limit reached")

	// ErrTaken: the address that was asked for is held by another handle.
	ErrTaken = errors.New("address already assigned")

	// ErrCooldown: with ErrTaken, that the address is free, which was
	// released not long ago.
	ErrCooldown = errors.New("resting after its release")

	// ErrOutsidePools: no enabled pool contains the address.
	ErrOutsidePools = errors.New("address outside every enabled IP pool")

	// ErrStrictAffinity: the address lies in another node's block, and
	// borrowing is off.
	ErrStrictAffinity = errors.New("address belongs to another node's block")

	// ErrNotHolder: the address that was to be released is held by another
	// handle, or was given anew since.
	ErrNotHolder = errors.New("address held by another")

	// ErrNodeMissing: the node is not registered in the datastore.
	ErrNodeMissing = errors.New("node not registered")

	// ErrNotReady: the datastore's state has not been read yet.
	ErrNotReady = errors.New("ipam not ready")

	// ErrStopped: [Allocator.Run] has returned.
	ErrStopped = errors.New("ipam stopped")

	// ErrInvalidRequest: the request itself is wrong.
	ErrInvalidRequest = errors.New("invalid request")
)

// PoolReason is a pool and why it cannot serve a request.
type PoolReason struct {
	Pool   string // its name
	Reason string
}

// Error is a refusal that concerns pools.
type Error struct {
	Reason  error  // one of the sentinels
	Message string // what was asked and what to do
	Pools   []PoolReason
}

func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString(e.Reason.Error())
	b.WriteString(": ")
	b.WriteString(e.Message)
	for i, p := range e.Pools {
		sep := "; "
		if i == 0 {
			sep = " ("
		}
		b.WriteString(sep + "pool " + p.Pool + ": " + p.Reason)
	}
	if len(e.Pools) > 0 {
		b.WriteString(")")
	}
	return b.String()
}

// Unwrap returns the sentinel.
func (e *Error) Unwrap() error { return e.Reason }
