// Package clustertest runs etcd clusters of several members for tests, each
// member in a process of its own that can be killed. It is for tests alone.
package clustertest

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
)

// memberEnv in the environment makes the test's binary a member: its name, and
// the names of all.
const memberEnv = "ROUTERD_TEST_ETCD_MEMBER"

// Main is to be called first in TestMain. In a process that [Start] made it runs
// a member and does not return.
func Main() {
	if spec := os.Getenv(memberEnv); spec != "" {
		name, all, _ := strings.Cut(spec, " ")
		if err := member(name, strings.Fields(all)); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
}

// member runs until the test, which holds the other end of standard input, has
// ended. Its working directory holds data and sockets.
func member(name string, all []string) error {
	dir, err := os.Getwd()
	if err != nil {
		return err
	}
	// A peer's URL has no path: etcd takes host and port for the name of a socket.
	peer := func(n string) url.URL { return url.URL{Scheme: "unix", Host: n + ":1"} }
	client := url.URL{Scheme: "unix", Path: filepath.Join(dir, name)}
	for _, socket := range []string{peer(name).Host, name, name + "-http"} {
		if err := os.Remove(socket); err != nil && !os.IsNotExist(err) {
			return err
		}
	}
	c := embed.NewConfig()
	c.Name, c.Dir, c.LogLevel, c.LogOutputs = name, name+"-data", "error", []string{"stderr"}
	c.ListenPeerUrls, c.AdvertisePeerUrls = []url.URL{peer(name)}, []url.URL{peer(name)}
	c.ListenClientUrls, c.AdvertiseClientUrls = []url.URL{client}, []url.URL{client}
	c.ListenClientHttpUrls = []url.URL{{Scheme: "unix", Path: client.Path + "-http"}}
	var members []string
	for _, n := range all {
		u := peer(n)
		members = append(members, n+"="+u.String())
	}
	c.InitialCluster = strings.Join(members, ",")
	c.EnableGRPCGateway = false
	c.UnsafeNoFsync = true // processes die here, not machines
	e, err := embed.StartEtcd(c)
	if err != nil {
		return fmt.Errorf("member %s: %w", name, err)
	}
	_, _ = io.Copy(io.Discard, os.Stdin) // until the test ends
	e.Close()
	return nil
}

// Cluster is a running cluster. Its methods are safe for concurrent use.
type Cluster struct {
	tb    testing.TB
	dir   string
	names []string

	mu   sync.Mutex
	runs []*run // nil: killed
}

type run struct {
	cmd    *exec.Cmd
	stdin  io.Closer
	output bytes.Buffer
	done   chan struct{}
}

// Start starts a cluster, which ends with the test. It need not answer yet.
func Start(tb testing.TB, members int) *Cluster {
	tb.Helper()
	// Not TempDir: the path of a unix socket is short.
	dir, err := os.MkdirTemp("", "etcd") //nolint:usetesting // its names are too long for a socket
	if err != nil {
		tb.Fatal(err)
	}
	c := &Cluster{tb: tb, dir: dir, runs: make([]*run, members)}
	for i := range members {
		c.names = append(c.names, fmt.Sprint("m", i))
	}
	tb.Cleanup(func() {
		for i := range members {
			c.Kill(i)
		}
		if err := os.RemoveAll(dir); err != nil {
			tb.Error(err)
		}
	})
	for i := range members {
		c.Up(i)
	}
	return c
}

// Endpoints are those of all members, also of killed ones.
func (c *Cluster) Endpoints() []string {
	var out []string
	for _, n := range c.names {
		out = append(out, "unix://"+filepath.Join(c.dir, n))
	}
	return out
}

// Up starts a member again, if it is not up.
func (c *Cluster) Up(i int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.runs[i] != nil {
		return
	}
	self, err := os.Executable()
	if err != nil {
		c.tb.Error(err)
		return
	}
	r := &run{cmd: exec.CommandContext(context.Background(), self), done: make(chan struct{})}
	r.cmd.Dir = c.dir
	r.cmd.Env = append(os.Environ(), memberEnv+"="+c.names[i]+" "+strings.Join(c.names, " "))
	r.cmd.Stderr = &r.output
	r.cmd.WaitDelay = time.Second
	if r.stdin, err = r.cmd.StdinPipe(); err == nil {
		err = r.cmd.Start()
	}
	if err != nil {
		c.tb.Errorf("start member %d: %v", i, err)
		return
	}
	go func() {
		defer close(r.done)
		_ = r.cmd.Wait() // it is killed, or Up's caller sees that nobody answers
	}()
	c.runs[i] = r
}

// Kill kills a member, as kill -9 does, if it is up.
func (c *Cluster) Kill(i int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := c.runs[i]
	if r == nil {
		return
	}
	select {
	case <-r.done:
		c.tb.Errorf("member %d ended by itself: %s", i, r.output.String())
	default:
	}
	_ = r.cmd.Process.Kill()
	<-r.done
	r.stdin.Close()
	c.runs[i] = nil
}
