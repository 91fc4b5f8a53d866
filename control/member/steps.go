package member

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/routerd/routerd/control/join"
	"github.com/routerd/routerd/store/embedded"
	"github.com/routerd/routerd/store/etcd"
)

// Facts implements [Host].
func (m *Membership) Facts(ctx context.Context, wanted Role) Facts {
	server := m.Server()
	f := Facts{
		Role: m.role(), Wanted: wanted, Running: server != nil,
		Data: embedded.HasData(m.cfg.DataDir), Secrets: m.hasSecrets(),
	}
	switch {
	case !f.Role.IsMember():
	case !m.is().Peer.IsValid(): // it is alone
		if f.Running {
			f.Among = HasVote
		}
	default:
		f.Among, _, _ = m.standing(ctx)
	}
	return f
}

func (m *Membership) hasSecrets() bool {
	if m.cfg.Datastore.CAFile == "" {
		return m.role() == Voter
	}
	ca, err := os.ReadFile(m.cfg.Datastore.CAFile)
	return err == nil && embedded.HasSecrets(m.cfg.PKIDir, ca)
}

// standing asks the members how they have this host.
func (m *Membership) standing(ctx context.Context) (Standing, etcd.Member, []etcd.Member) {
	list, err := m.store.Members(ctx)
	if err != nil {
		return Unknown, etcd.Member{}, nil
	}
	server := m.Server()
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
			return HasVote, one, list
		case one.Name == "":
			return Added, one, list
		}
		return Learning, one, list
	}
	return Absent, etcd.Member{}, list
}

// Do implements [Host].
func (m *Membership) Do(ctx context.Context, a Action, order *Order) error {
	server := m.Server()
	switch a {
	case Nothing:
		return nil
	case TakeSecrets:
		return m.takeSecrets(ctx, order)
	case Enter:
		return m.enter()
	case Add:
		id, err := m.store.AddLearner(ctx, embedded.PeerURL(m.is().Peer))
		if err != nil {
			return err
		}
		// For those who look before this host has started.
		return m.store.SetMemberRecord(ctx, m.cfg.Node, &etcd.MemberRecord{ID: id})
	case Start:
		if err := m.Err(); err != nil {
			return err
		}
		return m.startMember(ctx)
	case Promote:
		_, self, _ := m.standing(ctx)
		return m.store.PromoteMember(ctx, self.ID)
	case Vote:
		if err := server.Ready(ctx); err != nil {
			return err
		}
		s := m.is()
		s.Role = Voter
		if err := m.set(s); err != nil {
			return err
		}
		m.store.SetEndpoints([]string{server.Endpoint()})
		m.turn(server) // who serves others by it begins
		return m.record(ctx, server)
	case Leave:
		return m.leave(ctx)
	case Remove:
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
	case Stop:
		if server == nil { // it has ended by itself
			return nil
		}
		server.Close()
		m.turn(nil)
		return nil
	case PutAway:
		to, err := embedded.PutAway(m.cfg.DataDir, "left", time.Now())
		if err == nil {
			m.log.Info("the data of this host's member are put away; remove them when all is well", "directory", to)
		}
		return err
	case Retire:
		if err := embedded.ForgetSecrets(m.cfg.PKIDir); err != nil {
			return err
		}
		if err := m.store.SetMemberRecord(ctx, m.cfg.Node, nil); err != nil {
			return err
		}
		return m.set(State{Role: Client})
	}
	return fmt.Errorf("%s: this routerd does not know how", a)
}

func (m *Membership) takeSecrets(ctx context.Context, order *Order) error {
	d := m.cfg.Datastore
	if order == nil || order.Issuer == "" {
		return errors.New("the order does not say where the members' secrets are")
	}
	if d.CAFile == "" || d.CertFile == "" {
		return errors.New("this host has no certificate of its own (datastore.certFile): take it into the cluster with routerd join")
	}
	pair, err := tls.LoadX509KeyPair(d.CertFile, d.KeyFile)
	if err != nil {
		return fmt.Errorf("read this host's certificate: %w", err)
	}
	if of := pair.Leaf.Subject.CommonName; of != m.cfg.Node {
		return fmt.Errorf("%s is a certificate of %q, and a member needs one of its own, %q: have this host join anew with routerd join", d.CertFile, of, m.cfg.Node)
	}
	ca, key, err := join.AskSecrets(ctx, order.Issuer, d.CAFile, d.CertFile, d.KeyFile)
	if err != nil {
		return err
	}
	return embedded.InstallSecrets(m.cfg.PKIDir, ca, key, time.Now())
}

