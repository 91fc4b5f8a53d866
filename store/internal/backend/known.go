package backend

import (
	"iter"

	"github.com/routerd/routerd/store"
)

// known is what was delivered of a key.
type known struct {
	rev store.Revision
	sum uint64 // of what is stored
}

// delivered says what was delivered of which key. A cluster has a hundred thousand keys, of a
// few kinds, and of most kinds none with a namespace: so the keys of a kind are apart, and have
// room for a namespace where there is one.
type delivered map[store.Kind]*ofKind

type ofKind struct {
	plain  map[string]known
	spaced map[spacedName]known // of names in a namespace
}

type spacedName struct{ namespace, name string }

func (d delivered) get(k store.Key) (v known, ok bool) {
	switch of := d[k.Kind]; {
	case of == nil:
	case k.Namespace == "":
		v, ok = of.plain[k.Name]
	default:
		v, ok = of.spaced[spacedName{k.Namespace, k.Name}]
	}
	return v, ok
}

func (d delivered) set(k store.Key, v known) {
	of := d[k.Kind]
	if of == nil {
		of = &ofKind{plain: make(map[string]known), spaced: make(map[spacedName]known)}
		d[k.Kind] = of
	}
	if k.Namespace == "" {
		of.plain[k.Name] = v
	} else {
		of.spaced[spacedName{k.Namespace, k.Name}] = v
	}
}

// grow makes room for items.
func (d delivered) grow(items []Item) {
	plain, spaced := map[store.Kind]int{}, map[store.Kind]int{}
	for _, it := range items {
		if plain[it.Key.Kind]++; it.Key.Namespace != "" {
			spaced[it.Key.Kind]++
		}
	}
	for kind, n := range plain {
		if d[kind] == nil {
			d[kind] = &ofKind{plain: make(map[string]known, n-spaced[kind]), spaced: make(map[spacedName]known, spaced[kind])}
		}
	}
}

func (d delivered) remove(k store.Key) {
	switch of := d[k.Kind]; {
	case of == nil:
	case k.Namespace == "":
		delete(of.plain, k.Name)
	default:
		delete(of.spaced, spacedName{k.Namespace, k.Name})
	}
}

// keys yields the keys of which something was delivered.
func (d delivered) keys() iter.Seq[store.Key] {
	return func(yield func(store.Key) bool) {
		for kind, of := range d {
			for name := range of.plain {
				if !yield(store.Key{Kind: kind, Name: name}) {
					return
				}
			}
			for n := range of.spaced {
				if !yield(store.Key{Kind: kind, Namespace: n.namespace, Name: n.name}) {
					return
				}
			}
		}
	}
}
