package foreign

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/routerd/routerd/dataplane/felix"
)

// Felix keeps what Calico's agent left in this host's packet filter. Its zero value
// is ready. It is safe for concurrent use.
type Felix struct {
	mu     sync.Mutex
	list   []felix.Rest
	looked time.Time
	failed bool // the last look
}

// lookAgain is how long an answer holds while something is left. Of iptables
// the kernel gives no notice.
const lookAgain = 10 * time.Second

// Look returns what is left. It lists the packet filter with find at the first call,
// and later as long as there was something or it could not be seen.
func (f *Felix) Look(now time.Time, find func() ([]felix.Rest, error), log *slog.Logger) []felix.Rest {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.looked.IsZero() && (len(f.list) == 0 && !f.failed || now.Sub(f.looked) < lookAgain) {
		return f.list
	}
	f.looked = now
	list, err := find()
	if err != nil && !f.failed {
		log.Warn("it cannot be seen whether Calico's Felix left rules in the packet filter", "error", err)
	}
	f.failed = err != nil
	// What a failing look does not find may be there all the same.
	switch before := f.list; {
	case err != nil && (len(before) > 0 || len(list) == 0):
	case len(list) > 0 && len(before) == 0:
		f.list = list
		log.Warn("Calico's Felix left rules on this host; they judge packets beside ours", "found", felixNames(list), "cure", "routerd cleanup --calico")
	default:
		f.list = list
		if len(list) == 0 && len(before) > 0 {
			log.Info("nothing of Calico's Felix is left in the packet filter")
		}
	}
	return f.list
}

func felixNames(list []felix.Rest) string {
	names := make([]string, 0, len(list))
	for _, r := range list {
		names = append(names, r.String())
	}
	return strings.Join(names, ", ")
}

// FelixError says what is left of Felix's rules; nil: none that judges packets. Sets
// alone do nothing.
func FelixError(list []felix.Rest) error {
	for _, r := range list {
		if r.Judges() {
			return fmt.Errorf("rules of Calico's Felix judge packets beside ours: %s; if it does not run on this host any more, run routerd cleanup --calico", felixNames(list))
		}
	}
	return nil
}

// WarnOfCalico logs the programs of Calico that run on this host.
func WarnOfCalico(running func() ([]string, error), log *slog.Logger) {
	programs, err := running()
	if err != nil {
		log.Warn("it cannot be seen whether Calico runs on this host", "error", err)
	}
	if len(programs) > 0 {
		log.Warn("Calico runs on this host too, and changes what routerd sets up", "programs", strings.Join(programs, ", "), "cure", "end Calico on this host: docs/guides/from-calico.md")
	}
}

// CleanFelix removes what Felix left if agreed, called with the number, returns
// true. Where agreed is nil it only lists to out what it would remove.
func CleanFelix(ctx context.Context, out io.Writer, agreed func(n int) bool) error {
	list, err := felix.Find()
	if err != nil {
		return err
	}
	if len(list) == 0 {
		fmt.Fprintln(out, "nothing of Calico's Felix is in this host's packet filter")
		return nil
	}
	verb := "to be removed:"
	if agreed == nil {
		verb = "would remove"
	}
	for _, r := range list {
		fmt.Fprintf(out, "%s %s: %s\n", verb, r, strings.Join(r.Names, " "))
	}
	switch {
	case agreed == nil:
		return nil
	case !agreed(len(list)):
		return errors.New("nothing was removed")
	}
	var errs []error
	for _, r := range list {
		if err := felix.Remove(ctx, r); err != nil {
			errs = append(errs, fmt.Errorf("remove %s: %w", r, err))
			continue
		}
		fmt.Fprintln(out, "removed", r)
	}
	return errors.Join(errs...)
}
