package convert

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strconv"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/routerd/routerd/store"
)

// metadataAnnotation is where [V1] keeps the metadata of the v3 resource, as
// JSON; in what an etcd datastore holds of a policy, it is where its name is.
const metadataAnnotation = "projectcalico.org/metadata"

// ErrNotOurs says that an object of the API stands for no resource: a pod on its
// host's network, say.
var ErrNotOurs = errors.New("it stands for no resource")

// Object is an object of the API as a resource of ours.
type Object struct {
	Key      store.Key
	Revision store.Revision // its resourceVersion
	Raw      []byte         // what an etcd datastore would hold under Key

	// Marked is set when the object is about to be deleted, and counts as absent
	// already: the first of the two steps in which IPAM's records are deleted.
	Marked bool

	Namespace, Name string // in the API
	UID             types.UID
}

// meta is the metadata of an object, without what only servers look at: of a pod
// that is half of its bytes.
type meta struct {
	Name                       string                  `json:"name,omitempty"`
	Namespace                  string                  `json:"namespace,omitempty"`
	UID                        types.UID               `json:"uid,omitempty"`
	ResourceVersion            string                  `json:"resourceVersion,omitempty"`
	CreationTimestamp          *metav1.Time            `json:"creationTimestamp,omitempty"`
	DeletionTimestamp          *metav1.Time            `json:"deletionTimestamp,omitempty"`
	DeletionGracePeriodSeconds *int64                  `json:"deletionGracePeriodSeconds,omitempty"`
	Labels                     map[string]string       `json:"labels,omitempty"`
	Annotations                map[string]string       `json:"annotations,omitempty"`
	OwnerReferences            []metav1.OwnerReference `json:"ownerReferences,omitempty"`
	Finalizers                 []string                `json:"finalizers,omitempty"`
}

// object is a resource, in the API and in etcd: there without resourceVersion.
type object struct {
	Kind       string          `json:"kind"`
	APIVersion string          `json:"apiVersion"`
	Metadata   meta            `json:"metadata"`
	Spec       json.RawMessage `json:"spec,omitempty"`
	Status     json.RawMessage `json:"status,omitempty"`
}

// Read says which resource an object of s is. The error matches [ErrNotOurs] or
// [store.ErrDecode]; with the latter, the object has its Key and Revision where
// these can be known at all.
func (s Source) Read(raw []byte) (Object, error) {
	switch s.Resource.APIKind {
	case "Node":
		if s.Kind == store.KindIncarnation {
			return readNative(raw, incarnationOf)
		}
		return readNative(raw, nodeOf)
	case "Secret":
		return readSecret(raw)
	case "Pod":
		return readNative(raw, endpointOf)
	case "Namespace":
		return readNative(raw, namespaceProfileOf)
	case "ServiceAccount":
		return readNative(raw, accountProfileOf)
	case "ClusterNetworkPolicy":
		return readNative(raw, clusterPolicyOf)
	case "Service":
		return readNative(raw, serviceOf)
	case "EndpointSlice":
		return readNative(raw, endpointSliceOf)
	case "ServiceCIDR":
		return readNative(raw, serviceCIDROf)
	}
	if !s.custom {
		return readNative(raw, networkPolicyOf)
	}
	var o object
	if err := json.Unmarshal(raw, &o); err != nil {
		return Object{}, fmt.Errorf("%s: %w: %w", s.Resource, store.ErrDecode, err)
	}
	out, err := o.identity()
	if err != nil {
		return Object{}, fmt.Errorf("%s %s: %w: %w", s.Resource, o.Metadata.Name, store.ErrDecode, err)
	}
	if s.Kind.IPAM() {
		err = s.readRecord(o, &out)
	} else {
		err = s.readCustom(o, &out)
	}
	switch {
	case errors.Is(err, ErrNotOurs):
		return out, err
	case err == nil && !s.Owns(out.Key) && nativePrefix(s.Kind) != "":
		return Object{}, fmt.Errorf("%s %s: %w: its name begins with %s, as those do that stand for a policy of Kubernetes: give it another", s.Resource, o.Metadata.Name, store.ErrDecode, nativePrefix(s.Kind))
	case err != nil:
		return out, fmt.Errorf("%s %s: %w: %w", s.Resource, o.Metadata.Name, store.ErrDecode, err)
	}
	out.Raw = canonical(out.Key, out.Raw)
	return out, nil
}

