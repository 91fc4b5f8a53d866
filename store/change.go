package store

import (
	"encoding/json"
	"time"
)

// Change is what one transaction of an operator's tool did to resources. It is stored under [ChangeKey] by that very
// transaction, so it is there exactly if the change is.
type Change struct {
	Time    time.Time `json:"time"`
	User    string    `json:"user,omitempty"`
	Host    string    `json:"host,omitempty"`
	Command string    `json:"command,omitempty"`

	Objects []ChangedObject `json:"objects"`

	// Lacks says why Objects cannot undo the change; empty: they are all that the transaction wrote, each with what it
	// was before.
	Lacks string `json:"lacks,omitempty"`

	// ConfirmSeconds is within how long the change is to be confirmed, or is undone; 0: it stands.
	ConfirmSeconds int         `json:"confirmSeconds,omitempty"`
	State          ChangeState `json:"state,omitempty"`

	// Who confirmed or undid it, and when; or why it could not be undone, or not wholly.
	ByUser string    `json:"byUser,omitempty"`
	ByHost string    `json:"byHost,omitempty"`
	At     time.Time `json:"at,omitzero"`
	Reason string    `json:"reason,omitempty"`
}

// ChangeState says what became of a [Change].
type ChangeState string

// The states of a change.
const (
	ChangeMade        ChangeState = ""
	ChangeUnconfirmed ChangeState = "unconfirmed"
	ChangeConfirmed   ChangeState = "confirmed"
	ChangeUndone      ChangeState = "undone"
	ChangeStuck       ChangeState = "not undone" // nobody confirmed it, and it could not be undone
)

// ChangedObject is a resource before and after a change, as it is stored.
type ChangedObject struct {
	Kind      Kind            `json:"kind"`
	Namespace string          `json:"namespace,omitempty"`
	Name      string          `json:"name"`
	Before    json.RawMessage `json:"before,omitempty"` // empty: it was not there
	After     json.RawMessage `json:"after,omitempty"`  // empty: it was deleted
}

// Key returns the key of the resource.
func (o *ChangedObject) Key() Key { return Key{Kind: o.Kind, Namespace: o.Namespace, Name: o.Name} }

// Unconfirmed says that a change waits to be confirmed: daemons follow these alone. It is stored under [UnconfirmedKey],
// first without a time, to ask whether a daemon would undo the change, and then with the change, by its transaction.
type Unconfirmed struct {
	Time    time.Time `json:"time,omitzero"` // of the change; zero: it is not made yet
	Seconds int       `json:"seconds"`       // within which it is to be confirmed
	By      string    `json:"by,omitempty"`  // the node whose daemon took it on first
}

// ChangeKey returns the key of a change. Names sort by time.
func ChangeKey(name string) Key { return Key{Kind: KindChange, Name: name} }

// UnconfirmedKey returns the key of what says that a change waits to be confirmed.
func UnconfirmedKey(name string) Key { return Key{Kind: KindUnconfirmed, Name: name} }
