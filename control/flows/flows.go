// Package flows keeps recent verdicts of the rules on this host. Rules log them to
// groups of the kernel's nfnetlink_log, which this package listens to.
package flows

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/dataplane/nflog"
)

// The groups of nfnetlink_log that rules write to, out of the range that others
// take by habit (ulogd 0 and 1, Calico 1 to 4).
const (
	verdictGroup uint16 = 7747
	logGroup     uint16 = 7748
)

// kept is how many verdicts are kept: a few minutes of a busy host's new
// connections, in less than a megabyte.
const kept = 4096

// mostASecond is how many verdicts are taken in a second, for what rules log
// together: a flood of new connections that are allowed, or of many rules.
const mostASecond = 4096

// Log holds recent verdicts. It is safe for concurrent use.
type Log struct {
	log      *slog.Logger
	listener *nflog.Listener // nil: this kernel has nothing to listen to

	mu   sync.Mutex
	ring []nflog.Packet
	next int   // where the next one goes, once the ring is full
	err  error // why nothing is added
}

// Open listens in the network namespace of the calling thread. Where that cannot
// be, the Log stays empty and [Log.Records] says why: nothing else is the worse for
// it.
func Open(log *slog.Logger) *Log {
	f := &Log{log: log}
	f.listener, f.err = nflog.Open(verdictGroup, logGroup)
	if f.err != nil {
		log.Warn("verdicts cannot be listened to; routerctl flows shows none", "error", f.err)
	}
	return f
}

// Groups returns the groups for the verdicts of rules and for rules whose action is
// Log. Both are 0 where nothing listens: the kernel refuses a rule, and with it all
// others of the transaction, that logs to a group that it does not have.
func (f *Log) Groups() (verdicts, logged uint16) {
	if f.listener == nil {
		return 0, 0
	}
	return verdictGroup, logGroup
}

// Run adds verdicts until ctx ends, or the kernel gives no more.
func (f *Log) Run(ctx context.Context) {
	if f.listener == nil {
		return
	}
	if err := f.listener.Run(ctx, mostASecond, f.add); ctx.Err() == nil {
		f.mu.Lock()
		f.err = err
		f.mu.Unlock()
		f.log.Warn("verdicts are not listened to any more; routerctl flows shows older ones", "error", err)
	}
}

// Close releases the socket. What was recorded stays.
func (f *Log) Close() error {
	if f.listener == nil {
		return nil
	}
	if err := f.listener.Close(); !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}

func (f *Log) add(p nflog.Packet) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.ring) < kept {
		f.ring = append(f.ring, p)
		return
	}
	f.ring[f.next] = p
	f.next = (f.next + 1) % kept
}

// Records returns what is kept, oldest first, and why nothing is added any more.
func (f *Log) Records() ([]Record, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	list := make([]Record, 0, len(f.ring))
	for _, p := range slices.Concat(f.ring[f.next:], f.ring[:f.next]) {
		list = append(list, Record{Packet: p, Verdict: parse(p)})
	}
	return list, f.err
}

// Missed counts the packets that were logged and had no room.
func (f *Log) Missed() uint64 {
	if f.listener == nil {
		return 0
	}
	return f.listener.Missed()
}

// Record is a packet that a rule logged, and what the rule decided.
type Record struct {
	nflog.Packet
	Verdict
}

// Verdict is what the prefix of a logged packet says.
type Verdict struct {
	Action    string // Allow, Deny, Pass or Log
	By        string // whose rule decided
	Direction string
	Staged    bool
}

// parse reads the prefix that a rule gives to what it logs: a letter for the
// action, and whose rule it is.
func parse(p nflog.Packet) Verdict {
	letter, by, ok := strings.Cut(p.Prefix, "|")
	if !ok || p.Group == logGroup {
		return Verdict{Action: filter.Log.String(), By: p.Prefix}
	}
	v := Verdict{Action: letter, By: by}
	for _, a := range []filter.Action{filter.Allow, filter.Deny, filter.Pass, filter.Log} {
		if strings.HasPrefix(a.String(), letter) {
			v.Action = a.String()
		}
	}
	by, v.Staged = strings.CutPrefix(by, "staged ")
	for _, d := range []filter.Direction{filter.Ingress, filter.Egress} {
		if rest, ok := strings.CutPrefix(by, d.String()); ok {
			by, v.Direction = strings.TrimLeft(rest, ": "), d.String()
		}
	}
	if rule, policy, ok := strings.Cut(by, ": "); ok && policy != "" && strings.Trim(rule, "0123456789") == "" {
		by = policy + " rule " + rule
	}
	v.By = by
	return v
}
