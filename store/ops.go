package store

import (
	"bytes"
	"context"
	crand "crypto/rand"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/routerd/routerd/control/async"
)

// Create stores a new v3 resource and returns it as written. It gives it a
// random uid, unless it has one, and the present time as creationTimestamp; it
// does not change value. A value with a resourceVersion is refused
// ([ErrInvalid]), as calicoctl does: it is a copy of a stored object, whose
// verb is replace. [ErrExists] says that the key is taken.
func Create(ctx context.Context, s Store, value any) (Object, error) {
	key, err := KeyOf(value)
	if err != nil {
		return Object{}, fmt.Errorf("create: %w", err)
	}
	if v := Meta(value).ResourceVersion; v != "" {
		return Object{}, fmt.Errorf("create %s: %w: metadata.resourceVersion %q: leave it out, or replace the object that has it", key, ErrInvalid, v)
	}
	obj, err := put(ctx, s, Op{If: IfAbsent(), Action: Put, Object: Object{Key: key, Value: newborn(value)}})
	if err != nil {
		return Object{}, fmt.Errorf("create %w", err)
	}
	return obj, nil
}

// CreateAll stores new v3 resources in one transaction, all of them or none, and
// returns them as written; otherwise it is as [Create]. There may be at most
// [MaxOps].
func CreateAll(ctx context.Context, s Store, values ...any) ([]Object, error) {
	ops := make([]Op, 0, len(values))
	for _, value := range values {
		key, err := KeyOf(value)
		if err != nil {
			return nil, fmt.Errorf("create: %w", err)
		}
		if v := Meta(value).ResourceVersion; v != "" {
			return nil, fmt.Errorf("create %s: %w: metadata.resourceVersion %q: leave it out, or replace the object that has it", key, ErrInvalid, v)
		}
		ops = append(ops, Op{If: IfAbsent(), Action: Put, Object: Object{Key: key, Value: newborn(value)}})
	}
	objs, err := s.Txn(ctx, ops...)
	if err != nil {
		return nil, fmt.Errorf("create %d resources: %w", len(values), err)
	}
	return objs, nil
}

// Replace stores a v3 resource with a new identity, as [Create] does, in the place of
// what was written at a revision, of which it keeps nothing: what cannot be decoded.
// The error matches [ErrConflict] when that was changed meanwhile.
func Replace(ctx context.Context, s Store, rev Revision, value any) (Object, error) {
	key, err := KeyOf(value)
	if err != nil {
		return Object{}, fmt.Errorf("replace: %w", err)
	}
	obj, err := put(ctx, s, Op{If: IfRevision(rev), Action: Put, Object: Object{Key: key, Value: newborn(value)}})
	if err != nil {
		return Object{}, fmt.Errorf("replace %w", err)
	}
	return obj, nil
}

// newborn returns a copy of a v3 value with the identity of a new object.
func newborn(value any) any {
	c := Clone(value)
	meta := Meta(c)
	if meta.UID == "" {
		meta.UID = newUID()
	}
	meta.CreationTimestamp = now()
	return c
}

// now is the present time as metadata hold it: in UTC, to the second.
func now() metav1.Time { return metav1.NewTime(time.Now().UTC().Truncate(time.Second)) }

// newUID returns a random UUID (RFC 9562, version 4).
func newUID() types.UID {
	var b [16]byte
	crand.Read(b[:]) //nolint:errcheck // crypto/rand.Read never fails: it ends the program rather
	b[6] = b[6]&0x0f | 0x40
	b[8] = b[8]&0x3f | 0x80
	return types.UID(fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:]))
}

// inherit returns value with the identity that raw, its earlier form, gives it
// where it has none.
func inherit(key Key, value any, raw []byte) (any, error) {
	meta := Meta(value)
	if meta == nil || meta.UID != "" && !meta.CreationTimestamp.IsZero() || len(raw) == 0 {
		return value, nil
	}
	old, err := Decode(key, raw)
	if err != nil {
		return nil, err
	}
	c := Clone(value)
	meta = Meta(c)
	if meta.UID == "" {
		meta.UID = Meta(old).UID
	}
	if meta.CreationTimestamp.IsZero() {
		meta.CreationTimestamp = Meta(old).CreationTimestamp
	}
	return c, nil
}

func put(ctx context.Context, s Store, op Op) (Object, error) {
	objs, err := s.Txn(ctx, op)
	if err != nil {
		return Object{}, err
	}
	return objs[0], nil
}

// What bounds [Modify]. Rivals within one process queue where the store can
// make them; what is left are other hosts, one writer each. With the pause at
// its longest, some hundred of those leave each other room.
const (
	modifyTries    = 100
	modifyEager    = 3 // tries without a pause: the common case is one rival
	modifyPauseMin = 4 * time.Millisecond
	modifyPauseMax = time.Second
)

