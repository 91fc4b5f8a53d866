package bfd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/routerd/routerd/control/async"
)

// request is what the daemon sends to the process: the sessions that it wants, or a question.
type request struct {
	Sessions []Session `json:",omitempty"`
	Set      bool      `json:",omitempty"`
}

// reply is what the process sends: a session whose state has changed, the answer to a question, or a warning.
type reply struct {
	Changed  *Status  `json:",omitempty"`
	Sessions []Status `json:",omitempty"`
	Answer   bool     `json:",omitempty"`
	Warning  string   `json:",omitempty"`
}

// farewell is for how long sessions stay after the daemon's end. With it the BGP connections end, and a peer is to hear of
// that first: FRR ends a BGP session whose BFD session goes administratively, and keeps no routes of it. It is shorter than a
// daemon takes until it has a session again, which the end would hit.
const farewell = 200 * time.Millisecond

// Serve runs sessions for whoever is at the other end of rw, until that end is closed or says what cannot be understood.
// Then, after a moment, it takes the sessions down administratively. It returns nil if the end was closed. The process that calls it is
// to do nothing else: it is scheduled before others, if that is allowed.
func Serve(ctx context.Context, rw io.ReadWriteCloser) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	out := newOutbox()
	if err := prioritize(); err != nil {
		out.put(reply{Warning: err.Error()})
	}
	e := NewEngine(func(s Status) { out.put(reply{Changed: &s}) })
	var wg sync.WaitGroup
	wg.Go(func() { e.Run(ctx) })
	wg.Go(func() { out.write(ctx, rw) })
	err := answer(json.NewDecoder(rw), e, out)
	last := time.NewTimer(farewell)
	defer last.Stop()
	select {
	case <-ctx.Done():
	case <-last.C:
	}
	cancel()
	wg.Wait()
	rw.Close()
	return err
}

func answer(in *json.Decoder, e *Engine, out *outbox) error {
	for {
		var r request
		if err := in.Decode(&r); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return fmt.Errorf("read a request: %w", err)
		}
		if r.Set {
			e.Set(r.Sessions)
			continue
		}
		out.put(reply{Answer: true, Sessions: e.Status()})
	}
}

// outbox holds replies until they are written, so that a daemon that is busy holds up no session.
type outbox struct {
	signal async.Signal
	mu     sync.Mutex
	list   []reply
}

func newOutbox() *outbox { return &outbox{signal: async.NewSignal()} }

func (o *outbox) put(r reply) {
	o.mu.Lock()
	o.list = append(o.list, r)
	o.mu.Unlock()
	o.signal.Set()
}

func (o *outbox) take() (list []reply) {
	o.mu.Lock()
	defer o.mu.Unlock()
	list, o.list = o.list, nil
	return list
}

// write writes until ctx ends or w refuses: then whoever read is gone, which the other direction says too.
func (o *outbox) write(ctx context.Context, w io.Writer) {
	enc := json.NewEncoder(w)
	for {
		select {
		case <-ctx.Done():
			return
		case <-o.signal:
		}
		for _, r := range o.take() {
			if err := enc.Encode(r); err != nil {
				return
			}
		}
	}
}
