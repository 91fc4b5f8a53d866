package kernel

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/reconcile"
)

// notice is what told of a change by somebody else, and when.
type notice struct {
	by string
	at time.Time
}

// drift is an object that somebody else changed, removed or, where it is not
// wanted, added, until it is as it should be again.
type drift struct {
	notice
	was string // how it should be
	is  string // how it was found
	// told says that the log has it. What is over before it is told, as an
	// address is that went with its device, is told then.
	told bool
}

// drifted notes that somebody else undid what has that key.
func (k *Kernel) drifted(key dataplane.Key) {
	kind := key.Kind()
	if k.cause != "" && kind != dataplane.KindLink {
		if k.went[k.cause] == nil {
			k.went[k.cause] = make(map[dataplane.Kind]int)
		}
		k.went[k.cause][kind]++
		return
	}
	d := drift{notice: k.notice, was: "absent", is: "gone"}
	if w, ok := k.want.Want(key); ok {
		d.was = w.String()
	}
	if h, ok := k.want.Have(key); ok {
		d.is = h.String()
	}
	if old, ok := k.adrift[key]; ok {
		d.at, d.told = old.at, old.told // it was not put right yet
	}
	k.adrift[key] = d
	k.seen[kind] = append(k.seen[kind], key)
}

// logDrift tells of what drifted noted.
func (k *Kernel) logDrift() {
	for kind, keys := range k.seen {
		told := 0
		for _, key := range keys {
			d, ok := k.adrift[key]
			switch {
			case !ok: // put right by who undid it, or noted twice
			case told < logEach:
				k.log.Warn("changed by somebody else, putting it back", "object", key.String(), "was", d.was, "found", d.is, "notice", d.by)
				told++
				d.told = true
				k.adrift[key] = d
				k.logStorm(key)
			default:
				told++
			}
		}
		if n := told - logEach; n > 0 {
			k.log.Warn("changed by somebody else, putting it back", "kind", kind.String(), "more", n)
		}
		k.countDrift(kind, told)
	}
	clear(k.seen)
	for link, kinds := range k.went {
		n := 0
		for kind, m := range kinds {
			n += m
			k.countDrift(kind, m)
		}
		k.log.Info("device is gone, down, or without carrier or address; putting it back when it can be", "link", link, "objects", n)
	}
	clear(k.went)
}

// logStorm tells once of an object that somebody keeps changing.
func (k *Kernel) logStorm(key dataplane.Key) {
	if n, due := k.want.Losses(key); n == reconcile.CalmLosses+1 {
		k.log.Warn("somebody else keeps changing it: it is put back ever less often, at most once a minute; find who does and stop one of the two",
			"object", key.String(), "times", n, "next", time.Until(due).Round(time.Millisecond))
	}
}

func (k *Kernel) countDrift(kind dataplane.Kind, n int) {
	if h := k.cfg.Hooks.Drift; h != nil && n > 0 {
		h(kind, n)
	}
}

// righted notes that key is as it should be. With repaired it was us who put
// it right.
func (k *Kernel) righted(key dataplane.Key, repaired bool) {
	d, ok := k.adrift[key]
	if !ok {
		return
	}
	delete(k.adrift, key)
	if !repaired {
		if !d.told {
			k.log.Warn("changed by somebody else, and as it should be again", "object", key.String(), "was", d.was, "found", d.is, "notice", d.by)
			k.countDrift(key.Kind(), 1)
		}
		return
	}
	took := time.Since(d.at)
	k.log.Info("put back", "object", key.String(), "was", d.was, "found", d.is, "notice", d.by, "took", took)
	if h := k.cfg.Hooks.Repaired; h != nil {
		h(key.Kind(), took)
	}
}

// forgetDrift forgets the drift of what is no longer wanted otherwise.
func (k *Kernel) forgetDrift() {
	for key := range k.adrift {
		if k.want.Settled(key) {
			delete(k.adrift, key)
		}
	}
}

// noticeOf names the notification that m is.
func noticeOf(m message) notice {
	names := map[uint16]string{
		unix.RTM_NEWLINK: "RTM_NEWLINK", unix.RTM_DELLINK: "RTM_DELLINK", unix.RTM_NEWADDR: "RTM_NEWADDR", unix.RTM_DELADDR: "RTM_DELADDR",
		unix.RTM_NEWROUTE: "RTM_NEWROUTE", unix.RTM_DELROUTE: "RTM_DELROUTE", unix.RTM_NEWNEXTHOP: "RTM_NEWNEXTHOP", rtmDelNextHop: "RTM_DELNEXTHOP",
		unix.RTM_NEWNEIGH: "RTM_NEWNEIGH", unix.RTM_DELNEIGH: "RTM_DELNEIGH", unix.RTM_NEWNETCONF: "RTM_NEWNETCONF",
	}
	return notice{by: names[m.typ], at: m.at}
}
