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
	token chan struct{} // full: locked
	users int           // holder and waiters
}

func (k *keyedMutex) join(key string) *keyLock {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.locks == nil {
		k.locks = make(map[string]*keyLock)
	}
	l := k.locks[key]
	if l == nil {
		l = &keyLock{token: make(chan struct{}, 1)}
		k.locks[key] = l
	}
	l.users++
	return l
}

func (k *keyedMutex) leave(key string, l *keyLock) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if l.users--; l.users == 0 {
		delete(k.locks, key)
	}
}

// lock waits for key and returns what unlocks it, or the context's error.
func (k *keyedMutex) lock(ctx context.Context, key string) (func(), error) {
	l := k.join(key)
	select {
	case l.token <- struct{}{}:
		return k.unlocker(key, l), nil
	case <-ctx.Done():
		k.leave(key, l)
		return nil, ctx.Err()
	}
}

// tryLock locks key unless somebody has it.
func (k *keyedMutex) tryLock(key string) (func(), bool) {
	l := k.join(key)
	select {
	case l.token <- struct{}{}:
		return k.unlocker(key, l), true
	default:
		k.leave(key, l)
		return nil, false
	}
}

func (k *keyedMutex) unlocker(key string, l *keyLock) func() {
	return func() {
		<-l.token
		k.leave(key, l)
	}
}
