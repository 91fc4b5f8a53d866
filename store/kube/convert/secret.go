package convert

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/routerd/routerd/store"
)

// secretPrefix begins the names of the Secrets that hold keys which the hosts share.
const secretPrefix = "routerd-"

// Secrets is where the keys are that the hosts of a cluster share: Secrets of one
// namespace, under [SecretName].
func Secrets(g Group) Source {
	r := Resource{Version: "v1", Plural: "secrets", APIKind: "Secret", Namespaced: true}
	return Source{Kind: store.KindSecret, Resource: r, custom: true, group: g}
}

// SecretName returns what the Secret of a shared key is called.
func SecretName(key store.Key) string { return secretPrefix + key.Name }

// secret is a Secret of Kubernetes. Its data are base64, as a key is in etcd.
type secret struct {
	Kind       string          `json:"kind"`
	APIVersion string          `json:"apiVersion"`
	Metadata   meta            `json:"metadata"`
	Type       string          `json:"type,omitempty"`
	Data       json.RawMessage `json:"data,omitempty"`
}

func readSecret(raw []byte) (Object, error) {
	var s secret
	if err := json.Unmarshal(raw, &s); err != nil {
		return Object{}, fmt.Errorf("%w: %w", store.ErrDecode, err)
	}
	o := object{Metadata: s.Metadata}
	out, err := o.identity()
	if err != nil {
		return out, fmt.Errorf("Secret %s: %w: %w", s.Metadata.Name, store.ErrDecode, err)
	}
	name, ours := strings.CutPrefix(s.Metadata.Name, secretPrefix)
	if !ours {
		return out, fmt.Errorf("Secret %s: %w", s.Metadata.Name, ErrNotOurs)
	}
	out.Key, out.Raw = store.SecretKey(name), orEmpty(s.Data)
	return out, nil
}

func writeSecret(name string, rev store.Revision, raw []byte) ([]byte, error) {
	s := secret{Kind: "Secret", APIVersion: "v1", Metadata: meta{Name: name}, Type: string(corev1.SecretTypeOpaque), Data: raw}
	if rev != 0 {
		s.Metadata.ResourceVersion = strconv.FormatInt(int64(rev), 10)
	}
	return json.Marshal(s)
}
