package store

import (
	"fmt"
	"strings"
	"time"
)

// Incarnation says which life of which machine holds a node's name. It is
// stored twice: under [IncarnationKey], where it outlives the machine, and
// beside it with a lease, which says that the machine is there.
type Incarnation struct {
	Instance  string `json:"instance"`            // drawn when the state directory was made
	BootID    string `json:"bootID"`              // of the kernel: random(4), boot_id
	MachineID string `json:"machineID,omitempty"` // machine-id(5)
	Process   string `json:"process,omitempty"`   // drawn when the daemon started

	// Epoch counts the lives of the name: it is raised when the machine has
	// booted, when another machine has taken the name, and when the Node was
	// made anew. What was assigned in an earlier one may be another's by now.
	Epoch int64 `json:"epoch"`

	Host      string    `json:"host,omitempty"`      // hostname
	Addresses []string  `json:"addresses,omitempty"` // of the host's interfaces
	Since     time.Time `json:"since"`               // when this process took the name

	// NodeCreated is the revision at which the Node resource was created; 0:
	// there was none.
	NodeCreated Revision `json:"nodeCreated,omitempty"`
}

// SameLife reports whether two are of one boot of one machine.
func (i *Incarnation) SameLife(o *Incarnation) bool {
	return i != nil && o != nil && i.Instance == o.Instance && i.BootID == o.BootID
}

// Describe names the machine for people.
func (i *Incarnation) Describe() string {
	var b strings.Builder
	name := i.Host
	if name == "" {
		name = "a machine without a name"
	}
	fmt.Fprintf(&b, "%s (", name)
	if len(i.Addresses) > 0 {
		fmt.Fprintf(&b, "addresses %s, ", strings.Join(i.Addresses, " "))
	}
	if i.MachineID != "" {
		fmt.Fprintf(&b, "machine id %s, ", i.MachineID)
	}
	fmt.Fprintf(&b, "boot id %s, instance %s, since %s)", i.BootID, i.Instance, i.Since.UTC().Format(time.RFC3339))
	return b.String()
}

// NameState is what a datastore says of a node's name, all at one revision.
type NameState struct {
	// Record is who took the name last; nil: nobody, or it cannot be decoded.
	Record *Incarnation
	// Holder is who is there now; nil: nobody.
	Holder *Incarnation
	// NodeCreated tells one life of the Node from another: etcd's revision at which
	// it was created, or a number made of its uid. 0: there is none.
	NodeCreated Revision
	// Revision is the datastore's, of the answer.
	Revision Revision
	// Seen is the datastore's own: the state on whose condition the name is taken.
	Seen any
}

// Hold is a name that is held.
type Hold interface {
	// Lost is closed when others may see that nobody is there.
	Lost() <-chan struct{}
	// Forget stops renewing what says that this host is there.
	Forget()
}
