package kernel

import (
	"github.com/routerd/routerd/dataplane/reconcile"
)

// logEach bounds the lines about objects of one kind in one go: a device that
// goes takes a hundred thousand routes with it.
const logEach = 20

// logResults logs first refusals; later ones of the same object and waits
// are for debugging.
func (wr *writer) logResults(results []result) {
	told, more := 0, 0
	for _, r := range results {
		switch r.Outcome {
		case reconcile.Refused:
			if h := wr.cfg.Hooks.Refused; h != nil {
				h(r.Op.Key.kind())
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

func describe(o op) string {
	if o.Wanted {
		return o.Key.kind().String() + " " + o.Want.whole(o.Key).String()
	}
	return "removal of " + o.Key.String()
}
