package kernel

import (
	"log/slog"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/reconcile"
)

// notice is what announced a change by another program, and when.
type notice struct {
	by string
	at time.Time
}

// drift is an object that another program changed, removed or, where it is not
// wanted, added, until it is as it should be again.
type drift struct {
	notice
	was string // how it should be
	is  string // how it was found
	// logged says that the log has it. What is over before that, as an address is
	// that went with its device, is logged then.
	logged bool
}

// driftLog logs what other programs did to our objects.
type driftLog struct {
	logger *slog.Logger
	hooks  Hooks
	want   tracker

	notice notice                             // of which the consequences are being applied
	cause  string                             // the device with which things are going
	quiet  bool                               // changes of devices are our own doing
	noted  map[dataplane.Kind][]dataplane.Key // not logged yet
	open   map[dataplane.Key]drift            // until it is put right
	went   map[string]map[dataplane.Kind]int  // what went with a device, not logged yet
}

func newDriftLog(cfg *Config, want tracker) *driftLog {
	return &driftLog{
		logger: cfg.Log, hooks: cfg.Hooks, want: want,
		noted: make(map[dataplane.Kind][]dataplane.Key), open: make(map[dataplane.Key]drift), went: make(map[string]map[dataplane.Kind]int),
	}
}

// blame says that things go with a device, until what it returns is called.
func (l *driftLog) blame(device string) (end func()) {
	l.cause = device
	return func() { l.cause = "" }
}

// note notes that another program undid what has that key.
func (l *driftLog) note(key dataplane.Key) {
	kind := key.Kind()
	if l.cause != "" && kind != dataplane.KindLink {
		if l.went[l.cause] == nil {
			l.went[l.cause] = make(map[dataplane.Kind]int)
		}
		l.went[l.cause][kind]++
		return
	}
	d := drift{notice: l.notice, was: "absent", is: "gone"}
	if w, ok := l.want.Want(key); ok {
		d.was = w.String()
	}
	if h, ok := l.want.Have(key); ok {
		d.is = h.String()
	}
	if old, ok := l.open[key]; ok {
		d.at, d.logged = old.at, old.logged // it was not put right yet
	}
	l.open[key] = d
	l.noted[kind] = append(l.noted[kind], key)
}

// log logs what was noted.
func (l *driftLog) log() {
	for kind, keys := range l.noted {
		logged := 0
		for _, key := range keys {
			d, ok := l.open[key]
			switch {
			case !ok: // put right by who undid it, or noted twice
			case logged < logEach:
				l.logger.Warn("changed by somebody else, putting it back", "object", key.String(), "was", d.was, "found", d.is, "notice", d.by)
				logged++
				d.logged = true
				l.open[key] = d
				l.logStorm(key)
			default:
				logged++
			}
		}
		if n := logged - logEach; n > 0 {
			l.logger.Warn("changed by somebody else, putting it back", "kind", kind.String(), "more", n)
		}
		l.count(kind, logged)
	}
	clear(l.noted)
	for link, kinds := range l.went {
		n := 0
		for kind, m := range kinds {
			n += m
			l.count(kind, m)
		}
		l.logger.Info("device is gone, down, or without carrier or address; putting it back when it can be", "link", link, "objects", n)
	}
	clear(l.went)
}

// logStorm logs once an object that another program keeps changing.
func (l *driftLog) logStorm(key dataplane.Key) {
	if n, due := l.want.Drifts(key); n == reconcile.CalmDrifts+1 {
		l.logger.Warn("somebody else keeps changing it: it is put back ever less often, at most once a minute; find who does and stop one of the two",
			"object", key.String(), "times", n, "next", time.Until(due).Round(time.Millisecond))
	}
}

func (l *driftLog) count(kind dataplane.Kind, n int) {
	if h := l.hooks.Drift; h != nil && n > 0 {
		h(kind, n)
	}
}

// righted notes that key is as it should be. With repaired it was us who put
// it right.
func (l *driftLog) righted(key dataplane.Key, repaired bool) {
	d, ok := l.open[key]
	if !ok {
		return
	}
	delete(l.open, key)
	if !repaired {
		if !d.logged {
			l.logger.Warn("changed by somebody else, and as it should be again", "object", key.String(), "was", d.was, "found", d.is, "notice", d.by)
			l.count(key.Kind(), 1)
		}
		return
	}
	took := time.Since(d.at)
	l.logger.Info("put back", "object", key.String(), "was", d.was, "found", d.is, "notice", d.by, "took", took)
	if h := l.hooks.Repaired; h != nil {
		h(key.Kind(), took)
	}
}

// forgetSettled forgets the drift of what is no longer wanted otherwise.
func (l *driftLog) forgetSettled() {
	for key := range l.open {
		if l.want.Settled(key) {
			delete(l.open, key)
		}
	}
}

// noticeOf names the notification that m is.
func noticeOf(m notification) notice {
	names := map[uint16]string{
		unix.RTM_NEWLINK: "RTM_NEWLINK", unix.RTM_DELLINK: "RTM_DELLINK", unix.RTM_NEWADDR: "RTM_NEWADDR", unix.RTM_DELADDR: "RTM_DELADDR",
		unix.RTM_NEWROUTE: "RTM_NEWROUTE", unix.RTM_DELROUTE: "RTM_DELROUTE", unix.RTM_NEWNEXTHOP: "RTM_NEWNEXTHOP", rtmDelNextHop: "RTM_DELNEXTHOP",
		unix.RTM_NEWNEIGH: "RTM_NEWNEIGH", unix.RTM_DELNEIGH: "RTM_DELNEIGH", unix.RTM_NEWNETCONF: "RTM_NEWNETCONF",
	}
	return notice{by: names[m.Type], at: m.at}
}
