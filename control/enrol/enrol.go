// Package enrol takes a host into the cluster of another one that keeps the datastore: it asks
// by a token for credentials, writes them and the configuration, and starts the service. Each
// step finds what a previous run has done.
package enrol

import (
	"context"
	"crypto"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/atomicfile"
	"github.com/routerd/routerd/control/config"
	"github.com/routerd/routerd/control/join"
	"github.com/routerd/routerd/control/presence"
	"github.com/routerd/routerd/store/embedded"
	"github.com/routerd/routerd/store/etcd"
)

// Config says how a host joins.
type Config struct {
	Out   io.Writer
	Host  config.Config // as it is before
	File  string        // of the configuration
	Token join.Token
	Force bool // replaces what is in the way
	// Identity is the file in which this machine's identity is.
	Identity string
	Start    bool // the service
	Wait     time.Duration
	Systemd  Systemd
	// Health asks the daemon behind a socket.
	Health func(ctx context.Context, socket string) (*apiv1.Health, error)
}

// Run takes this host into a cluster.
func Run(ctx context.Context, c Config) error {
	node, err := c.Host.Name()
	if err != nil {
		return err
	}
	e := &enrolment{c: c, node: node}
	e.say = func(format string, args ...any) { fmt.Fprintf(c.Out, format+"\n", args...) }
	e.credentials = credentials{dir: c.Host.ClientPKIDir(), node: node, ca: c.Token.CA, force: c.Force}
	e.service = service{Config: c, node: node, began: time.Now(), say: e.say}
	return e.run(ctx)
}

// enrolment is one run.
type enrolment struct {
	c    Config
	node string
	say  func(format string, args ...any)

	credentials credentials
	service     service
	admitted    bool // in this run
}

func (e *enrolment) run(ctx context.Context) error {
	if err := os.MkdirAll(e.c.Host.StateDir, 0o700); err != nil {
		return fmt.Errorf("make stateDir: %w", err)
	}
	alone, err := e.alone()
	if err != nil {
		return err
	}
	defer alone.Close()
	if err := e.leavesNothing(); err != nil {
		return err
	}
	endpoint, err := e.admit(ctx)
	if err != nil {
		return err
	}
	if err := e.configure(endpoint); err != nil {
		return err
	}
	// The token is of no use to this host any more, and is to be of none to others. An
	// previous run may have said so.
	if err := join.Done(ctx, e.c.Token, join.Host{}); err != nil && e.admitted {
		e.say("The token could not be ended (%v); it ends at %s.", err, e.c.Token.Expires.Format(time.DateTime))
	}
	return e.service.run(ctx)
}

// alone keeps a second run of the command out.
func (e *enrolment) alone() (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(e.c.Host.StateDir, "join.lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock this host: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("another routerd join runs on this host: wait for its end (%w)", err)
	}
	return f, nil
}

// leavesNothing refuses a host that has a datastore of its own, in which something
// may be.
func (e *enrolment) leavesNothing() error {
	if !e.c.Host.Datastore.Own() {
		return nil
	}
	data := e.c.Host.EtcdDir()
	if _, err := os.Stat(filepath.Join(data, "member")); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	workloads, err := filepath.Glob(filepath.Join(e.c.Host.WorkloadDir(), "*"))
	if err != nil {
		return err
	}
	if e.c.Force {
		e.say("The embedded datastore of this host stays in %s, and is not used any more.", data)
		return nil
	}
	has := ""
	if len(workloads) > 0 {
		has = fmt.Sprintf(", and %d workloads have addresses by it", len(workloads))
	}
	return fmt.Errorf("this host has an embedded datastore of its own in %s%s: what is in there is not in the cluster's; save what is of use (routerctl datastore export), end its workloads, stop routerd, and move the directory away; or say --force to leave it behind", data, has)
}

// host is this host, as it asks.
func (e *enrolment) host(key crypto.Signer) (join.Host, error) {
	h := join.Host{Node: e.node, Key: key}
	b, err := os.ReadFile(e.c.Identity)
	if errors.Is(err, fs.ErrNotExist) {
		return h, nil
	}
	var id presence.Identity
	if err == nil {
		err = json.Unmarshal(b, &id)
	}
	if err != nil {
		return h, fmt.Errorf("read this machine's identity: %w", err)
	}
	h.Instance = id.Instance
	return h, nil
}

