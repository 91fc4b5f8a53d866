package ipam

import (
	"github.com/routerd/routerd/store"
)

// setRoles says what each op is to the transaction, for a datastore that writes
// one object at a time. The block decides: what it says of its addresses is so. A
// handle that is to count more is written before it, one that is to count less
// after it, so that a crash in between leaves one that counts too many; what it
// counts is a hint, and that nothing holds what it says is found by whoever
// releases it. An affinity follows its block, as [tidyStep] makes it.
//
// Releases from several blocks stand for themselves. What is given from several
// blocks at once has to be done in one step; where the datastore cannot, the callers that
// can do without give it block by block.
func (d *draft) setRoles(ops []store.Op) {
	blocks := 0
	for _, op := range ops {
		if op.Object.Key.Kind == store.KindIPAMBlock && op.Action != store.Check {
			blocks++
		}
	}
	for i := range ops {
		op := &ops[i]
		key := op.Object.Key
		switch {
		case op.Action == store.Check:
		case key.Kind == store.KindIPAMBlock:
			if blocks > 1 && !d.gives {
				op.Role = store.Prepares
			}
		case blocks == 0 || key.Kind == store.KindIPAMHandle && d.handles[key.Name].more():
			op.Role = store.Prepares
		default:
			op.Role = store.Follows
		}
	}
}

// more reports whether a handle counts more than it did of any block.
func (hd *handleDraft) more() bool {
	before, _ := hd.base.Value.(*store.Handle)
	for cidr, n := range hd.value {
		if before == nil || n > before.Block[cidr] {
			return true
		}
	}
	return false
}

// gives reports whether a step may give addresses.
func gives(s step) bool {
	switch s.(type) {
	case *handleStep, *claimsStep, *unlessStep, *tidyStep, *queryStep:
		return false
	}
	return true
}
