package store

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/netip"
	"reflect"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// stored is the outer form of a v3 resource in the datastore, with its members
// in Calico's order.
type stored struct {
	Kind       Kind            `json:"kind"`
	APIVersion string          `json:"apiVersion"`
	Metadata   storedMeta      `json:"metadata"`
	Spec       json.RawMessage `json:"spec"`
	Status     json.RawMessage `json:"status,omitempty"`
}

// storedMeta is the part of the metadata that is stored. What only a
// Kubernetes API server would fill in (resourceVersion, selfLink, generation,
// generateName, managedFields) is not, and a timestamp is left out rather than
// null.
type storedMeta struct {
	Name                       string                  `json:"name,omitempty"`
	Namespace                  string                  `json:"namespace,omitempty"`
	UID                        types.UID               `json:"uid,omitempty"`
	CreationTimestamp          *metav1.Time            `json:"creationTimestamp,omitempty"`
	DeletionTimestamp          *metav1.Time            `json:"deletionTimestamp,omitempty"`
	DeletionGracePeriodSeconds *int64                  `json:"deletionGracePeriodSeconds,omitempty"`
	Labels                     map[string]string       `json:"labels,omitempty"`
	Annotations                map[string]string       `json:"annotations,omitempty"`
	OwnerReferences            []metav1.OwnerReference `json:"ownerReferences,omitempty"`
	Finalizers                 []string                `json:"finalizers,omitempty"`
}

func storedMetaOf(m *metav1.ObjectMeta) storedMeta {
	s := storedMeta{
		Name:                       m.Name,
		Namespace:                  m.Namespace,
		UID:                        m.UID,
		DeletionTimestamp:          m.DeletionTimestamp,
		DeletionGracePeriodSeconds: m.DeletionGracePeriodSeconds,
		Labels:                     m.Labels,
		Annotations:                m.Annotations,
		OwnerReferences:            m.OwnerReferences,
		Finalizers:                 m.Finalizers,
	}
	if !m.CreationTimestamp.IsZero() {
		s.CreationTimestamp = &m.CreationTimestamp
	}
	return s
}

// Encode returns the stored form of value under key: for v3 kinds Calico's
// JSON object (kind, apiVersion, metadata, spec, status), for IPAM's records
// their bare value. It does not change value.
//
// oldRaw is what was stored before, or nil. Members of it that value's Go type
// does not know are kept, so that fields of a newer Calico outlive an update:
// at every depth of nested objects, and in arrays element by element where the
// two have the same length. Members that the type knows are value's alone.
//
// The error matches [ErrInvalid] when the type of value is not key's kind or
// its metadata names another object, and [ErrDecode] when oldRaw is not JSON.
func Encode(key Key, value any, oldRaw []byte) ([]byte, error) {
	if err := checkKey(key); err != nil {
		return nil, fmt.Errorf("encode: %w", err)
	}
	if kind, ok := KindOf(value); !ok || kind != key.Kind || reflect.ValueOf(value).IsNil() {
		return nil, fmt.Errorf("encode %s: %w: the value is a %T", key, ErrInvalid, value)
	}
	raw, err := encode(key, value, oldRaw)
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w: %w", key, ErrInvalid, err)
	}
	if len(bytes.TrimSpace(oldRaw)) == 0 || allKnown(key.Kind, oldRaw) {
		return raw, nil
	}
	raw, err = keepUnknown(reflect.TypeOf(value), raw, oldRaw)
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w: what is stored: %w", key, ErrDecode, err)
	}
	return raw, nil
}

func encode(key Key, value any, oldRaw []byte) ([]byte, error) {
	meta := Meta(value)
	if meta == nil {
		return json.Marshal(value)
	}
	if meta.Name != key.Name || meta.Namespace != key.Namespace {
		return nil, fmt.Errorf("metadata names %q", joinName(meta.Namespace, meta.Name))
	}
	fields := reflect.ValueOf(value).Elem()
	spec, err := json.Marshal(fields.FieldByName("Spec").Addr().Interface())
	if err != nil {
		return nil, err
	}
	if tiered(key.Kind) || key.Kind == KindProfile {
		spec = withoutEmptySides(spec, oldRaw)
	}
	s := stored{Kind: key.Kind, APIVersion: APIVersion, Metadata: storedMetaOf(meta), Spec: spec}
	if tiered(key.Kind) {
		s.Metadata.Annotations = annotatePolicy(key.Name, meta.Annotations, oldRaw)
	}
	if f := fields.FieldByName("Status"); f.IsValid() && key.Kind != KindKubeControllersConfiguration {
		if s.Status, err = json.Marshal(f.Addr().Interface()); err != nil {
			return nil, err
		}
	} else if key.Kind == KindTier || key.Kind == KindKubeControllersConfiguration {
		// These always carry a status in Calico's stores. For a tier the API
		// module's type has none, and the other's is never empty.
		s.Status = statusOf(oldRaw)
		if k, ok := value.(*v3.KubeControllersConfiguration); ok && !sameStatus(k.Status, s.Status) {
			if s.Status, err = json.Marshal(k.Status); err != nil {
				return nil, err
			}
		}
	}
	return json.Marshal(s)
}

