package ui

import (
	"context"
	"fmt"
	"strings"
	"time"

	apiv1 "github.com/routerd/routerd/control/api/v1"
)

// How often the other hosts are asked for their sessions while a page is open, and for how
// long their answers count.
const (
	othersEvery = 3 * time.Second
	othersCount = 15 * time.Second
)

// followOthers asks the other hosts how their sessions are, until ctx ends, and tells the
// page where one has another state. However many pages are open, the operator asks the
// hosts once a second at most.
func (s *Server) followOthers(ctx context.Context) {
	tick := time.NewTicker(othersEvery)
	defer tick.Stop()
	for {
		if n := s.cfg.Watch.size(); n > 1 && n <= MaxMesh {
			if r, err := s.cfg.Hosts(ctx); err == nil && s.cfg.Watch.setLoads(r.GetHosts(), s.cfg.Now()) {
				s.cfg.Watch.sessionsChanged()
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// said is what an answer says of a host's sessions, as text: another one is a change.
func said(h *apiv1.HostLoad) string {
	out := []string{fmt.Sprint(h.GetSessionsUp(), h.GetSessions(), h.GetError() != "")}
	for _, p := range h.GetDown() {
		out = append(out, p.GetName()+p.GetAddress()+p.GetState())
	}
	return strings.Join(out, " ")
}

// other says how a session is of which this host is no end.
func (f Facts) other(s Session, node map[string]bool) (State, string) {
	if s.Problem != "" {
		return Down, fmt.Sprintf("session (%s): %s", s.Type, s.Problem)
	}
	for _, end := range []string{s.Node, s.Peer} {
		if f.Present != nil && node[end] && !f.Present[end] {
			return Down, fmt.Sprintf("session (%s): the daemon of %s is absent", s.Type, end)
		}
	}
	h := f.Loads[s.Node]
	if h == nil || h.GetError() != "" {
		return Unknown, fmt.Sprintf("session (%s): %s has not said how it is; open its page", s.Type, s.Node)
	}
	for _, p := range h.GetDown() {
		if p.GetAddress() == s.Addr && s.Addr != "" || p.GetName() == s.Peer && (s.Addr == "" || node[s.Peer]) {
			return Down, fmt.Sprintf("%s says: %s", s.Node, describeSession(p))
		}
	}
	if h.GetSessions() == 0 || int(h.GetSessions()-h.GetSessionsUp()) > len(h.GetDown()) {
		return Unknown, fmt.Sprintf("session (%s): %s has more that are down than it names", s.Type, s.Node)
	}
	return Up, fmt.Sprintf("%s says: session with %s (%s): up", s.Node, s.Peer, s.Type)
}

// addOther adds what one end says of a session to a link. Its other end may have said it
// already: what is known counts before what is not, and the worse of both.
func (l *Link) addOther(state State, says string) {
	switch {
	case l.Session == "" || l.Session == Unknown && state != Unknown:
		l.Session, l.Says = state, []string{says}
	case state == Down && l.Session != Down:
		l.Session, l.Says = state, append([]string{says}, l.Says...)
	}
}
