package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/control/atomicfile"
	"github.com/routerd/routerd/control/config"
	"github.com/routerd/routerd/control/join"
	"github.com/routerd/routerd/control/member"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store/embedded"
	"github.com/routerd/routerd/store/etcd"
)

// memberFile is what this host is in the datastore's cluster.
func memberFile(c config.Config) string { return filepath.Join(c.StateDir, "etcd", "member.json") }

// membersFile is what is known of all members: where clients find them.
func membersFile(c config.Config) string {
	return filepath.Join(c.StateDir, "datastore-members.json")
}

// membership is this host's part in the cluster of the embedded datastore: its server, if
// it is a member, and which endpoints its client uses. It does the steps that
// package member decides on.
type membership struct {
	cfg       config.Config
	name      string
	log       *slog.Logger // of etcd
	addresses func() (netip.Addr, error)
	changed   async.Signal // for the agent
	votes     bool         // at the start of the daemon

	mu     sync.Mutex
	state  member.State
	server *embedded.Server // nil: none runs
	known  map[string]etcd.MemberRecord
	turned chan struct{} // closed, and made anew, when the server comes or goes
	issuer *join.Issuer  // nil: no other host is served

	store *etcd.Store
	door  sync.Mutex // one at a time opens it for other members
}

// newMembership reads what this host is. A host that has left the cluster has in its
// configuration what it was before; c is then as that of one that has joined.
func newMembership(c *config.Config, name string, log *slog.Logger) (*membership, error) {
	state, err := member.LoadState(memberFile(*c))
	if err != nil {
		return nil, err
	}
	m := &membership{cfg: *c, name: name, log: log, changed: async.NewSignal(), state: state, known: map[string]etcd.MemberRecord{}, turned: make(chan struct{})}
	b, err := os.ReadFile(membersFile(*c))
	if err == nil {
		err = json.Unmarshal(b, &m.known)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		log.Warn("where the datastore's members are is not known from before", "file", membersFile(*c), "error", err)
	}
	if m.state.Role == "" && c.Datastore.Own() {
		m.state.Role = member.Voter
	}
	votes := m.state.Role == member.Voter && (embedded.HasData(c.EtcdDir()) || len(m.others()) == 0)
	if c.Datastore.Own() && !votes {
		dir := c.ClientPKIDir()
		if _, err := os.Stat(dir); err != nil { // it has not got as far as to leave
			dir = c.PKIDir()
		}
		c.Datastore.Endpoints = m.others()
		c.Datastore.CAFile, c.Datastore.CertFile, c.Datastore.KeyFile = embedded.ClientFiles(dir)
		if len(c.Datastore.Endpoints) == 0 {
			return nil, fmt.Errorf("this host has left the datastore's cluster (%s), and no member is known: join it anew with routerd join, or set datastore.endpoints", memberFile(*c))
		}
	}
	m.cfg, m.votes = *c, votes
	return m, nil
}

// ours reports whether the datastore is one that routerd runs, here or elsewhere: one of
// somebody else has no members to follow, and may give no right to look for them.
func (m *membership) ours() bool {
	d := m.cfg.Datastore
	if d.CertFile == "" {
		return d.Own()
	}
	pair, err := tls.LoadX509KeyPair(d.CertFile, d.KeyFile)
	return err == nil && embedded.Issued(pair.Leaf)
}

// boot starts the server of a host that votes, and returns what its client uses.
func (m *membership) boot(ctx context.Context, ec etcd.Config) (etcd.Config, error) {
	if m.votes {
		if err := m.start(ctx, ""); err != nil {
			return ec, err
		}
		if ca, cert, key := embedded.ClientFiles(m.cfg.PKIDir()); ec.CAFile == "" && m.server.Listen().IsValid() {
			// It may leave the cluster one day.
			ec.CAFile, ec.CertFile, ec.KeyFile = ca, cert, key
		}
	}
	ec.Endpoints = m.endpoints()
	if m.server == nil && len(m.known) > 0 {
		// Of several members one may be lost without a word.
		ec.KeepaliveTime, ec.KeepaliveTimeout = memberKeepalive, memberTimeout
	}
	return ec, nil
}

// memberKeepalive is how long a silent connection to one of several members lives before
// it is probed, and memberTimeout how long an answer may take: gRPC's least, and what
// others can make good for.
const (
	memberKeepalive = 10 * time.Second
	memberTimeout   = 5 * time.Second
)

