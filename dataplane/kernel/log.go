package kernel

import (
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/reconcile"
)

// logEach bounds the lines about objects of one kind in one go: a device that
// goes takes a hundred thousand routes with it.
const logEach = 5

// drifted notes that somebody else changed or removed what has that key.
func (k *Kernel) drifted(key dataplane.Key) {
	kind := key.Kind()
	if k.cause == "" || kind == dataplane.KindLink {
		k.seen[kind] = append(k.seen[kind], key)
		return
	}
	if k.went[k.cause] == nil {
		k.went[k.cause] = make(map[dataplane.Kind]int)
	}
	k.went[k.cause][kind]++
}

// logDrift tells of what drifted noted.
func (k *Kernel) logDrift() {
	for kind, keys := range k.seen {
		for _, key := range keys[:min(len(keys), logEach)] {
			if now, ok := k.want.Have(key); ok {
				k.log.Warn("changed by somebody else, putting it back", "object", key.String(), "found", now.String())
			} else {
				k.log.Warn("gone, putting it back", "object", key.String())
			}
		}
		if n := len(keys) - logEach; n > 0 {
			k.log.Warn("changed by somebody else, putting it back", "kind", kind.String(), "more", n)
		}
		k.countDrift(kind, len(keys))
	}
	clear(k.seen)
	for link, kinds := range k.went {
		n := 0
		for kind, m := range kinds {
			n += m
			k.countDrift(kind, m)
		}
		k.log.Info("device is gone, down or without carrier; putting it back when it can be", "link", link, "objects", n)
	}
	clear(k.went)
}

func (k *Kernel) countDrift(kind dataplane.Kind, n int) {
	if h := k.cfg.Hooks.Drift; h != nil {
		h(kind, n)
	}
}

// logResults tells of first refusals; later ones of the same object and waits
// are for debugging.
func (k *Kernel) logResults(results []reconcile.Result[dataplane.Key, dataplane.Object]) {
	told, more := 0, 0
	for _, r := range results {
		switch r.Outcome {
		case reconcile.Refused:
			if h := k.cfg.Hooks.Refused; h != nil {
				h(r.Op.Key.Kind())
			}
			if r.Op.Attempts > 0 {
				k.log.Debug("refused again", "object", r.Op.Key.String(), "error", r.Err, "attempts", r.Op.Attempts+1)
				continue
			}
			if told++; told > logEach {
				more++
				continue
			}
			k.log.Warn("refused, trying again later", "object", describe(r.Op), "error", r.Err)
		case reconcile.Blocked:
			k.log.Debug("waiting", "object", r.Op.Key.String(), "reason", r.Err)
		case reconcile.Succeeded:
			if r.Op.Attempts > 0 {
				k.log.Info("done after refusals", "object", describe(r.Op), "attempts", r.Op.Attempts)
			}
		}
	}
	if more > 0 {
		k.log.Warn("refused, trying again later", "more", more)
	}
}

func describe(op reconcile.Op[dataplane.Key, dataplane.Object]) string {
	if op.Wanted {
		return op.Key.Kind().String() + " " + op.Want.String()
	}
	return "removal of " + op.Key.String()
}
