package kube

import (
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/routerd/routerd/store"
)

// silentWithin is how long a server that says nothing is waited for: until it is asked for a
// sign of life, until none has come, and until the next is tried beside it; and as much again
// for a busy machine.
const silentWithin = 2 * (pingAfter + pingTimeout + stagger)

// relay passes connections on until it is silent: then it takes them, as the kernel of a
// host does whose server hangs, and nothing comes of it.
type relay struct {
	net.Listener
	silent atomic.Bool
	mu     sync.Mutex
	conns  []net.Conn
	done   sync.WaitGroup
}

func newRelay(t *testing.T, to string) *relay {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &relay{Listener: l}
	r.done.Go(func() {
		for {
			down, err := l.Accept()
			if err != nil {
				return
			}
			up, err := net.Dial("tcp", to)
			if err != nil {
				down.Close()
				continue
			}
			r.mu.Lock()
			r.conns = append(r.conns, down, up)
			r.mu.Unlock()
			r.done.Go(func() { r.pass(up, down) })
			r.done.Go(func() { r.pass(down, up) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		r.mu.Lock()
		for _, c := range r.conns {
			c.Close()
		}
		r.mu.Unlock()
		r.done.Wait()
	})
	return r
}

func (r *relay) pass(to io.Writer, from io.Reader) {
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		if err != nil {
			return
		}
		if r.silent.Load() {
			continue
		}
		if _, err := to.Write(buf[:n]); err != nil {
			return
		}
	}
}

// TestSilentServer: an API server that takes connections and says nothing any more, as one
// that hangs, is left for another.
func TestSilentServer(t *testing.T) {
	t.Parallel()
	var ca []byte
	start := func(name string) string {
		s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusNotFound)
			fmt.Fprint(w, refusal(404, "NotFound", name))
		}))
		s.EnableHTTP2 = true
		s.StartTLS()
		t.Cleanup(s.Close)
		ca = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw}) // one for all of them
		return s.Listener.Addr().String()
	}
	first := newRelay(t, start("first"))
	s, err := Open(Config{Kubeconfig: kubeconfig(t, "https://"+first.Addr().String(), ca), Servers: []string{start("second")}, APIGroup: "projectcalico.org/v3"})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	get := func() error {
		_, err := s.Get(t.Context(), store.ResourceKey(store.KindIPPool, "p"))
		return err
	}
	if err := get(); !errors.Is(err, store.ErrNotFound) {
		t.Fatal(err)
	}
	first.silent.Store(true)
	begin := time.Now()
	if err := get(); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("after %v: %v", time.Since(begin), err)
	}
	took := time.Since(begin)
	t.Logf("another server answers after %v", took)
	if took > silentWithin {
		t.Errorf("another server answers after %v, want at most %v", took, silentWithin)
	}
}
