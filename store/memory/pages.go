package memory

import (
	"context"
	"fmt"
	"strings"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/internal/backend"
)

// pageSize is small, so that tests meet several pages.
const pageSize = 16

var _ store.Pager = (*Store)(nil)

// Pages implements [store.Pager].
func (s *Store) Pages(ctx context.Context, kind store.Kind, namespace string, page func([]store.Object) error) error {
	prefix := store.PathPrefix(kind, namespace)
	if prefix == "" {
		return fmt.Errorf("read: %w: unknown kind %q", store.ErrInvalid, kind)
	}
	for after := ""; ; {
		if err := s.enter(ctx); err != nil {
			return fmt.Errorf("read %s: %w", kind, err)
		}
		items := s.items(func(k store.Key, path string) bool {
			return k.Kind == kind && strings.HasPrefix(path, prefix) && path > after
		})
		s.mu.Unlock()
		more := len(items) > pageSize
		items = items[:min(len(items), pageSize)]
		objs := make([]store.Object, 0, len(items))
		for _, it := range items {
			// What cannot be decoded comes without its value.
			obj, _ := backend.Object(it.Key, it.Revision, it.Raw)
			obj.Key = it.Key
			objs = append(objs, obj)
			after = it.Key.Path()
		}
		if err := page(objs); err != nil {
			return err
		}
		if !more {
			return nil
		}
	}
}
