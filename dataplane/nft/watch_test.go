package nft

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/dataplane/workload/netnstest"
	"github.com/routerd/routerd/integration/await"
)

// start runs a table until the test ends, and returns its repairs.
func start(t *testing.T, n *netnstest.Netns, cfg Config, d filter.Delta) (*Table, chan Repair) {
	t.Helper()
	repairs := make(chan Repair, 100)
	cfg.OnRepair = func(r Repair) { repairs <- r }
	table := openTable(t, n, cfg)
	if err := table.Apply(d); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background()) //nolint:usetesting // it ends in a cleanup, which waits
	ended := make(chan error, 1)
	go func() { ended <- table.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("Run: %v", err)
		}
	})
	return table, repairs
}

func rulesetOf(t testing.TB, deltas ...filter.Delta) *filter.Ruleset {
	t.Helper()
	rs := filter.NewRuleset()
	for i := range deltas {
		if err := rs.Apply(&deltas[i]); err != nil {
			t.Fatal(err)
		}
	}
	return rs
}

// tryRun runs a command that may fail.
func tryRun(n *netnstest.Netns, command ...string) error {
	return n.Do(func() error {
		out, err := exec.Command(command[0], command[1:]...).CombinedOutput()
		if err != nil {
			err = fmt.Errorf("%s: %w: %s", strings.Join(command, " "), err, out)
		}
		return err
	})
}

// What somebody else removes, adds or changes is put right at once, and what
// he does to his own tables is none of our business.
func TestForeignChanges(t *testing.T) {
	t.Parallel()
	n := netnstest.New(t)
	table, repairs := start(t, n, Config{Shared: true}, small())
	rs := rulesetOf(t, small())
	var took []time.Duration
	for _, command := range []string{
		"flush ruleset",
		"delete table inet routerd",
		"flush chain inet routerd forward-from",
		"flush chain inet routerd raw-in ; delete chain inet routerd raw-in",
		"delete element inet routerd workload-addresses-4 { cali1 . 10.1.0.1 }",
		"add element inet routerd s-clients-4n { 10.99.0.0/16 }",
		"delete element inet routerd s-clients-4n { 10.1.1.0/24 }",
		"delete element inet routerd workload-to { cali1 }",
		"insert rule inet routerd forward-to accept",
		"add chain inet routerd theirs",
		"add set inet routerd theirs { type ipv4_addr ; }",
		"add map inet routerd theirs { type ipv4_addr : verdict ; }",
	} {
		// The notice can be of the whole command or of its first part.
		run(t, n, "nft", command)
		select {
		case r := <-repairs:
			if r.Err != nil || r.Writes == 0 {
				t.Errorf("%s: %+v", command, r)
			}
			took = append(took, r.Took)
		case <-time.After(await.Patience):
			t.Fatalf("%s: not repaired\n%s", command, listing(n))
		}
		table.mu.Lock()
		diff := differences(table, rs)
		table.mu.Unlock()
		if diff != same {
			t.Errorf("%s: left %s", command, diff)
		}
	}
	// Half of them, for others use the machine too.
	slices.Sort(took)
	limit := 100 * time.Millisecond
	if os.Getenv("ROUTERD_STAGE") == "vm" {
		limit = time.Second // an emulated processor
	}
	if median := took[len(took)/2]; median > limit {
		t.Errorf("repaired after %s", took)
	}
	t.Logf("repaired after %s", took)
	before := table.Status().Repairs
	run(t, n, "nft", "add table inet theirs; add chain inet theirs routerd; delete table inet theirs; add table ip routerd")
	run(t, n, "nft", "flush chain inet routerd forward-to")
	<-repairs
	if got := table.Status().Repairs; got != before+1 {
		t.Errorf("%d repairs after one change of ours and some of others", got-before)
	}
}

