package kernel

import (
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/reconcile"
)

// logEach bounds the lines about objects of one kind in one go: a device that
// goes takes a hundred thousand routes with it.
const logEach = 20

// logResults tells of first refusals; later ones of the same object and waits
// are for debugging.
func (wr *writer) logResults(results []reconcile.Result[dataplane.Key, dataplane.Object]) {
	told, more := 0, 0
	for _, r := range results {
		switch r.Outcome {
		case reconcile.Refused:
			if h := wr.cfg.Hooks.Refused; h != nil {
				h(r.Op.Key.Kind())
			}
			if r.Op.Attempts > 0 {
				wr.log.Debug("refused again", "object", r.Op.Key.String(), "error", r.Err, "attempts", r.Op.Attempts+1)
				continue
			}
			if told++; told > logEach {
				more++
				continue
			}
			wr.log.Warn("refused, trying again later", "object", describe(r.Op), "error", r.Err)
		case reconcile.Blocked:
			wr.log.Debug("waiting", "object", r.Op.Key.String(), "reason", r.Err)
		case reconcile.Succeeded:
			if r.Op.Attempts > 0 {
				wr.log.Info("done after refusals", "object", describe(r.Op), "attempts", r.Op.Attempts)
			}
		}
	}
	if more > 0 {
		wr.log.Warn("refused, trying again later", "more", more)
	}
}

func describe(op reconcile.Op[dataplane.Key, dataplane.Object]) string {
	if op.Wanted {
		return op.Key.Kind().String() + " " + op.Want.String()
	}
	return "removal of " + op.Key.String()
}