// withoutEmptySides removes the sides of rules that ask for nothing: Calico stores none,
// and the API module's types write them always. What an older Calico wrote has them,
// and keeps them. A rule's action stands before them, and within a string of JSON their
// quotes would be escaped.
func withoutEmptySides(spec, oldRaw []byte) []byte {
	for _, side := range []string{`,"source":{}`, `,"destination":{}`} {
		if !bytes.Contains(oldRaw, []byte(side)) {
			spec = bytes.ReplaceAll(spec, []byte(side), nil)
		}
	}
	return spec
}

// statusOf returns the status of a stored object, or an empty one.
func statusOf(raw []byte) json.RawMessage {
	var o struct {
		Status json.RawMessage `json:"status"`
	}
	if err := json.Unmarshal(raw, &o); err != nil || o.Status == nil {
		return json.RawMessage("{}")
	}
	return o.Status
}

// sameStatus reports whether a status says what is stored, or nothing: who changes another part
// need not know of what is stored there.
func sameStatus(s v3.KubeControllersConfigurationStatus, raw json.RawMessage) bool {
	var was v3.KubeControllersConfigurationStatus
	return reflect.ValueOf(s).IsZero() || json.Unmarshal(raw, &was) == nil && reflect.DeepEqual(s, was)
}

func joinName(namespace, name string) string {
	if namespace == "" {
		return name
	}
	return namespace + "/" + name
}

// Decode reads what is stored under key. The result is a pointer of the type
// that [New] gives for the key's kind. Members that the type does not know are
// passed over: see [Encode] for how they survive an update.
//
// A resource that lacks its name takes it from the key. A block of a very old
// store that has hostAffinity comes out with Affinity instead. The error
// matches [ErrDecode].
func Decode(key Key, raw []byte) (any, error) {
	v := New(key.Kind)
	if v == nil {
		return nil, fmt.Errorf("decode %s: %w: unknown kind", key, ErrDecode)
	}
	if err := decode(key, raw, v); err != nil {
		return nil, fmt.Errorf("decode %s: %w: %w", key, ErrDecode, err)
	}
	return v, nil
}

func decode(key Key, raw []byte, v any) error {
	raw = bytes.TrimSpace(raw)
	if key.Kind == KindIPAMAffinity && (len(raw) == 0 || string(raw) == "null") {
		return nil // old data: an affinity without a value is confirmed
	}
	if len(raw) == 0 {
		return fmt.Errorf("the value is empty")
	}
	if raw[0] != '{' {
		return fmt.Errorf("the value is no JSON object")
	}
	if err := unmarshal(raw, v); err != nil {
		return err
	}
	if b, ok := v.(*Block); ok {
		return checkBlock(key, b)
	}
	meta := Meta(v)
	if meta == nil {
		return nil
	}
	if got := Kind(v.(resource).GetObjectKind().GroupVersionKind().Kind); got != key.Kind {
		return fmt.Errorf("it holds a %q", got)
	}
	setType(v.(resource), key.Kind)
	if meta.Name == "" {
		meta.Name = key.Name
	}
	if meta.Namespace == "" {
		meta.Namespace = key.Namespace
	}
	if meta.Name != key.Name || meta.Namespace != key.Namespace {
		return fmt.Errorf("it calls itself %q", joinName(meta.Namespace, meta.Name))
	}
	if tiered(key.Kind) {
		dropPolicyAnnotation(meta)
	}
	return nil
}

// checkBlock brings an old block into today's form and refuses one whose parts
// contradict each other in a way that would send a reader out of bounds.
func checkBlock(key Key, b *Block) error {
	cidr, err := netip.ParsePrefix(b.CIDR)
	if err != nil || cidr != key.CIDR() {
		return fmt.Errorf("cidr is %q", b.CIDR)
	}
	if bits := cidr.Addr().BitLen() - cidr.Bits(); bits < 31 && len(b.Allocations) > 1<<bits {
		return fmt.Errorf("allocations has %d entries for %d addresses", len(b.Allocations), 1<<bits)
	}
	if b.Affinity == nil && b.HostAffinity != nil {
		host := "host:" + *b.HostAffinity
		b.Affinity = &host
	}
	b.HostAffinity = nil
	for ordinal, a := range b.Allocations {
		if a != nil && (*a < 0 || *a >= len(b.Attributes)) {
			return fmt.Errorf("allocations[%d] is %d, but there are %d attributes", ordinal, *a, len(b.Attributes))
		}
	}
	for i, ordinal := range b.Unallocated {
		if ordinal < 0 || ordinal >= len(b.Allocations) {
			return fmt.Errorf("unallocated[%d] is %d, but there are %d addresses", i, ordinal, len(b.Allocations))
		}
	}
	return nil
}