// enter makes this host a learner: nothing that is there from before may come back as its data.
func (m *Membership) enter() error {
	addr, err := m.cfg.Address()
	if err != nil {
		return err
	}
	to, err := embedded.PutAway(m.cfg.DataDir, "before", time.Now())
	if err != nil {
		return err
	}
	if to != "" {
		m.log.Warn("data of an embedded datastore of before are put away", "directory", to)
	}
	return m.set(State{Role: Learner, Peer: netip.AddrPortFrom(addr, m.cfg.PeerPort), Serve: netip.AddrPortFrom(addr, ServePort(m.cfg.Datastore.Endpoints))})
}

// ServePort is that of the datastore as clients have it.
func ServePort(endpoints []string) uint16 {
	for _, e := range endpoints {
		if u, err := url.Parse(e); err == nil {
			if p, err := strconv.ParseUint(u.Port(), 10, 16); err == nil {
				return uint16(p)
			}
		}
	}
	return 2379
}

func (m *Membership) startMember(ctx context.Context) error {
	if m.role() == Voter { // it has ended by itself, and is a member still
		return &Fatal{Err: errors.New("the embedded datastore ended by itself")}
	}
	_, _, list := m.standing(ctx)
	if len(list) == 0 && !embedded.HasData(m.cfg.DataDir) {
		return errors.New("the members do not answer, and without them a new member would be a cluster of its own")
	}
	var all []string
	for _, one := range list {
		name := cmp.Or(one.Name, m.cfg.Node) // of a member that has never started there is one
		for _, p := range one.Peers {
			all = append(all, name+"="+p)
		}
	}
	return m.start(ctx, strings.Join(all, ","))
}

// leave begins to leave: from here on the datastore is other hosts'.
func (m *Membership) leave(ctx context.Context) error {
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
	case among == HasVote && voters < 2:
		return errLastMember
	case len(others) == 0:
		return errors.New("no other member says yet where clients reach it")
	}
	if m.cfg.Datastore.CertFile == "" {
		if err := embedded.IssueClient(m.cfg.PKIDir, m.cfg.ClientPKIDir, m.cfg.Node); err != nil {
			return err
		}
	}
	s := m.is()
	s.Role = Leaving
	if err := m.set(s); err != nil {
		return err
	}
	m.store.SetEndpoints(others)
	server := m.Server()
	m.turn(server) // who served others by it ends
	return nil
}

var errLastMember = errors.New("this is the last member of the datastore's cluster, which has all that there is: promote another host first")

// record says where clients reach this host's member.
func (m *Membership) record(ctx context.Context, server *embedded.Server) error {
	addr := server.Listen().Addr()
	if addr.IsUnspecified() {
		var err error
		if addr, err = m.cfg.Address(); err != nil {
			return err
		}
	}
	return m.store.SetMemberRecord(ctx, m.cfg.Node, &etcd.MemberRecord{
		ID: server.ID(), Endpoint: "https://" + netip.AddrPortFrom(addr, server.Listen().Port()).String(),
	})
}

// Settled implements [Host]: a voter keeps the members' records.
func (m *Membership) Settled(ctx context.Context) {
	server := m.Server()
	if m.role() != Voter || server == nil || !server.Listen().IsValid() {
		return
	}
	if err := m.keepRecords(ctx, server); err != nil && ctx.Err() == nil {
		m.log.Debug("the members' records are not compared", "error", err)
	}
}

func (m *Membership) keepRecords(ctx context.Context, server *embedded.Server) error {
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
	if r := have[m.cfg.Node]; r.ID != server.ID() || r.Endpoint == "" {
		if err := m.record(ctx, server); err != nil {
			return err
		}
	}
	for node, r := range have {
		is := func(one etcd.Member) bool { return one.ID == r.ID }
		if node != m.cfg.Node && !slices.ContainsFunc(list, is) {
			m.log.Info("a host is no member of the datastore any more", "host", node)
			if err := m.store.SetMemberRecord(ctx, node, nil); err != nil {
				return err
			}
		}
	}
	return nil
}

// openDoor has the first member take others.
func (m *Membership) openDoor(ctx context.Context, server *embedded.Server, addr netip.Addr) error {
	// etcd drops one of two changes of its members that come at once, without a word.
	m.door.Lock()
	defer m.door.Unlock()
	at := netip.AddrPortFrom(addr, m.cfg.PeerPort)
	was := m.is().Peer
	if was.IsValid() {
		at = was
	}
	if err := server.ServePeers(at); err != nil {
		return err
	}
	if was != at {
		// On disk before anybody may come in: it is to be open after the next start.
		if err := m.set(State{Role: Voter, Peer: at, Serve: server.Listen()}); err != nil {
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
