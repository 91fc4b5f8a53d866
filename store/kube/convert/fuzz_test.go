package convert

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/routerd/routerd/store"
)

// FuzzRead: whatever an object of the API says, it is refused with an error that the
// watch knows, or is a resource of the source's kind that can be found by its key.
func FuzzRead(f *testing.F) {
	var all []Source
	for _, g := range []Group{V1, V3} {
		for _, k := range append(CustomKinds(), store.KindNode, store.KindIncarnation, store.KindWorkloadEndpoint, store.KindProfile, store.KindService, store.KindEndpointSlice, store.KindServiceCIDR) {
			all = append(all, Sources(g, k)...)
		}
	}
	files, err := filepath.Glob("testdata/*.yaml")
	if err != nil || len(files) == 0 {
		f.Fatalf("no seeds: %v", err)
	}
	for i, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		raw, err := yaml.YAMLToJSON(text)
		if err != nil {
			f.Fatal(err)
		}
		for n, s := range all { // those that make something of it
			if o, err := s.Read(raw); err == nil && o.Raw != nil {
				f.Add(uint8(n), raw)
			}
		}
		f.Add(uint8(i), raw)
	}
	f.Fuzz(func(t *testing.T, n uint8, raw []byte) {
		s := all[int(n)%len(all)]
		o, err := s.Read(raw)
		switch {
		case errors.Is(err, ErrNotOurs) || errors.Is(err, store.ErrDecode):
			return
		case err != nil:
			t.Fatalf("%s: %v", s.Resource, err)
		}
		if o.Key.Kind != s.Kind {
			t.Fatalf("%s: %s is read as a %s", s.Resource, s.Kind, o.Key.Kind)
		}
		// What cannot be decoded is the watch's to report.
		if _, err := store.Decode(o.Key, o.Raw); err != nil && !errors.Is(err, store.ErrDecode) {
			t.Errorf("%s %s: %v", s.Resource, o.Key, err)
		}
	})
}

// FuzzServiceDetail: no Service or EndpointSlice ends the daemon.
func FuzzServiceDetail(f *testing.F) {
	f.Add([]byte(`{"metadata":{"name":"a","namespace":"b","resourceVersion":"1"},"spec":{"clusterIP":"10.0.0.1","ports":[{"port":80,"nodePort":30000}],"selector":{"a":"b"}}}`),
		[]byte(`{"metadata":{"name":"a-1","namespace":"b","resourceVersion":"1","labels":{"kubernetes.io/service-name":"a"}},"addressType":"IPv4","ports":[{"port":8080},{"port":null}],"endpoints":[{"addresses":["10.0.0.2"],"targetRef":{"kind":"Pod","name":"p"}},{}]}`))
	f.Fuzz(func(t *testing.T, service, slice []byte) {
		if _, err := ServiceDetail(service, []json.RawMessage{slice}); err != nil && !errors.Is(err, store.ErrDecode) && !errors.Is(err, ErrNotOurs) {
			t.Error(err)
		}
	})
}
