package attach

import "fmt"

// held says, as [ErrNotReady], why the datastore must not be written: this host
// does not hold its name; nil: it does.
func (a *Attacher) held() error {
	if a.cfg.Held == nil {
		return nil
	}
	if err := a.cfg.Held(); err != nil {
		return fmt.Errorf("%w: %w", ErrNotReady, err)
	}
	return nil
}

// Disown says that what the datastore shows under this host's name is another
// machine's: what is on its way out here is released without it. What was this
// machine's own of that is freed as leaked. It is to be called before the name
// is taken: a daemon that dies afterwards would not know. A repeat does nothing.
func (a *Attacher) Disown() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := 0
	for _, r := range a.records {
		if r.State != stateReleasing || r.Disowned {
			continue
		}
		r.Disowned = true
		if err := a.put(r); err != nil {
			return err
		}
		n++
	}
	if n == 0 {
		return nil
	}
	if err := a.cfg.Journal.Sync(); err != nil {
		return fmt.Errorf("write attachment records: %w", err)
	}
	a.log.Warn("what the datastore shows of attachments on their way out is another machine's, and stays", "attachments", n)
	return nil
}

// disowned reports whether [Attacher.Disown] was said of an attachment.
func (a *Attacher) disowned(id ID) bool {
	r, ok := a.record(id)
	return ok && r.Disowned && r.State == stateReleasing
}
