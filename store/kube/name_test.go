package kube

import (
	"encoding/json"
	"fmt"
	"testing"

	"github.com/routerd/routerd/store"
)

// TestJudge: who has a name by what its Node says.
func TestJudge(t *testing.T) {
	t.Parallel()
	self := store.Incarnation{Instance: "state", BootID: "boot2", MachineID: "machine"}
	inContainer := self
	inContainer.MachineID = ""
	record := func(instance, boot, machine string) string {
		raw, err := store.Encode(store.IncarnationKey("n"), &store.Incarnation{Instance: instance, BootID: boot, MachineID: machine, Epoch: 3}, nil)
		if err != nil {
			t.Fatal(err)
		}
		return string(raw)
	}
	for _, tt := range []struct {
		name          string
		self          store.Incarnation
		boot, machine string // the kubelet's
		record        string
		holder        string // its instance, "other", or nobody
		instance      string // the record's
	}{
		{"new", self, "boot2", "machine", "", "", ""},
		{"new, no kubelet yet", self, "", "", "", "", ""},
		{"restarted", self, "boot2", "machine", record("state", "boot2", "machine"), "state", "state"},
		{"restarted with another state directory", self, "boot2", "machine", record("before", "boot2", "machine"), "state", "state"},
		{"into a container without machine id", inContainer, "boot2", "machine", record("before", "boot2", "machine"), "state", "state"},
		{"booted", self, "boot2", "machine", record("state", "boot1", "machine"), "", "state"},
		{"booted, and the kubelet has not said so yet", self, "boot1", "machine", record("state", "boot1", "machine"), "", "state"},
		{"booted in a container, and the kubelet has not said so yet", inContainer, "boot1", "machine", record("state", "boot1", "machine"), "", "state"},
		{"another machine's kubelet", self, "boot9", "other", record("state", "boot1", "machine"), "other", "state"},
		{"another machine's kubelet, without a record", self, "boot9", "other", "", "other", ""},
		{"a new machine under an old name", self, "boot2", "machine", record("other", "boot9", "other"), "", "other"},
		{"a record that cannot be read", self, "boot2", "machine", "{", "", ""},
	} {
		var n named
		raw := fmt.Sprintf(`{"metadata":{"uid":"u1","annotations":{"routerd.io/incarnation":%q}},"status":{"nodeInfo":{"bootID":%q,"machineID":%q}}}`, tt.record, tt.boot, tt.machine)
		if err := json.Unmarshal([]byte(raw), &n); err != nil {
			t.Fatal(err)
		}
		st := n.judge("n", tt.self)
		holder, instance := "", ""
		if h := st.Holder; h != nil {
			holder = h.Instance
			if h.BootID == "boot9" {
				holder = "other"
			}
		}
		if st.Record != nil {
			instance = st.Record.Instance
		}
		if holder != tt.holder || instance != tt.instance {
			t.Errorf("%s: holder %q and record of %q, want %q and %q", tt.name, holder, instance, tt.holder, tt.instance)
		}
	}
	if a, b := lifeOf("u1"), lifeOf("u2"); a == b || a <= 0 || b <= 0 || lifeOf("") != 0 {
		t.Errorf("lives: %d and %d, and %d without a uid", a, b, lifeOf(""))
	}
}
