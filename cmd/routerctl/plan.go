package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strconv"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/uuid"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/manifest"
)

// verb is a way of writing manifests.
type verb string

const (
	apply   verb = "apply"
	create  verb = "create"
	replace verb = "replace"
	patch   verb = "patch" // replaces what a patch made
)

// past is the verb in calicoctl's reports.
func (v verb) past() string {
	switch v {
	case create:
		return "created"
	case replace:
		return "replaced"
	case patch:
		return "patched"
	}
	return "applied"
}

// change is what is to be done for one document.
type change struct {
	key  store.Key
	did  string   // created, configured, replaced or unchanged
	op   store.Op // not for unchanged
	same bool
}

// plan decides what writing docs takes, given what the store holds: pure, so
// that it can be made again when somebody else wrote meanwhile. It checks every
// document beside the store and beside the others, and reports all that is
// wrong; then nothing may be written.
func plan(v verb, docs []manifest.Document, have []store.Object, now metav1.Time) ([]change, error) {
	present := map[store.Key]store.Object{}
	for _, o := range have {
		present[o.Key] = o
	}
	var changes []change
	var errs []error
	for _, d := range docs {
		c, err := planOne(v, d, present[d.Object.Key], now)
		if err == nil {
			err = against(d, docs, have)
		}
		err = errors.Join(d.CheckUnknown(present[d.Object.Key].Raw), err)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		changes = append(changes, c)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return changes, nil
}

// against checks a document beside what the store will hold.
func against(d manifest.Document, docs []manifest.Document, have []store.Object) error {
	written := map[store.Key]bool{}
	for _, o := range docs {
		written[o.Object.Key] = o.Object.Key != d.Object.Key
	}
	var others []store.Object
	for _, o := range have {
		if !written[o.Key] {
			others = append(others, o)
		}
	}
	for _, o := range docs {
		if o.Object.Key != d.Object.Key {
			others = append(others, o.Object)
		}
	}
	err := store.ValidateAgainst(d.Object.Value, others)
	var fields store.FieldErrors
	if !errors.As(err, &fields) {
		return err
	}
	var errs []error
	for _, f := range fields {
		errs = append(errs, refuse(d, "%s", f.Error()))
	}
	return errors.Join(errs...)
}

func refuse(d manifest.Document, format string, args ...any) error {
	return fmt.Errorf("%s: document %d: %s: %w", d.Where(), d.Number, d.Object.Key, fmt.Errorf(format, args...))
}

// planOne decides what one document takes, present being what is stored under
// its key: Revision 0 when nothing is.
func planOne(v verb, d manifest.Document, present store.Object, now metav1.Time) (change, error) {
	exists := present.Revision != 0
	given := store.Meta(d.Object.Value).ResourceVersion
	switch {
	case unwritable(d.Object.Key) != "":
		return change{}, refuse(d, "%s", unwritable(d.Object.Key))
	case v == create && given != "":
		return change{}, refuse(d, "metadata.resourceVersion: %q: leave it out to create an object, or use replace", given)
	case v == create && exists:
		return change{}, refuse(d, "%w; use apply or replace", store.ErrExists)
	case (v == replace || v == patch) && !exists:
		return change{}, refuse(d, "%w; use create or apply", store.ErrNotFound)
	case given != "" && !exists:
		return change{}, refuse(d, "update conflict: metadata.resourceVersion is %q, but the object does not exist; leave it out to create it", given)
	case given != "" && given != strconv.FormatInt(int64(present.Revision), 10):
		return change{}, refuse(d, "update conflict: metadata.resourceVersion is %q, but the stored object has %d: it has been changed since; get it again and repeat the change", given, present.Revision)
	case !exists:
		return creation(d, now), nil
	}
	return update(v, d, present)
}

// unwritable says why an object is not an operator's to write; empty: it is.
func unwritable(k store.Key) string {
	switch k.Kind {
	case store.KindClusterInformation:
		return "is read-only: the cluster's daemons write it"
	case store.KindBlockAffinity:
		return "is read-only: IPAM writes it; see routerctl ipam"
	}
	return ""
}

func creation(d manifest.Document, now metav1.Time) change {
	o := d.Object
	o.Value = store.Clone(o.Value)
	m := store.Meta(o.Value)
	if m.UID == "" {
		m.UID = uuid.NewUUID()
	}
	m.CreationTimestamp = now
	return change{key: o.Key, did: "created", op: store.Op{If: store.IfAbsent(), Action: store.Put, Object: o}}
}

// update makes the new form of a stored object: spec, labels and annotations
// are the manifest's, the rest of the metadata stays, and so do what a Node's host says of route reflectors, a status that
// the manifest does not give and fields that only another program knows.
func update(v verb, d manifest.Document, present store.Object) (change, error) {
	value := store.Clone(d.Object.Value)
	m, old := store.Meta(value), store.Meta(store.Clone(present.Value))
	said := store.NodeReflectionOf(old.Annotations)
	old.Labels, old.Annotations = m.Labels, m.Annotations
	*m = *old
	if n, ok := value.(*store.Node); ok && !said.Equal(store.NodeReflection{}) && store.NodeReflectionOf(m.Annotations).Equal(store.NodeReflection{}) {
		store.SetNodeReflection(n, said)
	}
	raw, err := manifest.KeepForeign(d.Object.Key.Kind, d.Object.Raw, present.Raw)
	if err != nil {
		return change{}, refuse(d, "%v", err)
	}
	if !d.HasStatus {
		keepStatus(value, present.Value)
		if raw, err = withStatus(raw, present.Raw); err != nil {
			return change{}, refuse(d, "%v", err)
		}
	}
	next, err := store.Encode(d.Object.Key, value, raw)
	if err != nil {
		return change{}, refuse(d, "%v", err)
	}
	c := change{key: d.Object.Key, did: "configured"}
	switch v {
	case replace:
		c.did = "replaced"
	case patch:
		c.did = "patched"
	}
	if sameJSON(next, present.Raw) {
		c.did, c.same = "unchanged", true
		return c, nil
	}
	c.op = store.Op{
		If: store.IfRevision(present.Revision), Action: store.Put,
		Object: store.Object{Key: d.Object.Key, Value: value, Raw: raw},
	}
	return c, nil
}

func keepStatus(value, present any) {
	switch o := value.(type) {
	case *store.Node:
		o.Status = store.Clone(present).(*store.Node).Status
	case *v3.CalicoNodeStatus:
		o.Status = store.Clone(present).(*v3.CalicoNodeStatus).Status
	}
}

// withStatus returns raw with the status of present, for kinds whose Go type
// has none.
func withStatus(raw, present []byte) ([]byte, error) {
	var old struct {
		Status json.RawMessage `json:"status"`
	}
	if err := json.Unmarshal(present, &old); err != nil {
		return nil, fmt.Errorf("what is stored is not JSON: %w", err)
	}
	if old.Status == nil {
		return raw, nil
	}
	var members map[string]json.RawMessage
	if err := json.Unmarshal(raw, &members); err != nil {
		return nil, err
	}
	members["status"] = old.Status
	return json.Marshal(members)
}

// sameJSON compares by meaning: Calico writes members in another order than
// routerd where a newer version added some.
func sameJSON(a, b []byte) bool {
	var x, y any
	return json.Unmarshal(a, &x) == nil && json.Unmarshal(b, &y) == nil && reflect.DeepEqual(x, y)
}