// identity returns what an object is called in the API, and its revision.
func (o *object) identity() (Object, error) {
	m := o.Metadata
	rev, err := parseRevision(m.ResourceVersion)
	if err != nil {
		return Object{}, err
	}
	return Object{Revision: rev, Namespace: m.Namespace, Name: m.Name, UID: m.UID}, nil
}

// parseRevision reads a resourceVersion, which is a number since Kubernetes says
// that they can be compared, and was one before.
func parseRevision(s string) (store.Revision, error) {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n <= 0 {
		return 0, fmt.Errorf("metadata.resourceVersion %q is no revision", s)
	}
	return store.Revision(n), nil
}

// canonical spells what would be stored as the codec does, so that a value that
// is written back unchanged is the same bytes. What cannot be decoded stays as
// it is.
func canonical(key store.Key, raw []byte) []byte {
	v, err := store.Decode(key, raw)
	if err != nil {
		return raw
	}
	spelled, err := store.Encode(key, v, raw)
	if err != nil {
		return raw
	}
	return spelled
}

// readCustom reads one of the v3 kinds.
func (s Source) readCustom(o object, out *Object) error {
	m := o.Metadata
	m.ResourceVersion = ""
	named := s.group == V3
	if s.group == V1 {
		var err error
		if m, named, err = readMetadata(m); err != nil {
			return err
		}
	}
	if tiered(s.Kind) {
		if !named {
			m.Name = strings.TrimPrefix(m.Name, defaultTier)
		} else {
			m.Annotations = with(m.Annotations, metadataAnnotation, nameJSON(m.Name))
		}
	}
	out.Key = store.Key{Kind: s.Kind, Namespace: m.Namespace, Name: m.Name}
	raw, err := json.Marshal(object{
		Kind: string(s.Kind), APIVersion: store.APIVersion, Metadata: m, Spec: orEmpty(o.Spec), Status: o.Status,
	})
	out.Raw = raw
	return err
}

func orEmpty(spec json.RawMessage) json.RawMessage {
	if len(spec) == 0 {
		return json.RawMessage("{}")
	}
	return spec
}

// readMetadata returns the metadata of the v3 resource that an object of [V1]
// holds, and whether they name it.
func readMetadata(m meta) (out meta, named bool, err error) {
	inner := meta{}
	if text, ok := m.Annotations[metadataAnnotation]; ok {
		if err := json.Unmarshal([]byte(text), &inner); err != nil {
			return meta{}, false, fmt.Errorf("annotation %s: %w", metadataAnnotation, err)
		}
	}
	out = inner
	out.Name, out.Namespace, out.UID, out.ResourceVersion = m.Name, m.Namespace, turnUID(m.UID), ""
	if inner.Name != "" {
		out.Name, named = inner.Name, true
	}
	// What is on the object itself is of an older Calico, or repeated there.
	out.Labels = merged(m.Labels, inner.Labels)
	out.Annotations = merged(m.Annotations, inner.Annotations)
	delete(out.Annotations, metadataAnnotation)
	if len(out.Annotations) == 0 {
		out.Annotations = nil
	}
	if out.CreationTimestamp.IsZero() {
		out.CreationTimestamp = m.CreationTimestamp
	}
	out.OwnerReferences = nil
	for _, ref := range inner.OwnerReferences {
		if ref.APIVersion == V1.APIVersion() || ref.APIVersion == V3.APIVersion() {
			ref.APIVersion, ref.UID = V3.APIVersion(), turnUID(ref.UID)
		}
		out.OwnerReferences = append(out.OwnerReferences, ref)
	}
	return out, named, nil
}

// merged returns what is in either map; over counts where both have a key.
func merged(under, over map[string]string) map[string]string {
	if len(under) == 0 && len(over) == 0 {
		return nil
	}
	out := make(map[string]string, len(under)+len(over))
	maps.Copy(out, under)
	maps.Copy(out, over)
	return out
}

