package convert

import (
	"bytes"
	"encoding/json"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/routerd/routerd/store"
)

func prefixOf(raw []byte, bits int) netip.Prefix {
	a, _ := netip.AddrFromSlice(raw)
	return netip.PrefixFrom(a, bits).Masked()
}

// golden is a file in testdata: an object of the API, and what an etcd datastore
// would hold of the resource that it stands for. Where back is not false, writing
// the latter makes the former again.
type golden struct {
	Group  Group           `json:"group"`
	Kind   store.Kind      `json:"kind"`
	API    json.RawMessage `json:"api"`
	Path   string          `json:"path"` // of the key in etcd
	Stored json.RawMessage `json:"stored"`
	Marked bool            `json:"marked"`
	Back   *bool           `json:"back"`
}

// TestGolden reads each object as Calico writes it, and writes it again.
func TestGolden(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("testdata/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no files: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".yaml"), func(t *testing.T) {
			t.Parallel()
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			var g golden
			if err := yaml.UnmarshalStrict(text, &g); err != nil {
				t.Fatal(err)
			}
			var head struct{ Kind, APIVersion string }
			if err := json.Unmarshal(g.API, &head); err != nil {
				t.Fatal(err)
			}
			s := source(t, g.Group, g.Kind, head.APIVersion, head.Kind)
			o, err := s.Read(g.API)
			if err != nil {
				t.Fatal(err)
			}
			if o.Key.Path() != g.Path || o.Revision == 0 || o.Marked != g.Marked {
				t.Errorf("%s at %d, marked %v", o.Key.Path(), o.Revision, o.Marked)
			}
			same(t, "stored", g.Stored, o.Raw)
			if !s.Owns(o.Key) {
				t.Errorf("%s is not its source's", o.Key)
			}
			value, err := store.Decode(o.Key, o.Raw)
			if err != nil {
				t.Fatal(err)
			}
			again, err := store.Encode(o.Key, value, o.Raw)
			if err != nil || !bytes.Equal(again, o.Raw) {
				t.Errorf("an idle write changes it, %v:\n%s\n%s", err, o.Raw, again)
			}
			if g.Back != nil && !*g.Back {
				return
			}
			back, err := s.Write(o.Key, o.Name, o.Revision, o.Raw)
			if err != nil {
				t.Fatal(err)
			}
			same(t, "written", spelled(t, withoutServers(t, g.API)), spelled(t, back))
		})
	}
}

// withoutServers returns an object without what only the server writes.
func withoutServers(t *testing.T, raw []byte) []byte {
	t.Helper()
	var o map[string]any
	if err := json.Unmarshal(raw, &o); err != nil {
		t.Fatal(err)
	}
	m, _ := o["metadata"].(map[string]any)
	for _, name := range []string{"uid", "creationTimestamp", "generation", "managedFields"} {
		delete(m, name)
	}
	out, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// spelled returns an object with the JSON in its annotation read, for its
// spelling says nothing.
func spelled(t *testing.T, raw []byte) []byte {
	t.Helper()
	var o map[string]any
	if err := json.Unmarshal(raw, &o); err != nil {
		t.Fatal(err)
	}
	m, _ := o["metadata"].(map[string]any)
	a, _ := m["annotations"].(map[string]any)
	if text, ok := a[metadataAnnotation].(string); ok {
		var inner any
		if err := json.Unmarshal([]byte(text), &inner); err != nil {
			t.Fatal(err)
		}
		a[metadataAnnotation] = inner
	}
	out, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	return out
}
