// Package clustertest runs etcd clusters of several members for tests, each
// member in a process of its own that can be killed, stopped, parted from the others,
// or given a slow disk. It is for tests alone.
package clustertest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"
)

// Options say what cluster is started.
type Options struct {
	Members int
	// Quota is the size in bytes from which on a member takes no more; 0: etcd's own.
	Quota int64
	// Disk has members wait for their disks, so that [Cluster.SlowDisk] has an
	// effect. Processes die here, not machines: nothing else needs it.
	Disk bool
}

// Cluster is a running cluster. Its methods are safe for concurrent use.
type Cluster struct {
	tb    testing.TB
	o     Options
	dir   string
	names []string
	links map[[2]int]*link // by who dials whom

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
	return StartWith(tb, Options{Members: members})
}

// StartWith is [Start] with options.
func StartWith(tb testing.TB, o Options) *Cluster {
	tb.Helper()
	// Not TempDir: the path of a unix socket is short.
	dir, err := os.MkdirTemp("", "etcd") //nolint:usetesting // its names are too long for a socket
	if err != nil {
		tb.Fatal(err)
	}
	c := &Cluster{tb: tb, o: o, dir: dir, links: map[[2]int]*link{}, runs: make([]*run, o.Members)}
	for i := range o.Members {
		c.names = append(c.names, fmt.Sprint("m", i))
	}
	tb.Cleanup(func() {
		for i := range o.Members {
			c.Kill(i)
		}
		for _, l := range c.links {
			l.close()
		}
		if err := os.RemoveAll(dir); err != nil {
			tb.Error(err)
		}
	})
	for i := range o.Members {
		if err := os.Mkdir(c.dirOf(i), 0o700); err != nil {
			tb.Fatal(err)
		}
	}
	// In a member's directory the others' sockets are ends of links to them.
	for i := range o.Members {
		for j := range o.Members {
			if i == j {
				continue
			}
			l, err := newLink(c.peerSocket(i, j), c.peerSocket(j, j))
			if err != nil {
				tb.Fatal(err)
			}
			c.links[[2]int{i, j}] = l
		}
	}
	for i := range o.Members {
		c.Up(i)
	}
	return c
}

func (c *Cluster) dirOf(i int) string { return filepath.Join(c.dir, c.names[i]) }

// peerSocket is where member i finds member j.
func (c *Cluster) peerSocket(i, j int) string { return filepath.Join(c.dirOf(i), peerName(c.names[j])) }

// Endpoints are those of all members, also of killed ones.
func (c *Cluster) Endpoints() []string {
	var out []string
	for i := range c.names {
		out = append(out, c.Endpoint(i))
	}
	return out
}

// Endpoint is a member's.
func (c *Cluster) Endpoint(i int) string { return "unix://" + filepath.Join(c.dirOf(i), c.names[i]) }

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
	spec, err := json.Marshal(memberSpec{Name: c.names[i], All: c.names, Quota: c.o.Quota, Disk: c.o.Disk})
	if err != nil {
		c.tb.Error(err)
		return
	}
	r := &run{cmd: exec.CommandContext(context.Background(), self), done: make(chan struct{})}
	r.cmd.Dir = c.dirOf(i)
	r.cmd.Env = append(os.Environ(), memberEnv+"="+string(spec))
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

// Pause stops a member that is up, as kill -STOP does.
func (c *Cluster) Pause(i int) { c.signal(i, syscall.SIGSTOP) }

// Resume lets a paused member go on.
func (c *Cluster) Resume(i int) { c.signal(i, syscall.SIGCONT) }

func (c *Cluster) signal(i int, sig syscall.Signal) {
	if pid := c.PID(i); pid != 0 {
		if err := syscall.Kill(pid, sig); err != nil {
			c.tb.Errorf("send member %d %s: %v", i, sig, err)
		}
	}
}

// PID is the process of a member; 0: it is not up.
func (c *Cluster) PID(i int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.runs[i] == nil {
		return 0
	}
	return c.runs[i].cmd.Process.Pid
}

// Part parts a member from the others: what they send each other waits. Clients
// reach it as before.
func (c *Cluster) Part(i int) { c.eachLink(i, (*link).cut) }

// Join ends [Cluster.Part].
func (c *Cluster) Join(i int) { c.eachLink(i, (*link).join) }

func (c *Cluster) eachLink(i int, do func(*link)) {
	for ends, l := range c.links {
		if ends[0] == i || ends[1] == i {
			do(l)
		}
	}
}

// SlowDisk has each write that a member waits for take so much longer. The cluster is
// one with [Options].Disk.
func (c *Cluster) SlowDisk(i int, by time.Duration) {
	path := filepath.Join(c.dirOf(i), delayFile)
	if err := os.WriteFile(path+"~", []byte(by.String()), 0o600); err != nil {
		c.tb.Error(err)
		return
	}
	if err := os.Rename(path+"~", path); err != nil {
		c.tb.Error(err)
	}
}

// readDelay returns what [Cluster.SlowDisk] asked for of the member in the working
// directory.
func readDelay() (time.Duration, error) {
	b, err := os.ReadFile(delayFile)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	return time.ParseDuration(string(b))
}
