package store

import (
	"context"
	"sync"
)

// KeyLocker is a [Store] that lets the writers of one key within this process
// queue. [Modify] uses it where it is there: a thousand rivals that only find
// out from the datastore that they are rivals keep each other from getting
// anything done.
type KeyLocker interface {
	// LockKey waits for the key's lock and returns what releases it. Locks are
	// a courtesy among callers of [Modify]: nothing else heeds them.
	LockKey(ctx context.Context, key Key) (release func(), err error)
}

// KeyLocks implements [KeyLocker] for a store that embeds it. The zero value
// is ready for use.
type KeyLocks struct {
	mu    sync.Mutex
	locks map[Key]*keyLock
}

// keyLock is one key's lock; it exists while somebody holds or awaits it.
type keyLock struct {
	held  chan struct{} // of size one: full while held
	users int
}

// LockKey implements [KeyLocker]. Those who wait get the lock in the order in
// which they came.
func (l *KeyLocks) LockKey(ctx context.Context, key Key) (release func(), err error) {
	l.mu.Lock()
	k := l.locks[key]
	if k == nil {
		if l.locks == nil {
			l.locks = make(map[Key]*keyLock)
		}
		k = &keyLock{held: make(chan struct{}, 1)}
		l.locks[key] = k
	}
	k.users++
	l.mu.Unlock()

	select {
	case k.held <- struct{}{}:
		return func() {
			<-k.held
			l.leave(key, k)
		}, nil
	case <-ctx.Done():
		l.leave(key, k)
		return nil, ctx.Err()
	}
}

func (l *KeyLocks) leave(key Key, k *keyLock) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if k.users--; k.users == 0 {
		delete(l.locks, key)
	}
}
