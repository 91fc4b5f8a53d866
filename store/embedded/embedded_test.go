package embedded_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	bolt "go.etcd.io/bbolt"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/embedded"
	"github.com/routerd/routerd/store/etcd"
)

func handle(i int) store.Op {
	return store.Op{If: store.IfAbsent(), Action: store.Put, Object: store.Object{Key: store.HandleKey(fmt.Sprint("h", i)), Value: &store.Handle{Block: map[string]int{"10.0.0.0/26": i}}}}
}

func TestSocketIsPrivate(t *testing.T) {
	t.Parallel()
	c := config(t)
	s := start(t, c)
	if got := s.Endpoint(); got != "unix://"+c.Socket {
		t.Errorf("endpoint %s", got)
	}
	if s.Listen().IsValid() {
		t.Errorf("listens on %s", s.Listen())
	}
	for path, want := range map[string]fs.FileMode{
		c.Dir:                  fs.ModeDir | 0o700,
		filepath.Dir(c.Socket): fs.ModeDir | 0o700,
		c.Socket:               fs.ModeSocket | 0o600,
		c.Socket + ".http":     fs.ModeSocket | 0o600,
	} {
		info, err := os.Lstat(path)
		if err != nil {
			t.Error(err)
		} else if info.Mode() != want {
			t.Errorf("%s is %v, want %v", path, info.Mode(), want)
		}
	}
	s.Close()
	s.Close() // again does nothing
	if _, open := <-s.Err(); open {
		t.Error("an orderly end gives an error")
	}
	if left, err := os.ReadDir(filepath.Dir(c.Socket)); err != nil || len(left) != 0 {
		t.Errorf("Close left %v, %v", left, err)
	}
}

// The test binary runs itself as a server that can be killed.
const childEnv = "ROUTERD_TEST_EMBEDDED_DIR"

func childConfig(dir string) embedded.Config {
	return embedded.Config{Dir: filepath.Join(dir, "data"), Socket: filepath.Join(dir, "run", "s.sock")}
}

// child is the server's process: it writes handles and tells each on its
// output once it is stored, until it is killed.
func child(dir string) error {
	ctx, cancel := context.WithTimeout(context.Background(), await.Patience)
	defer cancel()
	server, err := embedded.Start(ctx, childConfig(dir))
	if err != nil {
		return err
	}
	defer server.Close()
	s, err := etcd.Open(ctx, etcd.Config{Endpoints: []string{server.Endpoint()}})
	if err != nil {
		return err
	}
	defer s.Close()
	for i := 0; ; i++ {
		if _, err := s.Txn(ctx, handle(i)); err != nil {
			return err
		}
		fmt.Println(i)
	}
}

func childCommand(t *testing.T, dir string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(await.Context(t), os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"="+dir)
	return cmd
}

// spawn starts a child and returns it with its output.
func spawn(t *testing.T, dir string) (*exec.Cmd, *bufio.Scanner) {
	t.Helper()
	cmd := childCommand(t, dir)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd, bufio.NewScanner(out)
}

// stored reads the child's output up to the n-th handle.
func stored(t *testing.T, out *bufio.Scanner, n int) {
	t.Helper()
	for out.Scan() {
		if i, err := strconv.Atoi(out.Text()); err == nil && i >= n {
			return
		}
	}
	t.Fatalf("the server's process ended: %v", out.Err())
}

// TestKill: a server that is killed keeps all that it acknowledged, and leaves
// nothing that keeps the next one from starting.
func TestKill(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	acknowledged := 0
	for round := range 2 {
		var cmd *exec.Cmd
		var out *bufio.Scanner
		if round == 0 {
			cmd, out = spawn(t, dir)
			stored(t, out, 50)
			if err := cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			for out.Scan() { // what it told before it died
				if i, err := strconv.Atoi(out.Text()); err == nil {
					acknowledged = i
				}
			}
			if err := cmd.Wait(); err == nil {
				t.Fatal("the killed process ended well")
			}
			if _, err := os.Lstat(childConfig(dir).Socket); err != nil {
				t.Errorf("a killed server removed its socket: %v", err)
			}
		}
		server := start(t, childConfig(dir))
		s := dial(t, etcd.Config{Endpoints: []string{server.Endpoint()}})
		for i := range max(50, acknowledged) + 1 {
			if _, err := s.Get(t.Context(), store.HandleKey(fmt.Sprint("h", i))); err != nil {
				t.Fatalf("round %d: %v", round, err)
			}
		}
		s.Close()
		server.Close()
	}
}

