package etcd

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
)

// byConnection has connections through a unix socket, which only root may open, go
// without TLS: a host that becomes a member of the cluster, or is one no more, goes from
// the one to the other.
type byConnection struct {
	credentials.TransportCredentials
}

func (c byConnection) ClientHandshake(ctx context.Context, authority string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	if a := conn.RemoteAddr(); a != nil && a.Network() == "unix" {
		return insecure.NewCredentials().ClientHandshake(ctx, authority, conn)
	}
	return c.TransportCredentials.ClientHandshake(ctx, authority, conn)
}

func (c byConnection) Clone() credentials.TransportCredentials {
	return byConnection{c.TransportCredentials.Clone()}
}

// SetEndpoints has the client use other endpoints from now on. What is under way on one
// that is not among them is cut off.
func (s *Store) SetEndpoints(endpoints []string) { s.client.SetEndpoints(endpoints...) }

// Endpoints returns those in use.
func (s *Store) Endpoints() []string { return s.client.Endpoints() }

// Member is one of etcd's cluster.
type Member struct {
	ID      uint64
	Name    string // that of its node; empty: it has never started
	Peers   []string
	Learner bool // it has no vote
}

// Why the cluster does not change.
var (
	// ErrBehind says that a learner has not caught up yet.
	ErrBehind = errors.New("it has not caught up with the leader yet")
	// ErrNotNow says that the cluster must settle first.
	ErrNotNow = errors.New("the cluster does not change now")
	// ErrNoMember says that there is no such member.
	ErrNoMember = errors.New("there is no such member")
)

// Members lists the members of the cluster, by name.
func (s *Store) Members(ctx context.Context) ([]Member, error) {
	ctx, cancel := context.WithTimeout(ctx, nameTimeout)
	defer cancel()
	resp, err := s.client.MemberList(ctx)
	if err != nil {
		return nil, fmt.Errorf("list the datastore's members: %w", s.explain(ctx, err))
	}
	var list []Member
	for _, m := range resp.Members {
		list = append(list, Member{ID: m.ID, Name: m.Name, Peers: m.PeerURLs, Learner: m.IsLearner})
	}
	slices.SortFunc(list, func(a, b Member) int { return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.ID, b.ID)) })
	return list, nil
}

// AddLearner adds a member without a vote, which is to start then.
func (s *Store) AddLearner(ctx context.Context, peerURL string) (id uint64, err error) {
	err = s.change(ctx, "add a member", func(ctx context.Context) error {
		resp, err := s.client.MemberAddAsLearner(ctx, []string{peerURL})
		if err == nil {
			id = resp.Member.ID
		}
		return err
	})
	return id, err
}

// PromoteMember gives a learner its vote.
func (s *Store) PromoteMember(ctx context.Context, id uint64) error {
	return s.change(ctx, "give the member its vote", func(ctx context.Context) error {
		_, err := s.client.MemberPromote(ctx, id)
		return err
	})
}

// RemoveMember removes a member, for good: it ends by itself where it runs.
func (s *Store) RemoveMember(ctx context.Context, id uint64) error {
	return s.change(ctx, "remove the member", func(ctx context.Context) error {
		_, err := s.client.MemberRemove(ctx, id)
		return err
	})
}

// SetPeer changes where the other members reach one.
func (s *Store) SetPeer(ctx context.Context, id uint64, peerURL string) error {
	return s.change(ctx, "change the member's address", func(ctx context.Context) error {
		_, err := s.client.MemberUpdate(ctx, id, []string{peerURL})
		return err
	})
}

