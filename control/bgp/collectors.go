package bgp

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/routerd/routerd/control/bgp/bmp"
	"github.com/routerd/routerd/control/bgp/engine"
	"github.com/routerd/routerd/control/bgp/engine/fsm"
	"github.com/routerd/routerd/control/bgp/engine/wire"
	"github.com/routerd/routerd/store"
)

// CollectorStatus is how the connection to a BMP collector is.
type CollectorStatus struct {
	Addr  netip.AddrPort
	State string // StateUp or StateStart
	Since time.Time
	Info  string // what is sent to it, or why it is not connected
	Sent  uint64 // bytes
}

// collectors has the connections to BMP collectors, and reports to them what an engine receives and
// chooses.
type collectors struct {
	engine *engine.Engine
	log    *slog.Logger
	self   bmp.Peer // of what was chosen
	name   string
	retry  time.Duration // after an attempt; a field so that a test need not wait

	change     sync.Mutex // held while the list is changed
	monitoring bool       // change guards it
	wg         sync.WaitGroup

	mu   sync.Mutex // guards list
	list []*collector
}

// collector is the connection to one.
type collector struct {
	*bmp.Station
	store.BMP
	cancel context.CancelCauseFunc
}

func newCollectors(e *engine.Engine, log *slog.Logger, c *Config) *collectors {
	id := c.RouterID.As4()
	return &collectors{engine: e, log: log, name: c.Node, self: bmp.Peer{AS: c.ASN, ID: binary.BigEndian.Uint32(id[:])}}
}

// bmpOf reads which collectors a node has. The error names the BGPConfiguration.
func (v *View) bmpOf(node string) ([]store.BMP, error) {
	for _, name := range []string{"node." + node, "default"} {
		c, ok := v.confs[name]
		if !ok {
			continue
		}
		value, ok := c.Annotations[store.AnnotationBMP]
		if !ok {
			continue
		}
		list, err := store.ParseBMP(value)
		if err != nil {
			return nil, fmt.Errorf("BGPConfiguration %s: annotation %s: %w", name, store.AnnotationBMP, err)
		}
		return list, nil
	}
	return nil, nil
}

// set makes the collectors those of a list; one that stays keeps its connection.
func (s *collectors) set(want []store.BMP) {
	s.change.Lock()
	defer s.change.Unlock()
	s.mu.Lock()
	var list, gone []*collector
	for _, c := range s.list {
		if slices.Contains(want, c.BMP) {
			list = append(list, c)
		} else {
			gone = append(gone, c)
		}
	}
	s.mu.Unlock()
	var starts []func()
	for _, b := range want {
		if !slices.ContainsFunc(list, func(c *collector) bool { return c.BMP == b }) {
			c, start := s.collector(b)
			list, starts = append(list, c), append(starts, start)
		}
	}
	s.mu.Lock()
	s.list = list
	s.mu.Unlock()
	for _, c := range gone {
		c.cancel(errors.New("the collector is no longer configured"))
	}
	if monitor := len(list) > 0; monitor != s.monitoring {
		if s.monitoring = monitor; monitor {
			s.engine.SetMonitor(s)
		} else {
			s.engine.SetMonitor(nil)
		}
	}
	for _, start := range starts { // what happens from now on is reported to them
		start()
	}
}

// stop ends all connections and waits for them.
func (s *collectors) stop() {
	s.change.Lock()
	defer s.change.Unlock()
	s.mu.Lock()
	for _, c := range s.list {
		c.cancel(errors.New("the speaker stops"))
	}
	s.list = nil
	s.mu.Unlock()
	s.engine.SetMonitor(nil)
	s.wg.Wait()
}

// collector returns a new one, and what starts it.
func (s *collectors) collector(b store.BMP) (*collector, func()) {
	c := &collector{BMP: b}
	var ctx context.Context
	ctx, c.cancel = context.WithCancelCause(context.Background())
	c.Station = bmp.NewStation(bmp.Options{
		Log: s.log, Addr: b.Collector, Retry: s.retry, Longest: max(s.retry, bmp.DefaultLongest), Limit: bmp.DefaultLimit,
		Begin: func(send func([]byte) error) error { return s.begin(ctx, c, send) },
	})
	return c, func() {
		s.wg.Go(func() { c.Run(ctx) })
		if b.Statistics > 0 {
			s.wg.Go(func() { s.report(ctx, c) })
		}
	}
}

