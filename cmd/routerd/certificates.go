package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"time"

	"github.com/routerd/routerd/control/renewal"
	"github.com/routerd/routerd/store/embedded"
	"github.com/routerd/routerd/store/etcd"
)

// certificates says when those end by which the datastore is reached or served. Its
// methods may be called from any goroutine.
type certificates struct {
	now     func() certificateFiles // which they are now; nil: there are none
	renewal func() error            // why there is no new one although it is time; nil: routerd renews none

	mu   sync.Mutex
	read time.Time
	file string
	at   time.Time
	err  error
}

// certificateFiles are certificates in files.
type certificateFiles struct {
	expires func() (file string, at time.Time, err error)
	ca      string // the file of the authority
	serves  bool   // they are of this host's own datastore, for others
}

const (
	// endsSoon is how long before its end a certificate is a condition of the host.
	endsSoon = 90 * 24 * time.Hour
	// readCertificates is how long what the files said counts.
	readCertificates = time.Minute
)

// ends returns which certificate ends first and when; no file: there is none.
func (c *certificates) ends(now time.Time) (file string, at time.Time, err error) {
	if c.now == nil {
		return "", time.Time{}, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if now.Sub(c.read) >= readCertificates || now.Before(c.read) {
		c.file, c.at, c.err = c.now().expires()
		c.read = now
	}
	return c.file, c.at, c.err
}

// reread has the files read again when they are asked for next.
func (c *certificates) reread() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.read = time.Time{}
}

// problem says that a certificate ends soon, or has ended, or cannot be read or renewed.
func (c *certificates) problem(now time.Time) error {
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
	case errors.Is(failed, renewal.ErrFiles):
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
func (c *certificates) cure(file string, failed error, ended bool) string {
	is := c.now()
	switch {
	case is.serves && file == is.ca:
		return "make another authority for this cluster (docs/operations/troubleshoot.md#certificates)"
	case is.serves:
		return "routerd renews it at its start and every 12 h, and could not: see its log, and the clock of this host"
	case file == is.ca:
		return "put the new authority beside the old one in that file, which needs no restart"
	case failed != nil && ended:
		return "have this host join again, by `routerd join --force` with a token of `routerctl cluster token`"
	case failed != nil:
		return fmt.Sprintf("routerd goes on asking the host that runs the datastore for another one: %v", failed)
	}
	return "put a new one in its place, which needs no restart"
}

// expiry returns when the first certificate ends; zero: there is none.
func (c *certificates) expiry() time.Time {
	_, at, _ := c.ends(time.Now())
	return at
}

// newCertificates makes what looks after the certificates of the datastore: of the one
// that this host serves, and of this host as a client. Which of them counts changes when
// it becomes a member, or leaves.
func (d *router) newCertificates(s *etcd.Store, c etcd.Config) {
	client := certificateFiles{expires: c.Expiry, ca: c.CAFile}
	d.certs.now = func() certificateFiles {
		server, _ := d.member.current()
		if server == nil || !server.Listen().IsValid() {
			return client
		}
		ca, cert := server.ServerFiles()
		return certificateFiles{ca: ca, serves: true, expires: func() (string, time.Time, error) {
			if err := server.CertificateError(); err != nil {
				return cert, time.Time{}, err
			}
			return etcd.Config{CAFile: ca, CertFile: cert}.Expiry()
		}}
	}
	if d.cfg.Datastore.CertFile != "" {
		d.renewer = renewal.NewRenewer(renewal.Config{
			Records: s.Renewals(), Credentials: c, Ours: embedded.Issued, Replaced: d.certs.reread, Log: d.log.With("component", "certificates"),
		})
		d.certs.renewal = d.renewer.Err
	}
}

// signCertificates answers who asks for another certificate, while this host is a member
// of the datastore that serves others. Of several members one is first.
func (d *router) signCertificates(ctx context.Context) error {
	return d.member.whileServing(ctx, func(ctx context.Context, server *embedded.Server) error {
		return renewal.NewSigner(d.member.store.Renewals(), server, d.log.With("component", "certificates"), time.Now).Run(ctx)
	})
}
