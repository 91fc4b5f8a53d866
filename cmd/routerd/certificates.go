package main

import (
	"fmt"
	"sync"
	"time"
)

// certificates says when those end by which the datastore is reached. Its methods may
// be called from any goroutine.
type certificates struct {
	expires func() (file string, at time.Time, err error) // nil: there are none
	ca      string                                        // the file of the authority

	mu   sync.Mutex
	read time.Time
	file string
	at   time.Time
	err  error
}

const (
	// endsSoon is how long before its end a certificate is a condition of the host.
	endsSoon = 90 * 24 * time.Hour
	// readCertificates is how long what the files said counts.
	readCertificates = time.Minute
)

// ends returns which certificate ends first and when; no file: there is none.
func (c *certificates) ends(now time.Time) (file string, at time.Time, err error) {
	if c.expires == nil {
		return "", time.Time{}, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if now.Sub(c.read) >= readCertificates || now.Before(c.read) {
		c.file, c.at, c.err = c.expires()
		c.read = now
	}
	return c.file, c.at, c.err
}

// problem says that a certificate ends soon, or has ended, or cannot be read.
func (c *certificates) problem(now time.Time) error {
	file, at, err := c.ends(now)
	cure := "put a new one in its place, which needs no restart"
	if file == c.ca {
		cure = "put the new authority beside the old one in that file, and restart routerd"
	}
	switch left := at.Sub(now); {
	case file == "" && err == nil:
		return nil
	case err != nil:
		return err
	case left <= 0:
		return fmt.Errorf("certificate %s ended on %s: the datastore cannot be reached again once the connection is lost; %s", file, at.Format(time.DateOnly), cure)
	case left < endsSoon:
		return fmt.Errorf("certificate %s ends on %s, in %d days: %s", file, at.Format(time.DateOnly), int(left.Hours()/24), cure)
	}
	return nil
}

// expiry returns when the first certificate ends; zero: there is none.
func (c *certificates) expiry() time.Time {
	_, at, _ := c.ends(time.Now())
	return at
}