// TestNoTCP: a server that was not told to listen has no TCP socket at all.
func TestNoTCP(t *testing.T) {
	t.Parallel()
	cmd, out := spawn(t, t.TempDir())
	defer func() {
		cmd.Process.Kill()
		cmd.Wait()
	}()
	stored(t, out, 0)
	proc := fmt.Sprintf("/proc/%d/", cmd.Process.Pid)
	own := make(map[string]bool)
	fds, err := os.ReadDir(proc + "fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		if to, err := os.Readlink(proc + "fd/" + fd.Name()); err == nil {
			if inode, ok := strings.CutPrefix(to, "socket:["); ok {
				own[strings.TrimSuffix(inode, "]")] = true
			}
		}
	}
	if len(own) == 0 {
		t.Fatal("the server has no socket: the test looks in the wrong place")
	}
	for _, table := range []string{"tcp", "tcp6", "udp", "udp6"} {
		text, err := os.ReadFile(proc + "net/" + table)
		if errors.Is(err, fs.ErrNotExist) {
			continue // a kernel without IPv6
		}
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.SplitSeq(string(text), "\n") {
			if f := strings.Fields(line); len(f) > 9 && own[f[9]] {
				t.Errorf("the server has a socket in %s: %s", table, line)
			}
		}
	}
}

func TestStartRefuses(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name  string
		setup func(*testing.T, *embedded.Config)
		want  string
	}{
		{"no directory", func(_ *testing.T, c *embedded.Config) { c.Dir = "" }, "no data directory"},
		{"relative socket", func(_ *testing.T, c *embedded.Config) { c.Socket = "s.sock" }, `socket "s.sock": want an absolute path`},
		{"long socket", func(_ *testing.T, c *embedded.Config) { c.Socket = "/" + strings.Repeat("x", 110) }, "choose a shorter one"},
		{"unwritable directory", func(_ *testing.T, c *embedded.Config) { c.Dir = "/proc/routerd/data" }, "/proc/routerd/data: "},
		{"directory in use", func(t *testing.T, c *embedded.Config) {
			first := config(t)
			start(t, first)
			c.Dir = first.Dir
		}, fmt.Sprintf("in use by process %d", os.Getpid())},
		{"socket in use", func(t *testing.T, c *embedded.Config) {
			first := config(t)
			start(t, first)
			c.Socket = first.Socket
		}, "another process answers at socket"},
		{"no socket at its place", func(t *testing.T, c *embedded.Config) {
			c.Socket = filepath.Join(t.TempDir(), "file")
			if err := os.WriteFile(c.Socket, []byte("precious"), 0o600); err != nil {
				t.Fatal(err)
			}
		}, "is no socket: move it away"},
		{"others may write to the socket's directory", func(t *testing.T, c *embedded.Config) {
			dir := t.TempDir()
			if err := os.Chmod(dir, 0o777); err != nil {
				t.Fatal(err)
			}
			c.Socket = filepath.Join(dir, "s.sock")
		}, "chmod 700"},
		{"port in use", func(t *testing.T, c *embedded.Config) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { l.Close() })
			c.Listen = netip.MustParseAddrPort(l.Addr().String())
		}, "another program has that port"},
		{"strange address", func(_ *testing.T, c *embedded.Config) {
			c.Listen = netip.MustParseAddrPort("192.0.2.1:2379")
		}, "no interface of this host has that address"},
		{"foreign etcd on the database", func(t *testing.T, c *embedded.Config) {
			once(t, *c)
			db, err := bolt.Open(database(*c), 0o600, nil)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { db.Close() })
		}, "in use by another etcd"},
		{"newer data", func(t *testing.T, c *embedded.Config) {
			once(t, *c)
			alter(t, *c, "cluster", "clusterVersion", "3.99.0")
		}, "was written by etcd 3.99.0, newer than the 3."},
		{"newer storage", func(t *testing.T, c *embedded.Config) {
			once(t, *c)
			alter(t, *c, "meta", "storageVersion", "4.0.0")
		}, "was written by etcd 4.0.0"},
		{"member of a larger cluster", func(t *testing.T, c *embedded.Config) {
			once(t, *c)
			alter(t, *c, "members", "a8266ecf031671f3", `{"id":12116349452029321715,"peerURLs":["http://10.0.0.2:2380"],"name":"two"}`)
		}, "belongs to an etcd cluster of 2 members"},
		{"damaged database", func(t *testing.T, c *embedded.Config) {
			once(t, *c)
			if err := os.WriteFile(database(*c), []byte(strings.Repeat("x", 1<<16)), 0o600); err != nil {
				t.Fatal(err)
			}
		}, "cannot be read"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			c := config(t)
			tt.setup(t, &c)
			ctx := await.Context(t)
			s, err := embedded.Start(ctx, c)
			if err == nil {
				s.Close()
				t.Fatal("the server started")
			}
			if !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
			if ctx.Err() != nil {
				t.Error("it took until the deadline")
			}
		})
	}
}