// Modify reads an object, lets change make its new value, and writes that on
// condition that nobody else wrote meanwhile; else it tries again with what is
// there now, a bounded number of times, with growing random pauses.
//
// change gets an object with Revision 0 and a nil Value when the key does not
// exist, and what it returns is then created. It must not change cur.Value:
// see [Clone], and it must not call Modify for the same key. It may run many
// times. When it returns nil, or what is stored
// already, nothing is written and cur is returned; when it returns an error,
// Modify returns that error as it is.
func Modify(ctx context.Context, s Store, key Key, change func(cur Object) (any, error)) (Object, error) {
	return modify(ctx, s, key, false, change)
}

// ModifyStatus is [Modify] for a change of nothing but the object's status: see
// [Op.Status]. There has to be the object.
func ModifyStatus(ctx context.Context, s Store, key Key, change func(cur Object) (any, error)) (Object, error) {
	return modify(ctx, s, key, true, change)
}

func modify(ctx context.Context, s Store, key Key, status bool, change func(cur Object) (any, error)) (Object, error) {
	if l, ok := s.(KeyLocker); ok {
		release, err := l.LockKey(ctx, key)
		if err != nil {
			return Object{}, fmt.Errorf("modify %s: wait for other writers: %w", key, err)
		}
		defer release()
	}
	cur, err := getOrAbsent(ctx, s, key)
	if err != nil {
		return Object{}, fmt.Errorf("modify %s: %w", key, err)
	}
	for try := 1; ; try++ {
		value, err := change(cur)
		if err != nil {
			return Object{}, err
		}
		op, same, err := PutOp(cur, value)
		if err != nil {
			return Object{}, fmt.Errorf("modify %s: %w", key, err)
		}
		if same {
			return cur, nil
		}
		op.Status = status
		written, err := put(ctx, s, op)
		if err == nil {
			return written, nil
		}
		var conflict *ConflictError
		if !errors.As(err, &conflict) {
			return Object{}, fmt.Errorf("modify %s: %w", key, err)
		}
		if try == modifyTries {
			return Object{}, fmt.Errorf("modify %s: after %d tries: %w", key, try, err)
		}
		cur = conflict.Current[0]
		if try < modifyEager && (cur.Value != nil || cur.Revision == 0) {
			continue
		}
		// What the conflict reported is out of date after a pause.
		if err := pause(ctx, try-modifyEager); err != nil {
			return Object{}, fmt.Errorf("modify %s: %w", key, err)
		}
		if cur, err = getOrAbsent(ctx, s, key); err != nil {
			return Object{}, fmt.Errorf("modify %s: %w", key, err)
		}
	}
}

// getOrAbsent is Get, except that a key that does not exist gives an object
// with revision 0.
func getOrAbsent(ctx context.Context, s Store, key Key) (Object, error) {
	obj, err := s.Get(ctx, key)
	if errors.Is(err, ErrNotFound) {
		return Object{Key: key}, nil
	}
	return obj, err
}

// PutOp returns the write that turns cur, an object as it was read, into value, on
// condition that nobody wrote meanwhile; same: it is that already. With Revision 0 it
// creates the object as [Create] does, else it is [Update]'s.
func PutOp(cur Object, value any) (op Op, same bool, err error) {
	if value == nil {
		return Op{}, true, nil
	}
	if cur.Revision == 0 {
		if Meta(value) != nil {
			value = newborn(value)
		}
		return Op{If: IfAbsent(), Action: Put, Object: Object{Key: cur.Key, Value: value}}, false, nil
	}
	if value, err = inherit(cur.Key, value, cur.Raw); err != nil {
		return Op{}, false, err
	}
	raw, err := Encode(cur.Key, value, cur.Raw)
	if err != nil {
		return Op{}, false, err
	}
	if bytes.Equal(raw, cur.Raw) {
		return Op{}, true, nil
	}
	return Op{If: IfRevision(cur.Revision), Action: Put, Object: Object{Key: cur.Key, Value: value, Raw: cur.Raw}}, false, nil
}

// pause waits a random time, up to a limit that doubles with n.
func pause(ctx context.Context, n int) error {
	limit := modifyPauseMax
	if n < 16 {
		limit = min(limit, modifyPauseMin<<n)
	}
	return async.Sleep(ctx, rand.N(limit))
}

// Delete removes an object: whatever is there when rev is zero, else on
// condition that it was last written at rev. The error matches [ErrNotFound]
// when the key does not exist and [ErrConflict] when it was written since.
func Delete(ctx context.Context, s Store, key Key, rev Revision) error {
	if rev != 0 {
		if _, err := s.Txn(ctx, Op{If: IfRevision(rev), Action: Remove, Object: Object{Key: key}}); err != nil {
			return fmt.Errorf("delete %w", err)
		}
		return nil
	}
	cur, err := s.Get(ctx, key)
	if errors.Is(err, ErrDecode) && cur.Revision != 0 {
		err = nil // what cannot be read can still be deleted
	}
	for try := 1; err == nil; try++ {
		_, err = s.Txn(ctx, Op{If: IfRevision(cur.Revision), Action: Remove, Object: Object{Key: key}})
		var conflict *ConflictError
		if err == nil {
			return nil
		}
		if errors.As(err, &conflict) && try < modifyTries && conflict.Current[0].Revision != 0 {
			cur, err = conflict.Current[0], nil
		}
	}
	return fmt.Errorf("delete %w", err)
}