func (s *Store) change(ctx context.Context, what string, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, nameTimeout)
	defer cancel()
	err := do(ctx)
	if err == nil {
		return nil
	}
	plain := rpctypes.Error(err)
	for _, known := range []struct {
		is       error
		sentinel error
		why      string
	}{
		{rpctypes.ErrMemberLearnerNotReady, ErrBehind, ""},
		{rpctypes.ErrTooManyLearners, ErrNotNow, "another host is becoming a member, and one does at a time"},
		{rpctypes.ErrUnhealthy, ErrNotNow, "the members must have been connected to each other for 5 s"},
		{rpctypes.ErrMemberNotEnoughStarted, ErrNotNow, "too few of the members that would be left are up"},
		{rpctypes.ErrMemberNotFound, ErrNoMember, ""},
	} {
		if errors.Is(plain, known.is) {
			if known.why == "" {
				return fmt.Errorf("%s: %w", what, known.sentinel)
			}
			return fmt.Errorf("%s: %w: %s", what, known.sentinel, known.why)
		}
	}
	return fmt.Errorf("%s: %w", what, s.explain(ctx, err))
}

// MemberStatus is what a member says of itself.
type MemberStatus struct {
	Version  string
	Leader   bool
	Index    uint64 // of the log, as far as it has it
	DBSize   int64
	Failures []string // alarms, such as a full disk
}

// statusTimeout is how long a member may take to say how it is.
const statusTimeout = 3 * time.Second

// MemberStatus asks the member behind an endpoint.
func (s *Store) MemberStatus(ctx context.Context, endpoint string) (MemberStatus, error) {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	st, err := s.client.Status(ctx, endpoint)
	if err != nil {
		return MemberStatus{}, s.explain(ctx, err)
	}
	return MemberStatus{
		Version: st.Version, Leader: st.Leader == st.Header.MemberId, Index: st.RaftIndex, DBSize: st.DbSize, Failures: st.Errors,
	}, nil
}

// memberRoot is where members say how clients reach them.
const memberRoot = "/routerd/v1/members/"

// MemberRecord is what a member tells of itself.
type MemberRecord struct {
	ID       uint64 `json:"id,string"`          // in etcd's cluster
	Endpoint string `json:"endpoint,omitempty"` // for clients; empty: it does not serve them yet
}

// SetMemberRecord writes a node's record, and removes it if it is nil.
func (s *Store) SetMemberRecord(ctx context.Context, node string, r *MemberRecord) error {
	ctx, cancel := context.WithTimeout(ctx, nameTimeout)
	defer cancel()
	var err error
	if r == nil {
		_, err = s.client.Delete(ctx, memberRoot+node)
	} else {
		var b []byte
		if b, err = json.Marshal(r); err != nil {
			return err
		}
		_, err = s.client.Put(ctx, memberRoot+node, string(b))
	}
	if err != nil {
		return fmt.Errorf("write the member's record of %s: %w", node, s.explain(ctx, err))
	}
	return nil
}

// MemberRecords reads the members' records, by node.
func (s *Store) MemberRecords(ctx context.Context) (map[string]MemberRecord, error) {
	ctx, cancel := context.WithTimeout(ctx, nameTimeout)
	defer cancel()
	resp, err := s.client.Get(ctx, memberRoot, clientv3.WithPrefix())
	if err != nil {
		return nil, fmt.Errorf("read the members' records: %w", s.explain(ctx, err))
	}
	return decodeMembers(resp.Kvs), nil
}

// FollowMembers tells the members' records, and whenever one changes, as
// [Store.Presences] does nodes.
func (s *Store) FollowMembers(ctx context.Context, yield func(map[string]MemberRecord)) {
	s.members(ctx, memberRoot, func(kvs []*mvccpb.KeyValue) { yield(decodeMembers(kvs)) })
}

// decodeMembers leaves out what nobody can read.
func decodeMembers(kvs []*mvccpb.KeyValue) map[string]MemberRecord {
	out := map[string]MemberRecord{}
	for _, kv := range kvs {
		var r MemberRecord
		if json.Unmarshal(kv.Value, &r) == nil {
			out[strings.TrimPrefix(string(kv.Key), memberRoot)] = r
		}
	}
	return out
}

// EndpointsOf lists the endpoints of members, sorted.
func EndpointsOf(members map[string]MemberRecord) []string {
	var out []string
	for _, node := range slices.Sorted(maps.Keys(members)) {
		if e := members[node].Endpoint; e != "" && !slices.Contains(out, e) {
			out = append(out, e)
		}
	}
	return out
}