// What could not be put right at first is told to be when it was after all, also
// when the kernel gives no notice of what was in the way being gone.
func TestRepairedLate(t *testing.T) {
	t.Parallel()
	n := netnstest.New(t)
	table, repairs := start(t, n, Config{Shared: true}, small())
	next := func() Repair {
		t.Helper()
		select {
		case r := <-repairs:
			return r
		case <-time.After(await.Patience):
			t.Fatalf("nothing is told: %+v", table.Status())
			return Repair{}
		}
	}
	var other conn
	if err := n.Do(func() (err error) { other, err = open(); return err }); err != nil {
		t.Fatal(err)
	}
	b := new(batch)
	b.delTable()
	b.putTable(flagOwner) // goes with its owner
	if err := other.commit(b); err != nil {
		other.Close()
		t.Fatal(err)
	}
	failed := next()
	if failed.Err == nil || !strings.Contains(failed.Err.Error(), "another process") {
		t.Errorf("with the table another's: %+v", failed)
	}
	other.Close()
	r := next()
	for r.Err != nil { // a notice of the change can come in parts
		r = next()
	}
	if s := table.Status(); r.Writes == 0 || !r.At.Equal(failed.At) || s.Pending || s.Repairs != 1 || s.LongestRepair != r.Took {
		t.Errorf("repaired %+v after %+v, status %+v", r, failed, s)
	}
	table.mu.Lock()
	defer table.mu.Unlock()
	if diff := differences(table, rulesetOf(t, small())); diff != same {
		t.Errorf("left %s", diff)
	}
}

// A second change while the first is repaired, and notices that are lost: what
// was noticed late is still repaired.
func TestManyForeignChanges(t *testing.T) {
	t.Parallel()
	n := netnstest.New(t)
	table, _ := start(t, n, Config{Shared: true}, small())
	rs := rulesetOf(t, small())
	// Room for some notices only: the rest is lost.
	raw, err := table.events.c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 4096) }); err != nil {
		t.Fatal(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	var script strings.Builder
	for range 200 {
		script.WriteString("flush chain inet routerd forward-to\nadd chain inet routerd x\nadd rule inet routerd x accept\ndelete chain inet routerd x\n")
	}
	file := filepath.Join(t.TempDir(), "script.nft")
	if err := os.WriteFile(file, []byte(script.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 5 {
		await.Until(t, "the script runs", func() error { return tryRun(n, "nft", "-f", file) }) // the table may not be back yet
		run(t, n, "nft", "flush", "ruleset")
	}
	await.Until(t, "all is repaired", func() error {
		table.mu.Lock()
		defer table.mu.Unlock()
		if diff := differences(table, rs); diff != same {
			return errors.New(diff)
		}
		return nil
	})
}

// Where the kernel can do that, nobody else writes to the table, and flushing
// the ruleset leaves it.
func TestOwned(t *testing.T) {
	t.Parallel()
	n := netnstest.New(t)
	table := openTable(t, n, Config{})
	if err := table.Apply(small()); err != nil {
		t.Fatal(err)
	}
	if !table.Status().Owned {
		// Debian's 6.1: the table is like any other.
		var u unix.Utsname
		_ = unix.Uname(&u)
		release := unix.ByteSliceToString(u.Release[:])
		if !strings.HasPrefix(release, "6.1.") {
			t.Errorf("not owned by kernel %s", release)
		}
		table.Close()
		return
	}
	run(t, n, "nft", "flush", "ruleset")
	if err := tryRun(n, "nft", "flush", "chain", "inet", "routerd", "forward-to"); err == nil {
		t.Error("somebody else wrote to the table")
	}
	if diff := differences(table, rulesetOf(t, small())); diff != same {
		t.Errorf("after a flush of the ruleset: %s", diff)
	}
	second := openTable(t, n, Config{})
	defer second.Close()
	if err := second.Apply(small()); err == nil || !strings.Contains(err.Error(), "second routerd") {
		t.Errorf("a second daemon: %v", err)
	}
	// A daemon that dies, however it does, leaves the rules; the next has them.
	table.Close()
	await.Until(t, "the rules of a daemon that died", func() error {
		if rules := listing(n); !strings.Contains(rules, "cali1") {
			return errors.New(rules)
		}
		return nil
	})
	if err := second.Replace(rulesetOf(t, small())); err != nil {
		t.Fatal(err)
	}
	if s := second.Status(); !s.Owned || s.Messages > 1 {
		t.Errorf("after a restart: %+v", s)
	}
	if err := tryRun(n, "nft", "delete", "table", "inet", "routerd"); err == nil {
		t.Error("somebody else deleted the table of the second daemon")
	}
}
