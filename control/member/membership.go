package member

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/control/atomicfile"
	"github.com/routerd/routerd/store/embedded"
	"github.com/routerd/routerd/store/etcd"
)

// Datastore is where a host's datastore is and by which files it is reached, as its
// configuration says. Without endpoints it is the host's own.
type Datastore struct {
	Endpoints                 []string
	CAFile, CertFile, KeyFile string
}

func (d Datastore) own() bool { return len(d.Endpoints) == 0 }

// MembershipConfig says what a [Membership] works with.
type MembershipConfig struct {
	Node string
	// Datastore is what the host's configuration says, which may be older than what
	// the host is.
	Datastore Datastore
	// StateFile has what this host is, and MembersFile where clients find all members.
	StateFile, MembersFile string
	// DataDir, PKIDir, ClientPKIDir and Socket are those of the embedded datastore.
	DataDir, PKIDir, ClientPKIDir, Socket string
	// Listen is where the server of a first member serves other hosts; the zero value:
	// nowhere.
	Listen netip.AddrPort
	// Hosts are further names of the server.
	Hosts []string
	// JoinPort and PeerPort are where members serve new hosts and each other.
	JoinPort, PeerPort uint16
	// Address is this host's own, once it is known.
	Address func() (netip.Addr, error)
	// ValidName reports whether a new host may be called that.
	ValidName func(string) bool
	// Log is the daemon's.
	Log *slog.Logger
}

// Membership is this host's part in the cluster of the embedded datastore: its server, if
// it is a member, and which endpoints its client uses. It is the [Host] of an [Agent].
type Membership struct {
	cfg     MembershipConfig
	log     *slog.Logger // of etcd
	changed async.Signal // for the agent
	votes   bool         // at the start of the daemon

	mu     sync.Mutex
	state  State
	server *embedded.Server // nil: none runs
	full   error            // why there is no server until the disk has room
	known  map[string]etcd.MemberRecord
	turned chan struct{} // closed, and made anew, when the server comes or goes

	store *etcd.Store
	door  sync.Mutex // one at a time opens it for other members
}

// NewMembership reads what this host is.
func NewMembership(c MembershipConfig) (*Membership, error) {
	state, err := LoadState(c.StateFile)
	if err != nil {
		return nil, err
	}
	m := &Membership{
		cfg: c, log: c.Log.With("component", "etcd"), changed: async.NewSignal(), state: state,
		known: map[string]etcd.MemberRecord{}, turned: make(chan struct{}),
	}
	b, err := os.ReadFile(c.MembersFile)
	if err == nil {
		err = json.Unmarshal(b, &m.known)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		m.log.Warn("where the datastore's members are is not known from before", "file", c.MembersFile, "error", err)
	}
	if m.state.Role == "" && c.Datastore.own() {
		m.state.Role = Voter
	}
	m.votes = m.state.Role == Voter && (embedded.HasData(c.DataDir) || len(m.others()) == 0)
	if c.Datastore.own() && !m.votes {
		dir := c.ClientPKIDir
		if _, err := os.Stat(dir); err != nil { // it has not got as far as to leave
			dir = c.PKIDir
		}
		ds := Datastore{Endpoints: m.others()}
		ds.CAFile, ds.CertFile, ds.KeyFile = embedded.ClientFiles(dir)
		if len(ds.Endpoints) == 0 {
			return nil, fmt.Errorf("this host has left the datastore's cluster (%s), and no member is known: join it anew with routerd join, or set datastore.endpoints", c.StateFile)
		}
		m.cfg.Datastore = ds
	}
	return m, nil
}

// Datastore is where this host's datastore is. A host that has left the cluster has in
// its configuration what it was before; its datastore is as that of one that has joined.
func (m *Membership) Datastore() Datastore { return m.cfg.Datastore }

// Ours reports whether the datastore is one that routerd runs, here or elsewhere: an etcd
// of the operator's own has no members to follow, and may give no right to look for them.
func (m *Membership) Ours() bool {
	d := m.cfg.Datastore
	if d.CertFile == "" {
		return d.own()
	}
	pair, err := tls.LoadX509KeyPair(d.CertFile, d.KeyFile)
	return err == nil && embedded.Issued(pair.Leaf)
}

