package engine

import (
	"log/slog"
	"net/netip"
	"time"

	"github.com/routerd/routerd/control/bgp/engine/attrs"
	"github.com/routerd/routerd/control/bgp/engine/conn"
	"github.com/routerd/routerd/control/bgp/engine/fsm"
	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// Options are what an [Engine] is from its beginning to its end.
type Options struct {
	Log      *slog.Logger
	AS       uint32
	RouterID netip.Addr // IPv4

	// Restarting says that this host forwards as before though its speaker is new:
	// peers are asked to keep what they have of it (RFC 4724 section 4.1). They are sent
	// End-of-RIB when every peer has sent its own, or has no graceful restart, and after
	// Deferral at the latest.
	Restarting bool
	Deferral   time.Duration

	// LimitPause is for how long a peer that announced more than its limit is not
	// tried again.
	LimitPause time.Duration

	Policy Policy // nil: everything is accepted and advertised

	// Call is asked of a connection from an address that no peer has, whether it is soon to have one: with false the
	// connection is closed, with true it waits for [Engine.SetPeers]. It must not block. Nil: there are none.
	Call func(from netip.Addr) bool
}

// Family is what a session has of an address family.
type Family struct {
	Enabled   bool
	Limit     int           // the session ends when the peer announces more; 0: no limit
	StaleTime time.Duration // for how long stale paths are kept after the restart time (RFC 9494); 0: not
}

// Peer is a session as it should be. Peers are comparable.
type Peer struct {
	Addr    netip.Addr // with a zone over link-local addresses; of a second peer at an address its [Identity]
	Port    uint16
	AS      uint32
	LocalAS uint32 // this side's, which decides between iBGP and eBGP; 0: the engine's

	Source  netip.Addr    // to connect from; invalid: the kernel chooses
	Device  string        // that connections are bound to; empty: none
	Passive bool          // the peer connects
	Wait    time.Duration // after which a passive side connects all the same; 0: never
	Auth    conn.Auth     // that connections are signed with
	Hops    uint8         // to the peer for the check of RFC 5082; 0: no check

	// Others are passwords that the peer may have in place of Auth.Password, while one is replaced. Connections
	// that this side opens try them in turn when nothing is heard; what the peer opens has that one.
	Others conn.Passwords

	HoldTime, ConnectRetry time.Duration
	Keepalive              time.Duration // 0: a third of the hold time
	RestartTime            time.Duration // for which the peer is asked to keep routes (RFC 4724); 0: no graceful restart

	Families        [wire.Families]Family
	ExtendedNextHop bool // IPv4 with IPv6 next hops (RFC 8950)

	AllowOwnAS int        // how often the own AS may be in a received path
	ClusterID  netip.Addr // valid: the peer is a client of this route reflector (RFC 4456)

	// ExportKey is equal for peers whose Policy.Export is the same.
	ExportKey string
}

// Origin is a path that begins here.
type Origin struct {
	Prefix      netip.Prefix
	NextHop     netip.Addr // invalid or unspecified: each session's own address
	LocalPref   uint32     // 0: none
	Communities []uint32
	Large       []attrs.Large
}

// Policy judges paths, beside BGP's own rules: AS loops, ORIGINATOR_ID and
// CLUSTER_LIST of what is received; of what is advertised, that nothing goes back to where
// it came from, the rules between iBGP peers, well-known communities, LLGR_STALE, and
// that no path goes to a peer whose AS is in it.
type Policy interface {
	Import(p Peer) Judge
	Export(p Peer) Judge // of what is advertised to all peers with p's ExportKey
}

// Judge judges a path. It is called with the engine's lock, never twice at once, and must
// be a function of the path. The path is the engine's, and valid until it returns.
type Judge func(p *Path) Verdict

// Verdict is what becomes of a path.
type Verdict struct {
	Accept bool
	Edit   *attrs.Edit // nil: the path is as it is
}

// Path is a path as others see it.
type Path struct {
	Prefix   netip.Prefix
	Peer     netip.Addr   // that sent it; invalid: it begins here
	RouterID uint32       // of the peer
	External bool         // from a peer in another AS
	Set      attrs.Handle // the same as long as the lock is held: prefixes with equal ones have equal attributes
	attrs.View

	Best     bool
	Multi    bool // of equal cost with the best, which has it too
	Stale    bool // kept over a restart of its peer (RFC 4724)
	Accepted bool // takes part in the choice
	Since    time.Time
}

// EventKind is what an [Event] is about.
type EventKind uint8

// The kinds. EndOfRIB and Withdrawn come after all changes before them, the others
// before all changes that they lead to.
const (
	Up        EventKind = iota + 1 // a session is established
	Down                           // it has ended
	Failed                         // an attempt to establish one has
	EndOfRIB                       // the peer has sent all it has of a family, in the session that is up
	Expired                        // the peer has not come back within its restart time
	Lost                           // what was kept of it goes, for it is not reached any more
	Withdrawn                      // what a peer had announced before its session ended is gone
	Resumed                        // a peer that announced too much is tried again
)

// Event is what happened to a peer.
type Event struct {
	Kind     EventKind
	Peer     netip.Addr
	Time     time.Time
	Session  *fsm.Session // of Up, Down and EndOfRIB
	Reason   fsm.Reason   // of Down and Failed
	Retained bool         // Down: what the peer announced is kept for its restart time
	Limited  bool         // Down: it announced too much, and is left alone for a while
	Family   wire.Family  // of EndOfRIB
}

// Table is one that is asked for.
type Table uint8

// The tables.
const (
	Best       Table = iota // all paths of all peers, in no order; those of one prefix come together, the best one first
	Received                // what one peer announced, as it did; of an invalid Peer: what each did, ordered like Best
	Advertised              // what one peer is advertised, as it is
)

// Query asks for paths.
type Query struct {
	Table  Table
	Peer   netip.Addr   // of Received and Advertised
	Prefix netip.Prefix // and all within it; invalid: all
	Exact  bool         // the prefix alone

	// Pause is called now and then, without the engine's lock; an error ends the query. nil: it is not.
	Pause func() error
}

// Messages counts messages by type (RFC 4271 section 4.1, RFC 2918).
type Messages struct{ Open, Update, Notification, Keepalive, Refresh uint64 }

// FamilyStatus is how many prefixes of a family there are.
type FamilyStatus struct {
	Enabled                               bool // the session has it
	Received, Accepted, Stale, Advertised int
}

// Status is how a peer is.
type Status struct {
	Addr     netip.Addr
	State    fsm.State
	Session  *fsm.Session // nil: none is up
	RouterID uint32       // 0: not known
	Local    netip.Addr   // this side's address of the session
	Limited  bool         // it announced too much, and is left alone for a while
	Keys     conn.KeyUse  // of the session's connection
	Families [wire.Families]FamilyStatus
	In, Out  Messages
}

// Scope is what is to be judged again.
type Scope struct {
	Import, Export bool
	Peers          []netip.Addr   // nil: all
	Within         []netip.Prefix // what is inside one of them; nil: all
	Notify         bool           // Take hands on what was judged by Import also where nothing is otherwise
}