// admit has this host have credentials that the datastore takes, and returns its
// endpoint.
func (e *enrolment) admit(ctx context.Context) (endpoint string, err error) {
	dir := e.c.Host.ClientPKIDir()
	caFile, certFile, keyFile := embedded.ClientFiles(dir)
	want := config.Datastore{CAFile: caFile, CertFile: certFile, KeyFile: keyFile}
	have := e.c.Host.Datastore
	if len(have.Endpoints) > 0 && have.CAFile == caFile && have.CertFile == certFile && have.KeyFile == keyFile {
		switch err := e.credentials.check(); {
		case err == nil:
			e.say("This host has its credentials in %s and is configured for %s.", dir, strings.Join(have.Endpoints, ", "))
			return have.Endpoints[0], nil
		case !e.c.Force:
			return "", fmt.Errorf("%s: %w; to join the token's cluster instead of that of before, say --force", dir, err)
		}
	}
	// What stands in the way is found before the token is used.
	want.Endpoints = []string{"https://" + e.c.Token.Address}
	if _, err := e.edit(want); err != nil {
		return "", err
	}
	key, err := e.credentials.key()
	if err != nil {
		return "", err
	}
	host, err := e.host(key)
	if err != nil {
		return "", err
	}
	a, err := join.Ask(ctx, e.c.Token, host)
	if err != nil {
		return "", err
	}
	e.admitted = true
	e.say("%s has admitted this host as %s.", e.c.Token.Address, e.node)
	if err := atomicfile.Write(caFile, a.CA, 0o600); err != nil {
		return "", err
	}
	if err := atomicfile.Write(certFile, a.Certificate, 0o600); err != nil {
		return "", err
	}
	e.say("Wrote its key, its certificate and the authority's to %s.", dir)
	want.Endpoints = []string{a.Endpoint}
	if err := e.reach(ctx, want); err != nil {
		return "", err
	}
	return a.Endpoint, nil
}

// reach asks the datastore something with the new credentials.
func (e *enrolment) reach(ctx context.Context, d config.Datastore) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	s, err := etcd.Open(ctx, etcd.Config{
		Endpoints: d.Endpoints, CAFile: d.CAFile, CertFile: d.CertFile, KeyFile: d.KeyFile, Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return err
	}
	_, err = s.Name(ctx, e.node)
	if err = errors.Join(err, s.Close()); err != nil {
		return fmt.Errorf("the datastore of the other host is not reached with this host's certificate: %w; mend it and run the same command again", err)
	}
	e.say("The datastore at %s answers.", d.Endpoints[0])
	return nil
}

// edit returns the configuration with the datastore of another host in it.
func (e *enrolment) edit(d config.Datastore) (out []byte, err error) {
	text, err := os.ReadFile(e.c.File)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	out, err = config.UseDatastore(text, d, e.c.Force)
	var written *config.Written
	switch {
	case errors.As(err, &written):
		return nil, fmt.Errorf("%s: %w: take it out, or say --force to replace it", e.c.File, err)
	case err != nil:
		return nil, fmt.Errorf("%s: %w", e.c.File, err)
	case string(out) == string(text):
		return nil, nil
	}
	return out, nil
}

// configure writes the section of the datastore.
func (e *enrolment) configure(endpoint string) error {
	ca, cert, key := embedded.ClientFiles(e.c.Host.ClientPKIDir())
	text, err := e.edit(config.Datastore{Endpoints: []string{endpoint}, CAFile: ca, CertFile: cert, KeyFile: key})
	if err != nil || text == nil {
		return err
	}
	mode := fs.FileMode(0o644)
	if info, err := os.Stat(e.c.File); err == nil {
		mode = info.Mode().Perm()
	}
	if err := os.MkdirAll(filepath.Dir(e.c.File), 0o755); err != nil {
		return err
	}
	if err := atomicfile.Write(e.c.File, text, mode); err != nil {
		return err
	}
	e.say("Wrote the section datastore of %s.", e.c.File)
	return nil
}
