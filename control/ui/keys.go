package ui

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"sync"
	"time"
)

const (
	// tokenLife is for how long a token may be used: as long as it takes to copy an address into a browser.
	tokenLife = 5 * time.Minute
	// sessionLife is for how long a browser stays let in: a day's work.
	sessionLife = 12 * time.Hour
	// maxKeys bounds the tokens, and the sessions, that there are at once. The oldest ends when there would be more.
	maxKeys = 64
)

// keys are secrets that are good until some time. Only their hashes are kept, so that the time of a look-up says
// nothing of a secret. It is safe for concurrent use.
type keys struct {
	now  func() time.Time
	life time.Duration

	mu  sync.Mutex
	end map[[sha256.Size]byte]time.Time
}

func newKeys(life time.Duration, now func() time.Time) *keys {
	return &keys{now: now, life: life, end: map[[sha256.Size]byte]time.Time{}}
}

// make returns a new secret and when it ends.
func (k *keys) make() (secret string, end time.Time) {
	var b [32]byte
	rand.Read(b[:]) //nolint:errcheck // crypto/rand: it never returns an error
	secret = base64.RawURLEncoding.EncodeToString(b[:])
	k.mu.Lock()
	defer k.mu.Unlock()
	now := k.now()
	var oldest [sha256.Size]byte
	for h, t := range k.end {
		if !t.After(now) {
			delete(k.end, h)
			continue
		}
		if o, ok := k.end[oldest]; !ok || t.Before(o) {
			oldest = h
		}
	}
	if len(k.end) >= maxKeys {
		delete(k.end, oldest)
	}
	end = now.Add(k.life)
	k.end[sha256.Sum256([]byte(secret))] = end
	return secret, end
}

// valid returns when a secret ends, and whether it is good.
func (k *keys) valid(secret string) (end time.Time, ok bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	end, ok = k.end[sha256.Sum256([]byte(secret))]
	return end, ok && end.After(k.now())
}

// use reports whether a secret is good, which it then is no more.
func (k *keys) use(secret string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	h := sha256.Sum256([]byte(secret))
	end, ok := k.end[h]
	delete(k.end, h)
	return ok && end.After(k.now())
}
