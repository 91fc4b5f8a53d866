package store

import (
	"context"
	"errors"
)

// Pager is a [Store] that reads a kind in parts.
type Pager interface {
	// Pages calls page for all objects of a kind in key order, within a
	// namespace unless that is empty, some of them at a time, until page returns
	// an error, which it returns. Each page is as the datastore is when it is
	// read, so that no revision need be kept for a slow reader: an object that is
	// written meanwhile is seen before or after, never both; one that is made or
	// deleted meanwhile may be seen or not. An object that cannot be decoded
	// comes with its Key, Revision and Raw, and without a Value.
	Pages(ctx context.Context, kind Kind, namespace string, page func([]Object) error) error
}

// Pages reads a kind from s as [Pager] says, and holds no more than a page in
// memory where s is a Pager. Of a store that is none, objects that cannot be
// decoded are reported at the end, in an error that matches [ErrDecode].
func Pages(ctx context.Context, s Store, kind Kind, namespace string, page func([]Object) error) error {
	if p, ok := s.(Pager); ok {
		return p.Pages(ctx, kind, namespace, page)
	}
	objs, _, err := s.List(ctx, kind, namespace)
	if err != nil && !errors.Is(err, ErrDecode) {
		return err
	}
	if pageErr := page(objs); pageErr != nil {
		return pageErr
	}
	return err
}
