package kube

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/control/atomicfile"
)

const (
	// askServers is how often the cluster is asked where its API servers are, at
	// least; as much again is added at random.
	askServers = 5 * time.Minute
	// stagger is how long an address has before the next one is tried beside it.
	stagger = time.Second
)

// dialer connects to one of several API servers: to the one that answered last, if
// it still does, and to another within about a second if not.
type dialer struct {
	net.Dialer
	configured []string // beside the one that is asked for

	mu    sync.Mutex
	known []string // that the cluster has told
	last  string
}

// candidates lists the addresses to be tried, the best first.
func (d *dialer) candidates(addr string) []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	var out []string
	for _, a := range slices.Concat([]string{d.last, addr}, d.configured, d.known) {
		if a != "" && !slices.Contains(out, a) {
			out = append(out, a)
		}
	}
	return out
}

// dial connects. What greet makes of a connection has to come about too before the server
// counts as one that answers: the kernel of a host takes connections for a server that hangs.
func (d *dialer) dial(ctx context.Context, network, addr string, greet func(context.Context, net.Conn) (net.Conn, error)) (net.Conn, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type result struct {
		addr string
		conn net.Conn
		err  error
	}
	candidates := d.candidates(addr)
	results := make(chan result, len(candidates))
	try := func(a string) {
		conn, err := d.try(ctx, network, a, greet)
		results <- result{a, conn, err}
	}
	var errs []error
	var configured error // of the one that is configured, which comes first
	var won result
	started, ended := 0, 0
	for {
		if started < len(candidates) && won.conn == nil {
			go try(candidates[started])
			started++
		}
		wait := time.NewTimer(stagger)
		select {
		case r := <-results:
			ended++
			if r.err != nil {
				errs = append(errs, r.err)
				if r.addr == addr {
					configured = r.err
				}
				break
			}
			if won.conn == nil {
				won = r
				cancel()
			} else {
				r.conn.Close()
			}
		case <-wait.C:
		}
		wait.Stop()
		switch {
		case won.conn != nil && ended == started:
			d.mu.Lock()
			d.last = won.addr
			d.mu.Unlock()
			return won.conn, nil
		case ended == len(candidates):
			return nil, cmp.Or(configured, errs[0])
		}
	}
}

func (d *dialer) try(ctx context.Context, network, addr string, greet func(context.Context, net.Conn) (net.Conn, error)) (net.Conn, error) {
	bound, stop := context.WithTimeout(ctx, dialTimeout)
	defer stop()
	conn, err := d.DialContext(bound, network, addr)
	if err != nil || greet == nil {
		return conn, err
	}
	bound, stop = context.WithTimeout(ctx, greetTimeout)
	defer stop()
	greeted, err := greet(bound, conn)
	if err != nil {
		conn.Close()
		return nil, err
	}
	return greeted, nil
}

// dialTLS connects to a server that shows the certificate of the configured one.
func (d *dialer) dialTLS(ctx context.Context, network, addr string, trust *tls.Config) (net.Conn, error) {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	c := trust.Clone()
	c.ServerName = cmp.Or(c.ServerName, host)
	c.NextProtos = []string{"h2", "http/1.1"}
	return d.dial(ctx, network, addr, func(ctx context.Context, conn net.Conn) (net.Conn, error) {
		t := tls.Client(conn, c)
		return t, t.HandshakeContext(ctx)
	})
}

// setKnown takes what the cluster has told, and reports whether it is news.
func (d *dialer) setKnown(servers []string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if slices.Equal(d.known, servers) {
		return false
	}
	d.known = servers
	return true
}

// loadServers reads the API servers of the previous run. Without them a start goes by what
// is configured.
func (d *dialer) loadServers(file string, log *slog.Logger) {
	raw, err := os.ReadFile(file)
	var servers []string
	if err == nil {
		err = json.Unmarshal(raw, &servers)
	}
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			log.Warn("the API servers of the previous run are not known", "file", file, "error", err)
		}
		return
	}
	d.setKnown(servers)
}

// followServers keeps on disk where the API servers are, until ctx ends: the address
// that a pod is told is a service's, which needs kube-proxy, and a daemon that waits for
// it would not come up where that waits for the daemon.
func (s *Store) followServers(ctx context.Context, d *dialer, file string) {
	for failures := 0; ctx.Err() == nil; {
		servers, err := s.askServers(ctx)
		if err != nil {
			if failures++; failures == 1 {
				s.log.Debug("the cluster does not say where its API servers are", "error", err)
			}
			_ = async.Sleep(ctx, time.Duration(min(failures, 10))*time.Second+rand.N(time.Second)) // the loop looks at ctx
			continue
		}
		failures = 0
		if len(servers) > 0 && d.setKnown(servers) {
			raw, err := json.Marshal(servers)
			if err == nil {
				err = atomicfile.Write(file, raw, 0o600)
			}
			if err != nil {
				s.log.Warn("the API servers are not kept on disk", "error", err)
			}
			s.log.Debug("API servers", "servers", servers)
		}
		_ = async.Sleep(ctx, askServers+rand.N(askServers))
	}
}

// askServers asks where the service default/kubernetes leads.
func (s *Store) askServers(ctx context.Context) ([]string, error) {
	const path = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/kubernetes"
	raw, err := s.call(ctx, request{method: http.MethodGet, path: path})
	if err != nil {
		return nil, err
	}
	var slice struct {
		Endpoints []struct {
			Addresses []string `json:"addresses"`
		} `json:"endpoints"`
		Ports []struct {
			Name string `json:"name"`
			Port int    `json:"port"`
		} `json:"ports"`
	}
	if err := json.Unmarshal(raw, &slice); err != nil {
		return nil, fmt.Errorf("endpoints of the API: %w", err)
	}
	port := 0
	for _, p := range slice.Ports {
		if port == 0 || p.Name == "https" {
			port = p.Port
		}
	}
	var out []string
	for _, e := range slice.Endpoints {
		for _, a := range e.Addresses {
			out = append(out, net.JoinHostPort(a, strconv.Itoa(cmp.Or(port, 443))))
		}
	}
	slices.Sort(out)
	return out, nil
}
