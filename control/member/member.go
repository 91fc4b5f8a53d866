// Package member has a host be what it is to be in the cluster of the embedded datastore: a
// client of it, a member that learns, one that votes, or one that leaves. [Next] decides
// and [Agent] has the host do it, one step at a time, each of which may be the last
// before the host is killed. [Membership] is that host: its server and its client.
package member

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/routerd/routerd/control/atomicfile"
)

// Role is what a host is.
type Role string

// The roles. A host without a file of its state has none: it is what its configuration says.
const (
	Client  Role = "client"
	Learner Role = "learner" // it gets the data, and has no vote
	Voter   Role = "voter"
	Leaving Role = "leaving" // it goes on as a client
)

// IsMember reports whether a host of the role runs a server, or is to.
func (r Role) IsMember() bool { return r == Learner || r == Voter || r == Leaving }

// State is what a host knows of itself, on disk.
type State struct {
	Role Role `json:"role"`
	// Peer and Serve are where its server listens for the other members, and for clients.
	Peer  netip.AddrPort `json:"peer,omitzero"`
	Serve netip.AddrPort `json:"serve,omitzero"`
}

// LoadState reads the state of a host; none is the zero value.
func LoadState(file string) (State, error) {
	var s State
	b, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return s, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &s)
	}
	if err == nil && s.Role != Client && !s.Role.IsMember() {
		err = fmt.Errorf("role %q: want client, learner, voter or leaving", s.Role)
	}
	if err != nil {
		return s, fmt.Errorf("what this host is in the datastore's cluster: %s: %w", file, err)
	}
	return s, nil
}

// Save writes the state.
func (s State) Save(file string) error {
	b, err := json.Marshal(s)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		return err
	}
	return atomicfile.Write(file, append(b, '\n'), 0o600)
}

// Standing is how etcd's cluster has a host.
type Standing int

// The standings.
const (
	Unknown  Standing = iota // no member answers
	Absent                   // it is not among the members
	Added                    // as a learner that has never started
	Learning                 // as a learner
	HasVote                  // as a voter
)

// Facts are what is the case on a host.
type Facts struct {
	Role Role
	// Wanted is what an order says that it is to be: Voter, Client, or nothing.
	Wanted  Role
	Secrets bool // it has the authority's key
	Data    bool // there are data of a member
	Running bool // its server runs
	Among   Standing
}

// Action is one step.
type Action string

// The steps. Each may be taken again by one that does not know whether it was taken.
const (
	Nothing     Action = ""
	TakeSecrets Action = "get the authority's key from a member"
	Enter       Action = "become a learner"        // puts away data of before
	Add         Action = "be added to the members" // in etcd's cluster
	Start       Action = "start the server"
	Promote     Action = "get a vote when it has caught up"
	Vote        Action = "become a voter"
	Leave       Action = "begin to leave"
	Remove      Action = "be removed from the members"
	Stop        Action = "stop the server"
	PutAway     Action = "put its data away"
	Retire      Action = "become a client" // forgets the authority's key
)

// Next returns the step that a host takes next.
func Next(f Facts) Action {
	switch f.Role {
	case Client, "":
		switch {
		case f.Wanted != Voter && f.Secrets:
			return Retire // the order ended after it had them
		case f.Wanted != Voter:
			return Nothing
		case !f.Secrets:
			return TakeSecrets
		}
		return Enter
	case Learner:
		return nextOfLearner(f)
	case Voter:
		switch {
		case f.Among == Absent: // it was removed elsewhere
			return Leave
		case f.Wanted == Client && f.Among != Unknown:
			return Leave
		case !f.Running && !f.Data && f.Among != Unknown:
			// A member that has lost its data must not come back as itself.
			return Leave
		case !f.Running && f.Data:
			return Start
		}
		return Nothing
	case Leaving:
		return nextOfLeaver(f)
	}
	return Nothing
}

func nextOfLearner(f Facts) Action {
	switch f.Among {
	case Unknown:
		if !f.Running && f.Data {
			return Start // it may have a vote already, and be the one whose vote is missing
		}
		return Nothing
	case Absent:
		switch {
		case f.Data, f.Wanted == Client: // it was added once, and then removed
			return Leave
		case f.Wanted == Voter:
			return Add
		}
		return Leave // the order has ended before it was added
	case HasVote:
		switch {
		case f.Running:
			return Vote
		case !f.Data: // it has lost them
			return Remove
		}
		return Start
	case Added, Learning:
	}
	switch {
	case f.Wanted == Client:
		return Leave
	case f.Among == Learning && !f.Data && !f.Running: // it has lost them
		return Remove
	case !f.Running:
		return Start
	}
	return Promote
}

func nextOfLeaver(f Facts) Action {
	switch {
	case f.Among == Unknown && !f.Running && f.Data:
		return Start // it may be the one whose vote is missing
	case f.Among == Unknown:
		return Nothing
	case f.Among != Absent && f.Among != Added && !f.Running && f.Data:
		return Start
	case f.Among != Absent:
		return Remove
	case f.Running:
		return Stop
	case f.Data:
		return PutAway
	}
	return Retire
}

// Order has a host become something. It is signed with the authority's key, which members
// alone have: whoever is a mere client of the datastore could write one too.
type Order struct {
	Node    string    `json:"node"`
	Wanted  Role      `json:"wanted"` // Voter or Client
	Expires time.Time `json:"expires"`
	// Issuer is where a member gives a new one what it needs, HOST:PORT.
	Issuer    string `json:"issuer,omitempty"`
	Signature []byte `json:"signature"`

	// What the host says of it.
	Step    string `json:"step,omitempty"`    // what it does
	Problem string `json:"problem,omitempty"` // why that has not come about yet
	Done    bool   `json:"done,omitempty"`
}

// Digest is what is signed of an order.
func (o Order) Digest() []byte {
	sum := sha256.Sum256(fmt.Appendf(nil, "routerd membership order v1\n%s\n%s\n%d\n%s\n", o.Node, o.Wanted, o.Expires.Unix(), o.Issuer))
	return sum[:]
}

// Check reports why an order does not hold for a node.
func (o Order) Check(node string, now time.Time, verify func(digest, signature []byte) bool) error {
	switch {
	case o.Node != node:
		return fmt.Errorf("it is for %s", o.Node)
	case o.Wanted != Voter && o.Wanted != Client:
		return fmt.Errorf("it has the host become %q: this routerd may be too old for it", o.Wanted)
	case !now.Before(o.Expires):
		return fmt.Errorf("it ended at %s, and this host's clock says %s", o.Expires.UTC().Format(time.RFC3339), now.UTC().Format(time.RFC3339))
	case !verify(o.Digest(), o.Signature):
		return errors.New("no member has signed it")
	}
	return nil
}