// begin reports to a collector all there is.
func (s *collectors) begin(ctx context.Context, c *collector, send func([]byte) error) error {
	b := &beginning{of: s, to: c}
	b.messages = bmp.Initiation(nil, s.name, "routerd")
	if c.LocRIB {
		b.messages = s.self.Up(b.messages, bmp.LocRIB, time.Now(), netip.AddrPort{}, 0, s.open(), s.open(), "global")
	}
	return s.engine.Monitor(ctx, b, func() error {
		err := send(b.messages)
		b.messages = b.messages[:0]
		return err
	})
}

// beginning is what a collector is sent first, part by part.
type beginning struct {
	of       *collectors
	to       *collector
	messages []byte
}

// Begun implements [engine.Monitor].
func (b *beginning) Begun() { b.to.Open() }

// Up implements [engine.Monitor].
func (b *beginning) Up(m engine.Monitored) {
	b.messages = upOf(b.messages, m)
}

// Down implements [engine.Monitor]: it is the other one that reports.
func (*beginning) Down(engine.Monitored, fsm.Reason, bool) {}

// Updates implements [engine.Monitor].
func (b *beginning) Updates(v engine.View, m engine.Monitored, updates []byte) {
	if b.to.wants(v) {
		b.messages = b.of.peerOf(v, m).Routes(b.messages, viewOf(v), time.Now(), updates)
	}
}

// open is the OPEN that stands for both sides' of what was chosen (RFC 9069 section 5.1).
func (s *collectors) open() []byte {
	o := fsm.Open{AS: s.self.AS, ID: s.self.ID}
	o.AS4 = true
	for f := range o.Family {
		o.Family[f].Enabled = true
	}
	m, err := o.Append(nil)
	if err != nil {
		s.log.Warn("bmp", "error", err)
	}
	return m
}

func viewOf(v engine.View) bmp.View {
	return [...]bmp.View{engine.Announced: bmp.PrePolicy, engine.Accepted: bmp.PostPolicy, engine.Chosen: bmp.LocRIB}[v]
}

// wants reports whether a view is sent to a collector.
func (c *collector) wants(v engine.View) bool {
	return [...]bool{engine.Announced: c.PrePolicy, engine.Accepted: c.PostPolicy, engine.Chosen: c.LocRIB}[v]
}

func (s *collectors) peerOf(v engine.View, m engine.Monitored) bmp.Peer {
	if v == engine.Chosen {
		return s.self
	}
	return peerOfSession(m)
}

func peerOfSession(m engine.Monitored) bmp.Peer {
	return bmp.Peer{Addr: engine.Remote(m.Peer.Addr).WithZone(""), AS: m.Peer.AS, ID: m.ID}
}

func upOf(b []byte, m engine.Monitored) []byte {
	return peerOfSession(m).Up(b, bmp.PrePolicy, time.Now(), m.Local, m.RemotePort, m.Session.SentOpen, m.Session.ReceivedOpen, "")
}

// each calls do with all collectors.
func (s *collectors) each(do func(*collector)) {
	s.mu.Lock()
	list := s.list
	s.mu.Unlock()
	for _, c := range list {
		do(c)
	}
}

// Begun implements [engine.Monitor].
func (*collectors) Begun() {}

// Up implements [engine.Monitor].
func (s *collectors) Up(m engine.Monitored) {
	message := upOf(nil, m)
	s.each(func(c *collector) { c.Put(message) })
}

// Down implements [engine.Monitor].
func (s *collectors) Down(m engine.Monitored, r fsm.Reason, removed bool) {
	reason, data := downOf(r, removed)
	message := peerOfSession(m).Down(nil, bmp.PrePolicy, time.Now(), reason, data)
	s.each(func(c *collector) { c.Put(message) })
}

// Events of the state machine that BMP names (RFC 4271 section 8.1, RFC 9687).
const (
	eventManualStop     = 2
	eventSendHoldExpire = 29
)