// endpoints, with mu held, is what the client of this host uses: its own server if that votes, else
// those that it is configured for and those of the members.
func (m *membership) endpoints() []string {
	if m.state.Role == member.Voter && m.server != nil {
		return []string{m.server.Endpoint()}
	}
	return m.others()
}

// others, with mu held, lists the endpoints of other hosts.
func (m *membership) others() []string {
	known := maps.Clone(m.known)
	own := known[m.name].Endpoint
	delete(known, m.name)
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
func (m *membership) start(ctx context.Context, cluster string) error {
	e, is := m.cfg.Datastore.Embedded, m.is()
	listen := is.Serve
	if e.Listen != "" {
		listen = netip.MustParseAddrPort(e.Listen) // Validate has parsed it
	}
	server, err := embedded.Start(ctx, embedded.Config{
		Dir: m.cfg.EtcdDir(), PKIDir: m.cfg.PKIDir(), Socket: m.cfg.EtcdSocket(), Listen: listen, Peer: is.Peer, Cluster: cluster,
		Hosts: e.Hosts, Name: m.name, Logger: m.log,
	})
	if err != nil {
		return err
	}
	m.turn(server)
	return nil
}

// turn says that the server has come or gone.
func (m *membership) turn(server *embedded.Server) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.server = server
	close(m.turned)
	m.turned = make(chan struct{})
}

// current returns the server, and what is closed when it is another.
func (m *membership) current() (*embedded.Server, chan struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.server, m.turned
}

func (m *membership) close() {
	if server, _ := m.current(); server != nil {
		server.Close()
	}
}

// whileServing runs f while this host's server serves others and has a vote.
func (m *membership) whileServing(ctx context.Context, f func(context.Context, *embedded.Server) error) error {
	for ctx.Err() == nil {
		server, turned := m.current()
		if server == nil || !server.Listen().IsValid() || m.role() != member.Voter {
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
		told := during.Err() != nil // to end
		cancel()
		<-watched
		if err != nil && !told {
			return err
		}
	}
	return ctx.Err()
}

func (m *membership) is() member.State {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.state
}

func (m *membership) role() member.Role { return m.is().Role }

// set changes the state, on disk first.
func (m *membership) set(s member.State) error {
	if err := s.Save(memberFile(m.cfg)); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.state = s
	return nil
}

// watch tells the agent when the server ends by itself.
func (m *membership) watch(ctx context.Context) error {
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
			if !server.Peer().IsValid() {
				return err // nobody else can say why, and a new start is what helps
			}
			m.log.Warn("this host's member of the datastore has ended", "error", err)
			server.Close()
			m.turn(nil)
			m.mu.Lock()
			others := m.others()
			m.mu.Unlock()
			m.store.SetEndpoints(others)
			m.changed.Set()
		case <-turned:
		case <-ctx.Done():
		}
	}
	return ctx.Err()
}

