package kube

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"
)

// firstPort to lastPort are those that requests come from, each after the other: more than are
// used while the nodes' connection tracking remembers one (nf_conntrack_udp_timeout, 30 s).
const firstPort, lastPort = 2000, 62000

// RequestsConfig says what [Requests] ask.
type RequestsConfig struct {
	To   netip.AddrPort
	Rate int // a second
	// In runs a function in the network namespace that requests come from.
	In func(do func() error) error
	// Ask is what the request of a number says, and Read which endpoint an answer to it names.
	Ask  func(n uint64) []byte
	Read func(n uint64, answer []byte) (endpoint string, err error)
}

// Requests asks an address by UDP, so many times a second and each time from another port.
// Make it with [StartRequests].
type Requests struct {
	c    RequestsConfig
	stop context.CancelFunc
	done chan error // of the sender
	wait sync.WaitGroup

	mu     sync.Mutex
	result RequestsResult
}

// RequestsResult is what became of requests.
type RequestsResult struct {
	Sent     int
	Took     time.Duration  // from the first to the last
	Answered map[string]int // by endpoint
	Lost     []string       // what became of those that nobody answered
}

// String says it in a line.
func (r RequestsResult) String() string {
	return fmt.Sprintf("%d requests in %v, %.0f a second, %d lost: %v", r.Sent, r.Took.Round(time.Millisecond), float64(r.Sent)/r.Took.Seconds(), len(r.Lost), r.Answered)
}

// StartRequests begins. [Requests.End] ends it, or the end of ctx.
func StartRequests(ctx context.Context, c RequestsConfig) *Requests {
	ctx, stop := context.WithCancel(ctx)
	r := &Requests{c: c, stop: stop, done: make(chan error, 1), result: RequestsResult{Answered: map[string]int{}}}
	go func() { r.done <- c.In(func() error { return r.send(ctx) }) }()
	return r
}

func (r *Requests) send(ctx context.Context) error {
	to := net.UDPAddrFromAddrPort(r.c.To)
	tick := time.NewTicker(time.Second / time.Duration(r.c.Rate))
	defer tick.Stop()
	begin := time.Now()
	n := 0
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
		// A ticker leaves out what a slow reader is late for.
		for due := int(time.Since(begin) * time.Duration(r.c.Rate) / time.Second); n < due; n++ {
			conn, err := net.DialUDP("udp", &net.UDPAddr{Port: firstPort + n%(lastPort-firstPort)}, to)
			if err != nil {
				return err
			}
			r.mu.Lock()
			r.result.Sent++
			r.result.Took = time.Since(begin)
			r.mu.Unlock()
			number := uint64(n)
			r.wait.Go(func() { r.ask(conn, number, begin) })
		}
	}
}

// ask sends one request and waits for its answer, which names the endpoint.
func (r *Requests) ask(conn *net.UDPConn, n uint64, begin time.Time) {
	defer conn.Close()
	at := time.Now()
	from, err := func() (string, error) {
		if err := conn.SetDeadline(at.Add(10 * time.Second)); err != nil {
			return "", err
		}
		if _, err := conn.Write(r.c.Ask(n)); err != nil {
			return "", err
		}
		buf := make([]byte, 100)
		l, err := conn.Read(buf)
		if err != nil {
			return "", err
		}
		return r.c.Read(n, buf[:l])
	}()
	r.mu.Lock()
	defer r.mu.Unlock()
	if err != nil {
		r.result.Lost = append(r.result.Lost, fmt.Sprintf("%d, %v after the first: %v", n, at.Sub(begin).Round(time.Millisecond), err))
		return
	}
	r.result.Answered[from]++
}

// Answered is how many an endpoint has answered.
func (r *Requests) Answered(endpoint string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.result.Answered[endpoint]
}

// End ends them and returns when all are answered or lost.
func (r *Requests) End() (RequestsResult, error) {
	r.stop()
	err := <-r.done
	r.wait.Wait()
	return r.result, err
}