// Boot starts the server of a host that votes, and returns what its client uses. Where the
// disk is full the host comes up as one whose datastore is away.
func (m *Membership) Boot(ctx context.Context, ec etcd.Config) (etcd.Config, error) {
	if m.votes {
		switch err := m.start(ctx, ""); {
		case embedded.IsFull(err) && embedded.HasData(m.cfg.DataDir):
			m.setFull(err)
		case err != nil:
			return ec, err
		}
		if ca, cert, key := embedded.ClientFiles(m.cfg.PKIDir); ec.CAFile == "" && m.server != nil && m.server.Listen().IsValid() {
			// It may leave the cluster one day.
			ec.CAFile, ec.CertFile, ec.KeyFile = ca, cert, key
		}
	}
	ec.Endpoints = m.endpoints()
	if m.server == nil && len(m.known) > 0 {
		// Of several members one may be lost without a word.
		ec.KeepaliveTime, ec.KeepaliveTimeout = keepalive, keepaliveTimeout
	}
	return ec, nil
}

// keepalive is how long a silent connection to one of several members lives before
// it is probed, and keepaliveTimeout how long an answer may take: gRPC's least, and what
// others can make good for.
const (
	keepalive        = 10 * time.Second
	keepaliveTimeout = 5 * time.Second
)

// SetStore has the membership use the client of its datastore. It comes after [Membership.Boot],
// which says how that is reached, and before everything else.
func (m *Membership) SetStore(s *etcd.Store) { m.store = s }

// endpoints, with mu held, is what the client of this host uses: its own server if that votes, else
// those that it is configured for and those of the members. A single member has no other
// while its server does not run.
func (m *Membership) endpoints() []string {
	others := m.others()
	if m.state.Role == Voter && (m.server != nil || len(others) == 0) {
		return []string{embedded.Endpoint(m.cfg.Socket)}
	}
	return others
}

// others, with mu held, lists the endpoints of other hosts.
func (m *Membership) others() []string {
	known := maps.Clone(m.known)
	own := known[m.cfg.Node].Endpoint
	delete(known, m.cfg.Node)
	list := slices.Clone(m.cfg.Datastore.Endpoints)
	for _, e := range etcd.EndpointsOf(known) {
		if !slices.Contains(list, e) {
			list = append(list, e)
		}
	}
	// Whoever has certificates for the one is reached by TLS.
	return slices.DeleteFunc(list, func(e string) bool { return e == own && len(list) > 1 })
}

// start starts the server. cluster is what a new member enters.
func (m *Membership) start(ctx context.Context, cluster string) error {
	is := m.is()
	listen := is.Serve
	if m.cfg.Listen.IsValid() {
		listen = m.cfg.Listen
	}
	server, err := embedded.Start(ctx, embedded.Config{
		Dir: m.cfg.DataDir, PKIDir: m.cfg.PKIDir, Socket: m.cfg.Socket, Listen: listen, Peer: is.Peer, Cluster: cluster,
		Hosts: m.cfg.Hosts, Name: m.cfg.Node, Logger: m.log,
	})
	if err != nil {
		return err
	}
	m.turn(server)
	return nil
}

// turn says that the server has come or gone.
func (m *Membership) turn(server *embedded.Server) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.server = server
	close(m.turned)
	m.turned = make(chan struct{})
}

// Server returns this host's server; nil: none runs.
func (m *Membership) Server() *embedded.Server {
	server, _ := m.current()
	return server
}

// current returns the server, and what is closed when it is another.
func (m *Membership) current() (*embedded.Server, chan struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.server, m.turned
}

// Close ends the server, if one runs.
func (m *Membership) Close() {
	if server := m.Server(); server != nil {
		server.Close()
	}
}

