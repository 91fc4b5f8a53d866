package presence

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/store"
)

// life describes a machine in tests.
func life(instance, boot string, epoch int64, node store.Revision) *store.Incarnation {
	return &store.Incarnation{Instance: instance, BootID: boot, MachineID: "m", Process: "p", Epoch: epoch, NodeCreated: node}
}

// nameless takes the machine id away.
func nameless(i *store.Incarnation) *store.Incarnation {
	i.MachineID = ""
	return i
}

// TestDecide: whose a name is, by what is stored and who is there.
func TestDecide(t *testing.T) {
	t.Parallel()
	self := *life("a", "1", 3, 0)
	machine := life("a", "1", 3, 7)
	machine.MachineID = "other"
	process := life("a", "1", 3, 7)
	process.Process = "other"
	for _, tt := range []struct {
		name    string
		self    store.Incarnation
		held    bool
		st      store.NameState
		verdict Verdict
		epoch   int64
		from    bool
	}{
		{"nobody ever had it", *life("a", "1", 0, 0), false, store.NameState{}, Take, 1, false},
		{"a new host under an old name", *life("a", "1", 0, 0), false, store.NameState{Record: life("b", "1", 8, 7), NodeCreated: 7}, Take, 9, true},
		{"restarted in place, its own lease alive", self, false, store.NameState{Record: process, Holder: process, NodeCreated: 7}, Take, 3, false},
		{"restarted after the lease ended", self, false, store.NameState{Record: life("a", "1", 3, 7), NodeCreated: 7}, Take, 3, false},
		{"booted", self, false, store.NameState{Record: life("a", "0", 3, 7), NodeCreated: 7}, Take, 4, false},
		{"booted sooner than its lease ended", self, false, store.NameState{Record: life("a", "0", 3, 7), Holder: life("a", "0", 3, 7), NodeCreated: 7}, Refuse, 0, true},
		{"a copy of the disk, the original there", self, false, store.NameState{Record: life("a", "2", 3, 7), Holder: life("a", "2", 3, 7), NodeCreated: 7}, Refuse, 0, true},
		{"another state directory, the other there", self, false, store.NameState{Record: life("b", "1", 3, 7), Holder: life("b", "1", 3, 7), NodeCreated: 7}, Refuse, 0, true},
		{"one that cannot be read is there", self, false, store.NameState{Holder: &store.Incarnation{}}, Refuse, 0, true},
		{"a copy of the disk, the original gone", self, false, store.NameState{Record: machine, NodeCreated: 7}, Take, 4, true},
		{"in a container without the machine id", *nameless(life("a", "1", 3, 0)), false, store.NameState{Record: life("a", "1", 3, 7), NodeCreated: 7}, Take, 3, false},
		{"booted into a container without the machine id", *nameless(life("a", "1", 3, 0)), false, store.NameState{Record: life("a", "0", 3, 7), NodeCreated: 7}, Take, 4, false},
		{"out of a container without the machine id", self, false, store.NameState{Record: nameless(life("a", "1", 3, 7)), NodeCreated: 7}, Take, 3, false},
		{"its Node and record deleted", self, false, store.NameState{}, Take, 4, false},
		{"its Node and record deleted, the Node made anew", self, false, store.NameState{NodeCreated: 9}, Take, 4, false},
		{"its Node deleted by a tool that knows no records", self, false, store.NameState{Record: life("a", "1", 3, 7)}, Take, 4, false},
		{"its Node made anew", self, false, store.NameState{Record: life("a", "1", 3, 7), NodeCreated: 9}, Take, 4, false},
		{"its Node made for the first time", self, true, store.NameState{Record: life("a", "1", 3, 0), Holder: life("a", "1", 3, 0), NodeCreated: 9}, Take, 3, false},
		{"verified less than is recorded", *life("a", "1", 2, 0), false, store.NameState{Record: life("a", "1", 3, 7), NodeCreated: 7}, Take, 3, false},

		{"nothing new", self, true, store.NameState{Record: life("a", "1", 3, 7), Holder: life("a", "1", 3, 7), NodeCreated: 7}, Keep, 3, false},
		{"its lease ended", self, true, store.NameState{Record: life("a", "1", 3, 7), NodeCreated: 7}, Take, 3, false},
		{"its Node made anew under it", self, true, store.NameState{Record: life("a", "1", 3, 7), Holder: life("a", "1", 3, 7), NodeCreated: 9}, Take, 4, false},
		{"another took it", self, true, store.NameState{Record: life("b", "1", 4, 7), Holder: life("b", "1", 4, 7), NodeCreated: 7}, GivenUp, 0, true},
		{"another took it and went", self, true, store.NameState{Record: life("b", "1", 4, 7), NodeCreated: 7}, GivenUp, 0, true},
		{"another process of this host took it", self, true, store.NameState{Record: process, Holder: process, NodeCreated: 7}, GivenUp, 0, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			d := Decide(tt.self, tt.held, tt.st)
			type answer struct {
				Verdict Verdict
				Epoch   int64
				From    bool
			}
			if diff := cmp.Diff(answer{tt.verdict, tt.epoch, tt.from}, answer{d.Verdict, d.As.Epoch, d.From != nil}); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
			if d.As.Instance == "a" && d.As.MachineID != "m" {
				t.Errorf("it writes machine id %q, want m", d.As.MachineID)
			}
			if d.Verdict == Take && d.As.NodeCreated != tt.st.NodeCreated {
				t.Errorf("it writes that the Node is of %d, not %d", d.As.NodeCreated, tt.st.NodeCreated)
			}
		})
	}
}

// TestMachineID: what counts as a machine id, and what as none.
func TestMachineID(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for content, want := range map[string]string{"": "", "0123\n": "0123", "uninitialized\n": ""} {
		path := filepath.Join(dir, "machine-id")
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := machineID(path); got != want || err != nil {
			t.Errorf("%q: %q, %v; want %q", content, got, err, want)
		}
	}
	for name, path := range map[string]string{"no file": filepath.Join(dir, "none"), "a directory in its place": dir} {
		if got, err := machineID(path); got != "" || err != nil {
			t.Errorf("%s: %q, %v; want none", name, got, err)
		}
	}
}

// TestOver: what a name is taken over from, and what is this machine's own.
func TestOver(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name    string
		d       Decision
		refused time.Duration
		want    bool
	}{
		{"another machine's record", Decision{Verdict: Take, From: life("b", "1", 1, 0)}, 0, true},
		{"booted", Decision{Verdict: Take}, 0, false},
		{"booted before its own lease ended", Decision{Verdict: Take}, TTL + time.Second, false},
		{"its original was there for longer than a lease lasts", Decision{Verdict: Take}, 2*TTL + time.Second, true},
		{"its original is there", Decision{Verdict: Refuse, From: life("a", "0", 1, 0)}, time.Hour, false},
	} {
		if got := tt.d.over(tt.refused); got != tt.want {
			t.Errorf("%s: %t, want %t", tt.name, got, tt.want)
		}
	}
}