// TestDamagedLog runs in a process of its own: etcd panics over such a log and
// leaves goroutines behind.
func TestDamagedLog(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	once(t, childConfig(dir))
	logs, err := filepath.Glob(filepath.Join(childConfig(dir).Dir, "member", "wal", "*.wal"))
	if err != nil || len(logs) == 0 {
		t.Fatalf("%v, %v", logs, err)
	}
	if err := os.WriteFile(logs[0], []byte(strings.Repeat("x", 1<<16)), 0o600); err != nil {
		t.Fatal(err)
	}
	var said strings.Builder
	cmd := childCommand(t, dir)
	cmd.Stderr = &said
	var exit *exec.ExitError
	if err := cmd.Run(); !errors.As(err, &exit) || exit.ExitCode() != 1 {
		t.Errorf("the process ended with %v", err)
	}
	if want := "restore the directory from a backup, or move it away"; !strings.Contains(said.String(), want) || strings.Contains(said.String(), "goroutine ") {
		t.Errorf("it said %s, want %q", said.String(), want)
	}
}

func database(c embedded.Config) string { return filepath.Join(c.Dir, "member", "snap", "db") }

// once makes a data directory by running a server in it.
func once(t *testing.T, c embedded.Config) {
	t.Helper()
	start(t, c).Close()
}

// alter writes to the database of a server that does not run.
func alter(t *testing.T, c embedded.Config, bucket, key, value string) {
	t.Helper()
	db, err := bolt.Open(database(c), 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if err := db.Update(func(tx *bolt.Tx) error {
		return tx.Bucket([]byte(bucket)).Put([]byte(key), []byte(value))
	}); err != nil {
		t.Fatal(err)
	}
}

// TestKilledAtFirst: an empty database is what a kill at the very first start leaves.
func TestKilledAtFirst(t *testing.T) {
	t.Parallel()
	c := config(t)
	if err := errors.Join(os.MkdirAll(filepath.Dir(database(c)), 0o700), os.WriteFile(database(c), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	start(t, c)
}

// TestStaleSocket: what a killed server leaves behind is removed.
func TestStaleSocket(t *testing.T) {
	t.Parallel()
	c := config(t)
	if err := os.MkdirAll(filepath.Dir(c.Socket), 0o700); err != nil {
		t.Fatal(err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: c.Socket})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
	start(t, c)
}

func TestListen(t *testing.T) {
	t.Parallel()
	c := config(t)
	c.Listen = netip.MustParseAddrPort("127.0.0.1:0")
	c.Hosts = []string{"store.example", "127.0.0.7"}
	server := start(t, c)
	remote := dial(t, clientOf(server))
	if _, err := remote.Txn(t.Context(), handle(1)); err != nil {
		t.Fatal(err)
	}
	local := dial(t, etcd.Config{Endpoints: []string{server.Endpoint()}})
	if _, err := local.Get(t.Context(), store.HandleKey("h1")); err != nil {
		t.Errorf("the two doors lead to different stores: %v", err)
	}
}

func TestMain(m *testing.M) {
	if dir := os.Getenv(childEnv); dir != "" {
		if err := child(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	verifyMain(m)
}