// WhileServing runs f while this host's server serves others and has a vote.
func (m *Membership) WhileServing(ctx context.Context, f func(context.Context, *embedded.Server) error) error {
	for ctx.Err() == nil {
		server, turned := m.current()
		if server == nil || !server.Listen().IsValid() || m.role() != Voter {
			select {
			case <-turned:
			case <-ctx.Done():
			}
			continue
		}
		during, cancel := context.WithCancel(ctx)
		watched := make(chan struct{})
		go func() {
			defer close(watched)
			defer cancel()
			select {
			case <-turned:
			case <-during.Done():
			}
		}()
		err := f(during, server)
		ended := during.Err() != nil // from outside
		cancel()
		<-watched
		if err != nil && !ended {
			return err
		}
	}
	return ctx.Err()
}

func (m *Membership) is() State {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.state
}

func (m *Membership) role() Role { return m.is().Role }

// set changes the state, on disk first.
func (m *Membership) set(s State) error {
	if err := s.Save(m.cfg.StateFile); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.state = s
	return nil
}

// Err returns why the server of this host, which is a member, does not run until the disk
// has room.
func (m *Membership) Err() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.full
}

func (m *Membership) setFull(err error) {
	m.log.Error("the disk of the datastore is full: this host goes on without its server, and starts anew when there is room", "dir", m.cfg.DataDir, "error", err)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.full = fmt.Errorf("the disk of %s is full: make room there, and this host's datastore runs again by itself: %w", m.cfg.DataDir, err)
}

// lookForRoom is how often a host whose datastore's disk is full looks whether it still
// is: the kernel notifies of nothing.
const lookForRoom = 5 * time.Second

// awaitRoom waits until the disk has room. Its error then ends the daemon: what etcd left
// locked when it gave up is free only in a new process.
func (m *Membership) awaitRoom(ctx context.Context) error {
	timer := time.NewTicker(lookForRoom)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-timer.C:
			if embedded.Room(m.cfg.DataDir) == nil {
				return errors.New("the disk of the datastore has room again: start anew")
			}
		}
	}
}

// Watch notifies the agent when the server ends by itself. Its error is to end the daemon.
func (m *Membership) Watch(ctx context.Context) error {
	if m.Err() != nil {
		return m.awaitRoom(ctx)
	}
	for ctx.Err() == nil {
		server, turned := m.current()
		var died <-chan error
		if server != nil {
			died = server.Err()
		}
		select {
		case err, ok := <-died:
			if !ok { // it was closed
				select {
				case <-turned:
				case <-ctx.Done():
				}
				continue
			}
			full := embedded.IsFull(err)
			if !server.Peer().IsValid() && !full {
				return err // a member that is alone has no others to go to: a new start is what helps
			}
			m.log.Warn("this host's member of the datastore has ended", "error", err)
			if full {
				m.setFull(err)
			}
			server.Close()
			m.turn(nil)
			m.mu.Lock()
			m.store.SetEndpoints(m.endpoints())
			m.mu.Unlock()
			if full {
				return m.awaitRoom(ctx)
			}
			m.changed.Set()
		case <-turned:
		case <-ctx.Done():
		}
	}
	return ctx.Err()
}

// Follow keeps the client's endpoints what the members say.
func (m *Membership) Follow(ctx context.Context) error {
	m.store.FollowMembers(ctx, func(now map[string]etcd.MemberRecord) {
		m.mu.Lock()
		defer m.mu.Unlock()
		if len(now) == 0 || maps.Equal(now, m.known) { // without members there is nowhere to go
			return
		}
		m.known = now
		b, err := json.Marshal(now)
		if err == nil {
			err = atomicfile.Write(m.cfg.MembersFile, append(b, '\n'), 0o600)
		}
		if err != nil {
			m.log.Warn("where the datastore's members are is not kept for the next start", "error", err)
		}
		if e := m.endpoints(); !slices.Equal(e, m.store.Endpoints()) && len(e) > 0 {
			m.log.Info("the datastore's members", "endpoints", e)
			m.store.SetEndpoints(e)
		}
	})
	return ctx.Err()
}
