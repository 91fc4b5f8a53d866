package attach

import (
	"context"
	"sync"
)

// keyedMutex is a mutex for each key. The zero value is ready.
type keyedMutex struct {
	mu    sync.Mutex
	locks map[string]*keyLock
}

type keyLock struct {
	token   chan struct{} // full: locked
	users   int           // holder and waiters
	waiters int
	wanted  func() // called when a caller waits for the holder; may be nil
}

// yield has wanted called, once or more, when a caller waits for a key that the
// caller has locked, or does already. It must not block.
func (k *keyedMutex) yield(key string, wanted func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	l := k.locks[key]
	if l == nil {
		return // the lock has another name since
	}
	if l.wanted = wanted; l.waiters > 0 {
		wanted()
	}
}

func (k *keyedMutex) join(key string) *keyLock {
	k.mu.Lock()
	defer k.mu.Unlock()
	l := k.at(key)
	l.users++
	return l
}

// at returns the lock of a key. The caller has mu.
func (k *keyedMutex) at(key string) *keyLock {
	if k.locks == nil {
		k.locks = make(map[string]*keyLock)
	}
	l := k.locks[key]
	if l == nil {
		l = &keyLock{token: make(chan struct{}, 1)}
		k.locks[key] = l
	}
	return l
}

func (k *keyedMutex) leave(key string, l *keyLock) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if l.users--; l.users == 0 {
		delete(k.locks, key)
	}
}

// lock waits for key and returns what unlocks it, or the context's error. A
// holder that yields is called on to do so.
func (k *keyedMutex) lock(ctx context.Context, key string) (func(), error) {
	return k.acquire(ctx, key, true)
}

// await is lock for who has time: no holder is disturbed.
func (k *keyedMutex) await(ctx context.Context, key string) (func(), error) {
	return k.acquire(ctx, key, false)
}

func (k *keyedMutex) acquire(ctx context.Context, key string, urgent bool) (func(), error) {
	if unlock, ok := k.tryLock(key); ok {
		return unlock, nil
	}
	l := k.join(key)
	if urgent {
		k.wait(l, 1)
		defer k.wait(l, -1)
	}
	select {
	case l.token <- struct{}{}:
		return k.unlocker(key, l), nil
	case <-ctx.Done():
		k.leave(key, l)
		return nil, ctx.Err()
	}
}

// wait counts who waits for a lock, and calls on its holder.
func (k *keyedMutex) wait(l *keyLock, n int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if l.waiters += n; n > 0 && l.wanted != nil {
		l.wanted()
	}
}

// tryLock locks key unless it is locked.
func (k *keyedMutex) tryLock(key string) (func(), bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	l := k.at(key)
	select {
	case l.token <- struct{}{}:
		l.users++
		return k.unlocker(key, l), true
	default:
		return nil, false
	}
}

func (k *keyedMutex) unlocker(key string, l *keyLock) func() {
	return func() {
		k.mu.Lock()
		l.wanted = nil
		k.mu.Unlock()
		<-l.token
		k.leave(key, l)
	}
}
