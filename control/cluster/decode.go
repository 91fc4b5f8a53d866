package cluster

import (
	"fmt"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/selector"
)

// decoder turns what is stored into what it says. It shares what many objects have
// in common. It is not safe for concurrent use.
type decoder struct {
	self      string
	published map[published]*Encaps
	selectors map[string]*selector.Selector
}

// published is what a [store.NodeEncaps] is read from.
type published struct {
	there                                bool
	accepts, uses, sends, refuses, stays string
}

// maxShared bounds what is kept to be shared: it is gone for good when its last user
// is, at a time that is not known.
const maxShared = 1024

func newDecoder(self string) decoder {
	return decoder{self: self, published: map[published]*Encaps{}, selectors: map[string]*selector.Selector{}}
}

// Decode says what an event of the datastore means on a host. [Cluster.Run] does so
// for all; this is for those who have a single one.
func Decode(self string, ev store.Event) *Change {
	d := newDecoder(self)
	return d.change(ev)
}

func (d *decoder) change(ev store.Event) *Change {
	ev.Object.Key = ev.Key
	ch := &Change{Event: ev}
	if ev.Err != nil || ev.Deleted() {
		return ch
	}
	switch v := ev.Object.Value.(type) {
	case *store.Node:
		ch.Value = d.node(v, ev.Object.Revision)
	case *v3.IPPool:
		ch.Value = d.pool(v, ev.Object.Raw)
	case *store.Block:
		ch.Value = newBlock(d.self, ev.Object, v)
	case *v3.KubeControllersConfiguration:
		ch.Value = newControllers(v, ev.Object.Raw)
	default:
		ch.Value = v
	}
	if kind, ok := store.KindOf(ev.Object.Value); !ok || kind != ev.Key.Kind {
		ch.Value, ch.Err = nil, fmt.Errorf("value is a %T", ev.Object.Value)
	}
	return ch
}

func (d *decoder) encaps(n *store.Node) *Encaps {
	a := n.Annotations
	accepts, there := a[store.AnnotationAccepts]
	key := published{there, accepts, a[store.AnnotationUses], a[store.AnnotationSends], a[store.AnnotationRefuses], a[store.AnnotationStays]}
	e := d.published[key]
	if e == nil {
		if len(d.published) >= maxShared {
			clear(d.published)
		}
		e = NewEncaps(store.NodeEncapsOf(n))
		d.published[key] = e
	}
	return e
}

// selector returns what a selector selects: nil, where it cannot be read.
func (d *decoder) selector(s string) *selector.Selector {
	sel, ok := d.selectors[s]
	if ok {
		return sel
	}
	if len(d.selectors) >= maxShared {
		clear(d.selectors)
	}
	if sel = selector.All(); s != "" {
		sel, _ = selector.Parse(s)
	}
	d.selectors[s] = sel
	return sel
}
