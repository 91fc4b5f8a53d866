package member

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/store/embedded"
	"github.com/routerd/routerd/store/etcd"
)

const (
	// orderLife is how long an order holds: its host may be away for a while.
	orderLife = 15 * time.Minute

	// unheard is after how long a host that has not taken its order is spoken of.
	unheard = 5 * time.Second

	// fewBehind is how many entries of the log a member may lack that keeps up: more
	// come while it is asked.
	fewBehind = 1000
)

// defaultTokenTTL is how long a join token is good.
const defaultTokenTTL = time.Hour

// Service answers `routerctl cluster`.
type Service struct {
	apiv1.UnimplementedClusterServer
	m       *Membership // nil: the datastore is no etcd
	issuer  *Issuer
	without string // what is to be said where there is no membership
}

// NewService makes the service; without an issuer hosts join by other means, as without
// says.
func NewService(i *Issuer, without string) Service {
	s := Service{issuer: i, without: without}
	if i != nil {
		s.m = i.m
	}
	return s
}

// JoinToken implements [apiv1.ClusterServer].
func (s Service) JoinToken(ctx context.Context, r *apiv1.JoinTokenRequest) (*apiv1.JoinTokenResponse, error) {
	if s.m == nil {
		return nil, refused("%s", s.without)
	}
	issuer := s.issuer.now()
	if issuer == nil {
		return nil, refused("%s", s.m.whyNoTokens())
	}
	ttl := defaultTokenTTL
	if r.GetTtl() != nil {
		ttl = r.GetTtl().AsDuration()
	}
	host := r.GetAddress()
	if host == "" {
		var err error
		if host, err = s.m.servedAddress(); err != nil {
			return nil, status.Error(codes.FailedPrecondition, err.Error())
		}
	}
	t, err := issuer.Issue(ctx, host, ttl)
	if err != nil {
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	text, err := t.Encode()
	if err != nil {
		return nil, err
	}
	return &apiv1.JoinTokenResponse{Token: text, Expires: timestamppb.New(t.Expires), Host: host}, nil
}

// whyNoTokens says why no host can join here, and what to do.
func (m *Membership) whyNoTokens() string {
	if m.role() != Voter {
		return fmt.Sprintf("the datastore is at %v: make the token on the host that keeps it; to an etcd of your own, hosts join by its certificates in their configuration", m.cfg.Datastore.Endpoints)
	}
	return "the datastore of this host serves nobody else: set datastore.embedded.listen to an address of this host and a port, such as 10.1.0.11:2379, and restart routerd"
}

// servedAddress is by which other hosts reach the datastore.
func (m *Membership) servedAddress() (string, error) {
	server := m.Server()
	if server == nil {
		return "", errors.New("the datastore of this host does not run")
	}
	if a := server.Listen().Addr(); !a.IsUnspecified() {
		return a.String(), nil
	}
	a, err := m.cfg.Address()
	if err != nil {
		return "", fmt.Errorf("the datastore serves all addresses, and %w: name one by --address", err)
	}
	return a.String(), nil
}

// refused is an error of what the operator asked.
func refused(format string, args ...any) error {
	return status.Errorf(codes.FailedPrecondition, format, args...)
}

// Members implements [apiv1.ClusterServer].
func (s Service) Members(ctx context.Context, _ *apiv1.MembersRequest) (*apiv1.MembersResponse, error) {
	m := s.m
	if m == nil {
		return nil, refused("%s", s.without)
	}
	return m.list(ctx)
}

func (m *Membership) list(ctx context.Context) (*apiv1.MembersResponse, error) {
	list, err := m.store.Members(ctx)
	if err != nil {
		return nil, err
	}
	records, err := m.store.MemberRecords(ctx)
	if err != nil {
		return nil, err
	}
	server := m.Server()
	resp := &apiv1.MembersResponse{}
	states := make([]etcd.MemberStatus, len(list))
	var asking errgroup.Group
	for i, one := range list {
		out := &apiv1.ClusterMember{Host: one.Name, Id: strconv.FormatUint(one.ID, 16), Role: "voter", Peer: strings.Join(one.Peers, ",")}
		resp.Members = append(resp.Members, out)
		for node, r := range records {
			if r.ID == one.ID {
				out.Host, out.Endpoint = node, r.Endpoint
			}
		}
		ask := out.Endpoint
		if server != nil && server.ID() == one.ID {
			ask, out.Host = server.Endpoint(), m.cfg.Node
			if at := server.Listen(); out.Endpoint == "" && at.IsValid() {
				out.Endpoint = "https://" + at.String()
			}
		}
		if out.Endpoint == "" && len(m.cfg.Datastore.Endpoints) == 1 && len(list) == 1 {
			ask, out.Endpoint = m.cfg.Datastore.Endpoints[0], m.cfg.Datastore.Endpoints[0]
		}
		if one.Learner {
			out.Role = "learner"
			out.State, out.Problem = "learning", "it gets its vote when it has caught up; if it never does: routerctl cluster remove "+cmp.Or(out.Host, out.Id)
			if one.Name == "" {
				out.State = "not started"
				out.Problem = fmt.Sprintf("start routerd on %[1]s, and it goes on; or routerctl cluster remove %[1]s", cmp.Or(out.Host, out.Id))
			}
			continue
		}
		resp.Voters++
		asking.Go(func() error {
			st, err := m.store.MemberStatus(ctx, ask)
			if err != nil {
				out.State = "unreachable"
				out.Problem = fmt.Sprintf("%v: start routerd on %[2]s; if it is lost for good: routerctl cluster remove %[2]s", err, cmp.Or(out.Host, out.Id))
				return nil
			}
			states[i], out.State = st, "follower"
			if st.Leader {
				out.State = "leader"
			}
			out.Version, out.Size, out.Problem = st.Version, st.DBSize, strings.Join(st.Failures, "; ")
			return nil
		})
	}
	_ = asking.Wait() // what they find is in the list
	var head uint64
	for _, st := range states {
		head = max(head, st.Index)
	}
	up := uint32(0)
	for i, st := range states {
		if st.Version == "" {
			continue
		}
		up++
		if lag := head - st.Index; lag > fewBehind {
			resp.Members[i].Behind = lag
		}
	}
	slices.SortFunc(resp.Members, func(a, b *apiv1.ClusterMember) int {
		return cmp.Or(cmp.Compare(a.GetHost(), b.GetHost()), cmp.Compare(a.GetId(), b.GetId()))
	})
	resp.Quorum = resp.Voters/2 + 1
	resp.Warning = warnOf(resp.GetVoters(), up)
	return resp, nil
}

// warnOf says what is wrong with a number of voters, of which some are up.
func warnOf(voters, up uint32) string {
	quorum := voters/2 + 1
	switch {
	case up < voters && up == quorum:
		return fmt.Sprintf("%d of %d members are up: if one more is lost, nothing can be written", up, voters)
	case voters > 0 && voters%2 == 0:
		return fmt.Sprintf("%d members with a vote stand the loss of no more than %d do: promote one more, or demote one", voters, voters-1)
	}
	return ""
}

// coordinates returns the server of a host that may change the cluster.
func (s Service) coordinates(ctx context.Context) (*Membership, *embedded.Server, error) {
	m := s.m
	if m == nil {
		return nil, nil, refused("%s", s.without)
	}
	server := m.Server()
	switch {
	case server == nil || m.role() != Voter:
		hosts := ""
		if records, err := m.store.MemberRecords(ctx); err == nil && len(records) > 0 {
			var names []string
			for node, r := range records {
				if r.Endpoint != "" {
					names = append(names, node)
				}
			}
			slices.Sort(names)
			hosts = ": " + strings.Join(names, ", ")
		}
		return nil, nil, refused("this host is a client of the datastore: give the command on a member%s", hosts)
	case !server.Listen().IsValid():
		return nil, nil, refused("%s", m.whyNoTokens())
	}
	return m, server, nil
}

// ChangeMember implements [apiv1.ClusterServer].
func (s Service) ChangeMember(r *apiv1.ChangeMemberRequest, stream grpc.ServerStreamingServer[apiv1.ChangeMemberProgress]) error {
	ctx := stream.Context()
	m, server, err := s.coordinates(ctx)
	if err != nil {
		return err
	}
	host, wanted := cmp.Or(r.GetHost(), m.cfg.Node), Client
	if r.GetMember() {
		wanted = Voter
	}
	say := func(format string, args ...any) error {
		return stream.Send(&apiv1.ChangeMemberProgress{Message: fmt.Sprintf(format, args...)})
	}
	ended := func(format string, args ...any) error {
		last := &apiv1.ChangeMemberProgress{Message: fmt.Sprintf(format, args...), Done: true}
		if now, err := m.list(ctx); err == nil {
			last.Warning = now.GetWarning()
		}
		return stream.Send(last)
	}
	now, err := m.list(ctx)
	if err != nil {
		return err
	}
	at := slices.IndexFunc(now.GetMembers(), func(one *apiv1.ClusterMember) bool { return one.GetHost() == host })
	switch {
	case wanted == Voter && at >= 0 && now.GetMembers()[at].GetRole() == "voter":
		return ended("%s is a member with a vote.", host)
	case wanted == Client && at < 0:
		return ended("%s is no member.", host)
	case wanted == Client && now.GetVoters() == 1 && now.GetMembers()[at].GetRole() == "voter":
		return refused("%s", errLastMember)
	}
	name, err := m.store.Name(ctx, host)
	if err != nil {
		return err
	}
	if name.Holder == nil {
		if wanted == Client {
			return refused("no routerd runs on a host %s: start it there; if it is lost for good: routerctl cluster remove %s", host, host)
		}
		return refused("no routerd runs on a host %s: take it into the cluster with routerd join first, and start it there", host)
	}
	addr, err := s.m.servedAddress()
	if err != nil {
		return refused("%v", err)
	}
	if wanted == Voter {
		ip, err := netip.ParseAddr(addr)
		if err != nil {
			return err
		}
		if err := m.openDoor(ctx, server, ip); err != nil {
			return refused("%v", err)
		}
	}
	issuer, err := m.joinAddress(server)
	if err != nil {
		return refused("%v", err)
	}
	o := Order{Node: host, Wanted: wanted, Expires: time.Now().Add(orderLife).Truncate(time.Second), Issuer: issuer}
	if o.Signature, err = server.Sign(o.Digest()); err != nil {
		return err
	}
	b, err := json.Marshal(o)
	if err != nil {
		return err
	}
	orders := m.store.Orders()
	if err := orders.Add(ctx, host, b, orderLife); err != nil {
		return err
	}
	if err := say("%s has its order, which holds until %s.", host, o.Expires.Local().Format(time.DateTime)); err != nil {
		return err
	}
	if err := m.await(ctx, orders, host, say); err != nil {
		return err
	}
	if wanted == Client {
		return ended("%s is a client of the datastore.", host)
	}
	return ended("%s is a member with a vote.", host)
}

// await reports a host's steps until it is what the order says.
func (m *Membership) await(ctx context.Context, orders etcd.Records, host string, say func(string, ...any) error) error {
	changed := async.NewSignal()
	following, stop := context.WithCancel(ctx)
	var over errgroup.Group
	over.Go(func() error {
		last := int64(0)
		orders.Follow(following, func(revisions map[string]int64) {
			if rev := revisions[host]; rev != last {
				last = rev
				changed.Set()
			}
		})
		return nil
	})
	defer func() { stop(); _ = over.Wait() }()
	silence := time.NewTimer(unheard)
	defer silence.Stop()
	said := ""
	tell := func(text string) error {
		if text == said {
			return nil
		}
		said = text
		return say("%s", text)
	}
	for {
		select {
		case <-changed:
		case <-silence.C:
			if said == "" {
				if err := tell(host + " has not taken it yet: its routerd may be of a version that has no members, or may not reach the datastore, or its clock is ahead; see its log"); err != nil {
					return err
				}
			}
			continue
		case <-ctx.Done():
			return status.Errorf(codes.DeadlineExceeded, "%s is not there yet: %s; it goes on while the order holds, and the same command follows it again", host, cmp.Or(said, "it has not said anything"))
		}
		b, rev, err := orders.Read(ctx, host)
		if err != nil {
			continue // the next change, or the end, comes
		}
		if b == nil {
			return refused("the order to %s has ended, or was taken back by routerctl cluster remove", host)
		}
		var o Order
		if err := json.Unmarshal(b, &o); err != nil {
			return fmt.Errorf("the order to %s: %w", host, err)
		}
		switch {
		case o.Done:
			// It would end by itself; until then the host would be listened for.
			_ = orders.Change(ctx, host, rev, nil)
			return nil
		case o.Problem != "":
			err = tell(fmt.Sprintf("%s is to %s: %s", host, cmp.Or(o.Step, "go on"), o.Problem))
		case o.Step != "":
			err = tell(fmt.Sprintf("%s is to %s.", host, o.Step))
		}
		if err != nil {
			return err
		}
	}
}

// RemoveMember implements [apiv1.ClusterServer].
func (s Service) RemoveMember(ctx context.Context, r *apiv1.RemoveMemberRequest) (*apiv1.RemoveMemberResponse, error) {
	m, server, err := s.coordinates(ctx)
	if err != nil {
		return nil, err
	}
	host := r.GetHost()
	now, err := m.list(ctx)
	if err != nil {
		return nil, err
	}
	orders := m.store.Orders()
	withdrawn := false
	if b, rev, err := orders.Read(ctx, host); err == nil && b != nil {
		if err := orders.Change(ctx, host, rev, nil); err != nil {
			return nil, err
		}
		withdrawn = true
	}
	at := slices.IndexFunc(now.GetMembers(), func(one *apiv1.ClusterMember) bool { return one.GetHost() == host || one.GetId() == host })
	if at < 0 {
		if withdrawn {
			return &apiv1.RemoveMemberResponse{Message: host + " is no member; its order is taken back."}, nil
		}
		var names []string
		for _, one := range now.GetMembers() {
			names = append(names, cmp.Or(one.GetHost(), one.GetId()))
		}
		return nil, refused("there is no member %s: there are %s", host, strings.Join(names, ", "))
	}
	one := now.GetMembers()[at]
	id, err := strconv.ParseUint(one.GetId(), 16, 64)
	if err != nil {
		return nil, err
	}
	switch {
	case id == server.ID():
		return nil, refused("%s is this host: routerctl cluster leave", host)
	case one.GetRole() == "voter" && one.GetState() != "unreachable" && !r.GetForce():
		return nil, refused("%s is up: routerctl cluster demote %s has it leave in order; to remove it all the same, say --force", host, cmp.Or(one.GetHost(), host))
	}
	if err := m.store.RemoveMember(ctx, id); err != nil {
		return nil, refused("%s", err)
	}
	if one.GetHost() != "" {
		if err := m.store.SetMemberRecord(ctx, one.GetHost(), nil); err != nil {
			return nil, err
		}
	}
	resp := &apiv1.RemoveMemberResponse{Message: host + " is no member any more. If it comes back it finds out, and goes on as a client."}
	if now, err := m.list(ctx); err == nil {
		resp.Warning = now.GetWarning()
	}
	return resp, nil
}
