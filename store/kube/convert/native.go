package convert

import (
	"encoding/json"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/store"
)

// readNative reads an object of Kubernetes' own and says which resource it
// stands for. of returns its key as soon as it can be known, also with an error.
func readNative[T any](raw []byte, of func(*T) (store.Key, any, error)) (Object, error) {
	var head struct {
		Metadata meta `json:"metadata"`
	}
	if err := json.Unmarshal(raw, &head); err != nil {
		return Object{}, fmt.Errorf("%w: %w", store.ErrDecode, err)
	}
	o := object{Metadata: head.Metadata}
	out, err := o.identity()
	if err != nil {
		return Object{}, fmt.Errorf("%s: %w: %w", head.Metadata.Name, store.ErrDecode, err)
	}
	v := new(T)
	if err := json.Unmarshal(raw, v); err != nil {
		return Object{}, fmt.Errorf("%s: %w: %w", head.Metadata.Name, store.ErrDecode, err)
	}
	key, value, err := of(v)
	out.Key = key
	if err != nil || value == nil {
		if err == nil {
			err = ErrNotOurs
		}
		return out, fmt.Errorf("%s: %w", key, err)
	}
	if out.Raw, err = store.Encode(key, value, nil); err != nil {
		return out, fmt.Errorf("%s: %w: %w", key, store.ErrDecode, err)
	}
	return out, nil
}

// inherited returns the metadata that a resource takes from the object that it
// stands for.
func inherited(m *metav1.ObjectMeta, name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Name: name, UID: m.UID, CreationTimestamp: m.CreationTimestamp}
}