// downOf puts the end of a session in BMP's terms.
func downOf(r fsm.Reason, removed bool) (reason byte, data []byte) {
	switch {
	case removed:
		return bmp.Deconfigured, nil
	case r.Cause == fsm.Sent, r.Cause == fsm.HoldTimer:
		return bmp.SentNotification, r.Notification.Append(nil)
	case r.Cause == fsm.Received:
		return bmp.ReceivedNotification, r.Notification.Append(nil)
	case r.Cause == fsm.SendHoldTimer:
		return bmp.LocalEvent, []byte{0, eventSendHoldExpire}
	case r.Cause == fsm.Stopped:
		return bmp.LocalEvent, []byte{0, eventManualStop}
	}
	return bmp.RemoteEvent, nil
}

// Updates implements [engine.Monitor].
func (s *collectors) Updates(v engine.View, m engine.Monitored, updates []byte) {
	var messages []byte
	s.each(func(c *collector) {
		if !c.wants(v) {
			return
		}
		if messages == nil {
			messages = s.peerOf(v, m).Routes(nil, viewOf(v), time.Now(), updates)
		}
		c.Put(messages)
	})
}

// report sends statistics until ctx ends.
func (s *collectors) report(ctx context.Context, c *collector) {
	t := time.NewTicker(c.Statistics)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		if !c.Status().Up {
			continue
		}
		messages, err := s.statistics(ctx, c)
		if err == nil {
			c.Put(messages)
		}
	}
}

// statistics are the reports of all sessions that are up, and of what was chosen.
func (s *collectors) statistics(ctx context.Context, c *collector) (out []byte, err error) {
	now := time.Now()
	peers := map[netip.Addr]engine.Peer{}
	for _, p := range s.engine.Configured() {
		peers[p.Addr] = p
	}
	for _, p := range s.engine.Peers() {
		if p.Session == nil {
			continue
		}
		stats := []bmp.Stat{{Type: bmp.AdjRIBIn}, {Type: bmp.AdjRIBOutPost}}
		for i, f := range p.Families {
			if f.Enabled {
				afi := wire.Family(i).AFI()
				stats[0].Value += uint64(f.Received)
				stats[1].Value += uint64(f.Advertised)
				stats = append(stats, bmp.Stat{Type: bmp.AdjRIBInOf, AFI: afi, Value: uint64(f.Received)}, bmp.Stat{Type: bmp.AdjRIBOutPostOf, AFI: afi, Value: uint64(f.Advertised)})
			}
		}
		m := engine.Monitored{Peer: peers[p.Addr], ID: p.RouterID}
		out = peerOfSession(m).Statistics(out, bmp.PrePolicy, now, stats)
	}
	if !c.LocRIB {
		return out, nil
	}
	var n [wire.Families]uint64
	err = s.engine.Query(ctx, engine.Query{Table: engine.Best}, func(p *engine.Path) bool {
		if p.Best {
			n[familyOf(p.Prefix.Addr())]++
		}
		return true
	})
	return s.self.Statistics(out, bmp.LocRIB, now, []bmp.Stat{
		{Type: bmp.LocRIBRoutes, Value: n[0] + n[1]},
		{Type: bmp.LocRIBRoutesOf, AFI: wire.IPv4.AFI(), Value: n[wire.IPv4]},
		{Type: bmp.LocRIBRoutesOf, AFI: wire.IPv6.AFI(), Value: n[wire.IPv6]},
	}), err
}

// status returns how the connections are.
func (s *collectors) status() (out []CollectorStatus) {
	s.each(func(c *collector) {
		st := c.Status()
		cs := CollectorStatus{Addr: st.Addr, State: StateStart, Since: st.Since, Sent: st.Sent, Info: "connecting"}
		switch {
		case st.Up:
			cs.State, cs.Info = StateUp, c.tells()
		case st.Err != nil:
			cs.Info = st.Err.Error()
		}
		out = append(out, cs)
	})
	slices.SortFunc(out, func(a, b CollectorStatus) int { return a.Addr.Compare(b.Addr) })
	return out
}

// tells says what is sent to a collector.
func (c *collector) tells() (text string) {
	for i, v := range []string{"pre-policy", "post-policy", "loc-rib"} {
		if c.wants(engine.View(i)) {
			text += v + " "
		}
	}
	if c.Statistics == 0 {
		return text + "without statistics"
	}
	return fmt.Sprintf("%sstats=%s", text, c.Statistics)
}