// follow keeps the client's endpoints what the members say.
func (m *membership) follow(ctx context.Context) error {
	m.store.FollowMembers(ctx, func(now map[string]etcd.MemberRecord) {
		m.mu.Lock()
		defer m.mu.Unlock()
		if len(now) == 0 || maps.Equal(now, m.known) { // without members there is nowhere to go
			return
		}
		m.known = now
		b, err := json.Marshal(now)
		if err == nil {
			err = atomicfile.Write(membersFile(m.cfg), append(b, '\n'), 0o600)
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

// Facts implements [member.Host].
func (m *membership) Facts(ctx context.Context, wanted member.Role) member.Facts {
	server, _ := m.current()
	f := member.Facts{
		Role: m.role(), Wanted: wanted, Running: server != nil,
		Data: embedded.HasData(m.cfg.EtcdDir()), Secrets: m.hasSecrets(),
	}
	switch {
	case !f.Role.IsMember():
	case !m.is().Peer.IsValid(): // it is alone
		if f.Running {
			f.Among = member.HasVote
		}
	default:
		f.Among, _, _ = m.standing(ctx)
	}
	return f
}

func (m *membership) hasSecrets() bool {
	if m.cfg.Datastore.CAFile == "" {
		return m.role() == member.Voter
	}
	ca, err := os.ReadFile(m.cfg.Datastore.CAFile)
	return err == nil && embedded.HasSecrets(m.cfg.PKIDir(), ca)
}

// standing asks the members how they have this host.
func (m *membership) standing(ctx context.Context) (member.Standing, etcd.Member, []etcd.Member) {
	list, err := m.store.Members(ctx)
	if err != nil {
		return member.Unknown, etcd.Member{}, nil
	}
	server, _ := m.current()
	for _, one := range list {
		mine := slices.Contains(one.Peers, embedded.PeerURL(m.is().Peer))
		if server != nil { // its address may be about to be written
			mine = one.ID == server.ID()
		}
		if !mine {
			continue
		}
		switch {
		case !one.Learner:
			return member.HasVote, one, list
		case one.Name == "":
			return member.Added, one, list
		}
		return member.Learning, one, list
	}
	return member.Absent, etcd.Member{}, list
}

// Do implements [member.Host].
func (m *membership) Do(ctx context.Context, a member.Action, order *member.Order) error {
	server, _ := m.current()
	switch a {
	case member.Nothing:
		return nil
	case member.TakeSecrets:
		return m.takeSecrets(ctx, order)
	case member.Enter:
		return m.enter()
	case member.Add:
		id, err := m.store.AddLearner(ctx, embedded.PeerURL(m.is().Peer))
		if err != nil {
			return err
		}
		// For those who look before this host has started.
		return m.store.SetMemberRecord(ctx, m.name, &etcd.MemberRecord{ID: id})
	case member.Start:
		return m.startMember(ctx)
	case member.Promote:
		_, self, _ := m.standing(ctx)
		return m.store.PromoteMember(ctx, self.ID)
	case member.Vote:
		if err := server.Ready(ctx); err != nil {
			return err
		}
		s := m.is()
		s.Role = member.Voter
		if err := m.set(s); err != nil {
			return err
		}
		m.store.SetEndpoints([]string{server.Endpoint()})
		m.turn(server) // who serves others by it begins
		return m.record(ctx, server)
	case member.Leave:
		return m.leave(ctx)
	case member.Remove:
		if server != nil {
			if err := server.HandOver(); err != nil {
				m.log.Info("another member does not take the lead; the others will elect one", "error", err)
			}
		}
		_, self, _ := m.standing(ctx)
		if err := m.store.RemoveMember(ctx, self.ID); err != nil && !errors.Is(err, etcd.ErrNoMember) {
			return err
		}
		return nil
	case member.Stop:
		if server == nil { // it has ended by itself
			return nil
		}
		server.Close()
		m.turn(nil)
		return nil
	case member.PutAway:
		to, err := embedded.PutAway(m.cfg.EtcdDir(), "left", time.Now())
		if err == nil {
			m.log.Info("the data of this host's member are put away; remove them when all is well", "directory", to)
		}
		return err
	case member.Retire:
		if err := embedded.ForgetSecrets(m.cfg.PKIDir()); err != nil {
			return err
		}
		if err := m.store.SetMemberRecord(ctx, m.name, nil); err != nil {
			return err
		}
		return m.set(member.State{Role: member.Client})
	}
	return fmt.Errorf("%s: this routerd does not know how", a)
}

func (m *membership) takeSecrets(ctx context.Context, order *member.Order) error {
	d := m.cfg.Datastore
	if order == nil || order.Issuer == "" {
		return errors.New("the order does not say where the members' secrets are")
	}
	if d.CAFile == "" || d.CertFile == "" {
		return errors.New("this host has no certificate of its own (datastore.certFile): take it into the cluster with routerd join")
	}
	ca, key, err := join.AskSecrets(ctx, order.Issuer, d.CAFile, d.CertFile, d.KeyFile)
	if err != nil {
		return err
	}
	return embedded.InstallSecrets(m.cfg.PKIDir(), ca, key, time.Now())
}

// enter makes this host a learner: nothing that is there from before may come back as its data.
func (m *membership) enter() error {
	addr, err := m.addresses()
	if err != nil {
		return err
	}
	to, err := embedded.PutAway(m.cfg.EtcdDir(), "before", time.Now())
	if err != nil {
		return err
	}
	if to != "" {
		m.log.Warn("data of an embedded datastore of before are put away", "directory", to)
	}
	return m.set(member.State{Role: member.Learner, Peer: netip.AddrPortFrom(addr, peerPort(m.cfg)), Serve: netip.AddrPortFrom(addr, servePort(m.cfg))})
}

func peerPort(c config.Config) uint16 {
	return uint16(c.Datastore.Embedded.PeerPort) //nolint:gosec // Validate has checked it
}

// servePort is that of the datastore as clients have it.
func servePort(c config.Config) uint16 {
	for _, e := range c.Datastore.Endpoints {
		if u, err := url.Parse(e); err == nil {
			if p, err := strconv.ParseUint(u.Port(), 10, 16); err == nil {
				return uint16(p)
			}
		}
	}
	return 2379
}

func (m *membership) startMember(ctx context.Context) error {
	if m.role() == member.Voter { // it has ended by itself, and is a member still
		return &member.Fatal{Err: errors.New("the embedded datastore ended by itself")}
	}
	_, _, list := m.standing(ctx)
	if len(list) == 0 && !embedded.HasData(m.cfg.EtcdDir()) {
		return errors.New("the members do not answer, and without them a new member would be a cluster of its own")
	}
	var all []string
	for _, one := range list {
		name := cmp.Or(one.Name, m.name) // of a member that has never started there is one
		for _, p := range one.Peers {
			all = append(all, name+"="+p)
		}
	}
	return m.start(ctx, strings.Join(all, ","))
}

// leave begins to leave: from here on the datastore is other hosts'.
func (m *membership) leave(ctx context.Context) error {
	among, _, list := m.standing(ctx)
	voters := 0
	for _, one := range list {
		if !one.Learner {
			voters++
		}
	}
	m.mu.Lock()
	others := m.others()
	m.mu.Unlock()
	switch {
	case among == member.HasVote && voters < 2:
		return errLastMember
	case len(others) == 0:
		return errors.New("no other member says yet where clients reach it")
	}
	if m.cfg.Datastore.CertFile == "" {
		if err := embedded.IssueClient(m.cfg.PKIDir(), m.cfg.ClientPKIDir(), m.name); err != nil {
			return err
		}
	}
	s := m.is()
	s.Role = member.Leaving
	if err := m.set(s); err != nil {
		return err
	}
	m.store.SetEndpoints(others)
	server, _ := m.current()
	m.turn(server) // who served others by it ends
	return nil
}

var errLastMember = errors.New("this is the last member of the datastore's cluster, which has all that there is: promote another host first")

// record says where clients reach this host's member.
func (m *membership) record(ctx context.Context, server *embedded.Server) error {
	addr := server.Listen().Addr()
	if addr.IsUnspecified() {
		var err error
		if addr, err = m.addresses(); err != nil {
			return err
		}
	}
	return m.store.SetMemberRecord(ctx, m.name, &etcd.MemberRecord{
		ID: server.ID(), Endpoint: "https://" + netip.AddrPortFrom(addr, server.Listen().Port()).String(),
	})
}

// Settled implements [member.Host]: a voter keeps the members' records.
func (m *membership) Settled(ctx context.Context) {
	server, _ := m.current()
	if m.role() != member.Voter || server == nil || !server.Listen().IsValid() {
		return
	}
	if err := m.keepRecords(ctx, server); err != nil && ctx.Err() == nil {
		m.log.Debug("the members' records are not compared", "error", err)
	}
}

func (m *membership) keepRecords(ctx context.Context, server *embedded.Server) error {
	list, err := m.store.Members(ctx)
	if err != nil {
		return err
	}
	have, err := m.store.MemberRecords(ctx)
	if err != nil {
		return err
	}
	if len(have) == 0 && !m.is().Peer.IsValid() { // it was never one of several
		return nil
	}
	if r := have[m.name]; r.ID != server.ID() || r.Endpoint == "" {
		if err := m.record(ctx, server); err != nil {
			return err
		}
	}
	for node, r := range have {
		is := func(one etcd.Member) bool { return one.ID == r.ID }
		if node != m.name && !slices.ContainsFunc(list, is) {
			m.log.Info("a host is no member of the datastore any more", "host", node)
			if err := m.store.SetMemberRecord(ctx, node, nil); err != nil {
				return err
			}
		}
	}
	return nil
}

// openDoor has the first member take others.
func (m *membership) openDoor(ctx context.Context, server *embedded.Server, addr netip.Addr) error {
	// etcd drops one of two changes of its members that come at once, without a word.
	m.door.Lock()
	defer m.door.Unlock()
	at := netip.AddrPortFrom(addr, peerPort(m.cfg))
	was := m.is().Peer
	if was.IsValid() {
		at = was
	}
	if err := server.ServePeers(at); err != nil {
		return err
	}
	if was != at {
		// On disk before anybody may come in: it is to be open after the next start.
		if err := m.set(member.State{Role: member.Voter, Peer: at, Serve: server.Listen()}); err != nil {
			return err
		}
	}
	list, err := m.store.Members(ctx)
	if err != nil {
		return err
	}
	for _, one := range list {
		if one.ID == server.ID() && !slices.Contains(one.Peers, embedded.PeerURL(at)) {
			if err := m.store.SetPeer(ctx, one.ID, embedded.PeerURL(at)); err != nil {
				return err
			}
		}
	}
	return m.record(ctx, server)
}

// memberIssuer is what the issuer of certificates asks of the membership.
type memberIssuer struct {
	orders etcd.Records
	verify func(digest, signature []byte) bool
	server *embedded.Server
}

func (i memberIssuer) Follow(ctx context.Context, yield func(map[string]int64)) {
	i.orders.Follow(ctx, yield)
}

func (i memberIssuer) Secrets(ctx context.Context, node string) (ca, key []byte, err error) {
	b, _, err := i.orders.Read(ctx, node)
	if err != nil {
		return nil, nil, err
	}
	if b == nil {
		return nil, nil, errors.New("no order says so")
	}
	var o member.Order
	if err := json.Unmarshal(b, &o); err != nil {
		return nil, nil, fmt.Errorf("the order: %w", err)
	}
	if err := o.Check(node, time.Now(), i.verify); err != nil {
		return nil, nil, fmt.Errorf("the order: %w", err)
	}
	if o.Wanted != member.Voter {
		return nil, nil, errors.New("the order has it become a client")
	}
	return i.server.Secrets()
}

// verifier checks members' signatures by the authority that this host knows.
func (m *membership) verifier() func(digest, signature []byte) bool {
	return func(digest, signature []byte) bool {
		file := cmp.Or(m.cfg.Datastore.CAFile, filepath.Join(m.cfg.PKIDir(), "ca.crt"))
		ca, err := os.ReadFile(file)
		return err == nil && embedded.Verify(ca, digest, signature)
	}
}

// runIssuer takes new hosts in while this host's server serves others.
func (m *membership) runIssuer(ctx context.Context, log *slog.Logger) error {
	return m.whileServing(ctx, func(ctx context.Context, server *embedded.Server) error {
		i := m.newIssuer(server, log)
		set := func(to *join.Issuer) {
			m.mu.Lock()
			defer m.mu.Unlock()
			m.issuer = to
		}
		set(i)
		defer set(nil)
		return i.Run(ctx)
	})
}

func (m *membership) theIssuer() *join.Issuer {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.issuer
}

// runMembers has this host be in the datastore's cluster what it is to be.
func (d *router) runMembers(ctx context.Context) error {
	m := d.member
	agent := member.New(member.Config{
		Node: d.name, Orders: m.store.Orders(), Host: m, Verify: m.verifier(), Changed: m.changed, Log: d.log.With("component", "members"),
	})
	return agent.Run(ctx)
}

// nodeAddress is this host's own, once it is known.
func (d *router) nodeAddress() (netip.Addr, error) {
	found := d.node.Status().Addresses
	for _, f := range []dataplane.Family{dataplane.IPv4, dataplane.IPv6} {
		if a, ok := found[f]; ok {
			return a.Prefix.Addr(), nil
		}
	}
	return netip.Addr{}, errors.New("this host's own address is not known yet")
}

// joinAddress is where a server's host takes new hosts and members.
func (m *membership) joinAddress(server *embedded.Server) (string, error) {
	addr := server.Listen().Addr()
	if addr.IsUnspecified() {
		var err error
		if addr, err = m.addresses(); err != nil {
			return "", err
		}
	}
	return net.JoinHostPort(addr.String(), strconv.Itoa(m.cfg.Datastore.Embedded.JoinPort)), nil
}
