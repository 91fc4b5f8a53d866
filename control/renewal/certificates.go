package renewal

import (
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"time"
)

// Certificates says when those end by which the datastore is reached or served. Its
// methods may be called from any goroutine.
type Certificates struct {
	now     func() Files // which they are now; nil: there are none
	renewal func() error // why there is no new one although it is time; nil: routerd renews none

	mu   sync.Mutex
	read time.Time
	file string
	at   time.Time
	err  error
}

// NewCertificates makes what looks after the certificates that now returns. renewal says
// why there is no new one although it is time; nil: routerd renews none.
func NewCertificates(now func() Files, renewal func() error) *Certificates {
	return &Certificates{now: now, renewal: renewal}
}

// Files are certificates in files.
type Files struct {
	// Expires says which of them ends first, and when; no file: there is none.
	Expires func() (file string, at time.Time, err error)
	CA      string // the file of the authority
	Serves  bool   // they are of this host's own datastore, for others
}

const (
	// endsSoon is how long before its end a certificate is a condition of the host.
	endsSoon = 90 * 24 * time.Hour
	// readCertificates is how long what the files said counts.
	readCertificates = time.Minute
)

// ends returns which certificate ends first and when; no file: there is none.
func (c *Certificates) ends(now time.Time) (file string, at time.Time, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if now.Sub(c.read) >= readCertificates || now.Before(c.read) {
		c.file, c.at, c.err = c.now().Expires()
		c.read = now
	}
	return c.file, c.at, c.err
}

// Reread has the files read again when they are asked for next.
func (c *Certificates) Reread() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.read = time.Time{}
}

// Problem says that a certificate ends soon, or has ended, or cannot be read or renewed.
// Of nil, of a datastore that is no etcd, there is nothing to say.
func (c *Certificates) Problem(now time.Time) error {
	if c == nil {
		return nil
	}
	file, at, err := c.ends(now)
	var failed error
	if c.renewal != nil {
		failed = c.renewal()
	}
	switch left := at.Sub(now); {
	case err != nil:
		return err
	case file == "":
		return nil
	case errors.Is(failed, ErrFiles):
		return fmt.Errorf("certificate %s ends on %s, and routerd cannot renew it: %w: let it write there (ReadWritePaths=%s by `systemctl edit routerd`), or move the files to a directory below stateDir and name them in datastore.caFile, certFile and keyFile",
			file, at.Format(time.DateOnly), failed, filepath.Dir(file))
	case left <= 0:
		return fmt.Errorf("certificate %s ended on %s: the datastore cannot be reached again once the connection is lost; %s", file, at.Format(time.DateOnly), c.cure(file, failed, true))
	case left < endsSoon:
		return fmt.Errorf("certificate %s ends on %s, in %d days: %s", file, at.Format(time.DateOnly), int(left.Hours()/24), c.cure(file, failed, false))
	}
	return nil
}

// cure says what to do about a certificate that ends soon or has ended.
func (c *Certificates) cure(file string, failed error, ended bool) string {
	is := c.now()
	switch {
	case is.Serves && file == is.CA:
		return "make another authority for this cluster (docs/operations/troubleshoot.md#certificates)"
	case is.Serves:
		return "routerd renews it at its start and every 12 h, and could not: see its log, and the clock of this host"
	case file == is.CA:
		return "put the new authority beside the old one in that file, which needs no restart"
	case failed != nil && ended:
		return "have this host join again, by `routerd join --force` with a token of `routerctl cluster token`"
	case failed != nil:
		return fmt.Sprintf("routerd goes on asking the host that runs the datastore for another one: %v", failed)
	}
	return "put a new one in its place, which needs no restart"
}

// Expiry returns when the first certificate ends; zero: there is none.
func (c *Certificates) Expiry() time.Time {
	if c == nil {
		return time.Time{}
	}
	_, at, _ := c.ends(time.Now())
	return at
}