func with(m map[string]string, key, value string) map[string]string {
	m = maps.Clone(m)
	if m == nil {
		m = make(map[string]string, 1)
	}
	m[key] = value
	return m
}

func nameJSON(name string) string {
	b, _ := json.Marshal(struct { //nolint:errchkjson // a string is always JSON
		Name string `json:"name"`
	}{name})
	return string(b)
}

// Write returns the object of the API that holds what would be stored under a
// key, on condition that it is at rev: 0 for one that is to be made. name is what
// it is called in the API. The error matches [store.ErrInvalid].
func (s Source) Write(key store.Key, name string, rev store.Revision, raw []byte) ([]byte, error) {
	if !s.custom {
		return nil, fmt.Errorf("%s: %w: %s", key, store.ErrInvalid, s.ReadOnly(key))
	}
	if s.Kind == store.KindSecret {
		return writeSecret(name, rev, raw)
	}
	var o object
	var err error
	if s.Kind.IPAM() {
		o, err = s.writeRecord(key, raw)
	} else {
		o, err = s.writeCustom(raw)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %w", key, store.ErrInvalid, err)
	}
	o.Kind, o.APIVersion = s.Resource.APIKind, s.Resource.APIVersion()
	o.Metadata.Name = name
	if rev != 0 {
		o.Metadata.ResourceVersion = strconv.FormatInt(int64(rev), 10)
	}
	return json.Marshal(o)
}

func (s Source) writeCustom(raw []byte) (object, error) {
	var o object
	if err := json.Unmarshal(raw, &o); err != nil {
		return object{}, err
	}
	if tiered(s.Kind) {
		o.Metadata.Annotations = maps.Clone(o.Metadata.Annotations)
		delete(o.Metadata.Annotations, metadataAnnotation)
	}
	if s.group == V1 {
		return o, s.writeMetadata(&o.Metadata)
	}
	// The server gives these.
	o.Metadata.UID, o.Metadata.CreationTimestamp = "", nil
	o.Metadata.DeletionTimestamp, o.Metadata.DeletionGracePeriodSeconds = nil, nil
	return o, nil
}

// writeMetadata makes the metadata of an object of [V1] out of a v3 resource's:
// most of them go into an annotation, so that labels there mean nothing to
// Kubernetes. The uid is the server's to give.
func (s Source) writeMetadata(m *meta) error {
	inner := *m
	inner.Namespace, inner.UID, inner.ResourceVersion = "", "", ""
	if !tiered(s.Kind) {
		inner.Name = ""
	}
	inner.OwnerReferences = nil
	for _, ref := range m.OwnerReferences {
		if ref.APIVersion == V3.APIVersion() {
			ref.APIVersion, ref.UID = V1.APIVersion(), turnUID(ref.UID)
		}
		inner.OwnerReferences = append(inner.OwnerReferences, ref)
	}
	text, err := json.Marshal(inner)
	if err != nil {
		return err
	}
	out := meta{Namespace: m.Namespace, Annotations: map[string]string{metadataAnnotation: string(text)}}
	for k, v := range m.Labels {
		if calicos(k) {
			out.Labels = with(out.Labels, k, v)
		}
	}
	for k, v := range m.Annotations {
		if calicos(k) {
			out.Annotations[k] = v
		}
	}
	*m = out
	return nil
}

// calicos reports whether a label or annotation is one that Calico keeps on the
// object itself, too.
func calicos(key string) bool {
	return strings.Contains(key, "projectcalico.org/") || strings.Contains(key, "operator.tigera.io/")
}

// ReadOnly says what to change in place of an object that cannot be written
// here.
func (s Source) ReadOnly(key store.Key) string {
	namespace, name, _ := s.locate(key)
	if namespace != "" {
		name = "-n " + namespace + " " + name
	}
	return fmt.Sprintf("it stands for an object of Kubernetes: change that with kubectl (%s %s)", strings.ToLower(s.Resource.APIKind), name)
}
