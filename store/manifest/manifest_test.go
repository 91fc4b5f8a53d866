package manifest_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/manifest"
)

var update = flag.Bool("update", false, "rewrite the expected output in testdata")

// compare checks output against the file beside the input, or writes it with
// -update.
func compare(t *testing.T, golden, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", golden, diff)
	}
}

func inputs(t *testing.T, dir string) []string {
	t.Helper()
	var files []string
	for _, ext := range []string{"yaml", "json"} {
		m, err := filepath.Glob(filepath.Join("testdata", dir, "*."+ext))
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, m...)
	}
	if len(files) == 0 {
		t.Fatalf("no inputs in testdata/%s", dir)
	}
	return files
}

// Every bad manifest is refused whole, with the messages in the .err file
// beside it.
func TestBad(t *testing.T) {
	t.Parallel()
	for _, file := range inputs(t, "bad") {
		t.Run(filepath.Base(file), func(t *testing.T) {
			t.Parallel()
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			docs, err := manifest.Read(filepath.Base(file), bytes.NewReader(data))
			if err == nil {
				for _, d := range docs {
					err = errors.Join(err, d.CheckUnknown(nil))
				}
				docs = nil
			}
			if err == nil {
				t.Fatal("was accepted")
			}
			if len(docs) != 0 {
				t.Errorf("returned %d documents with an error", len(docs))
			}
			if !errors.Is(err, store.ErrInvalid) {
				t.Errorf("%v does not match store.ErrInvalid", err)
			}
			compare(t, file+".err", err.Error()+"\n")
		})
	}
}

// Every good manifest gives the stored form in the .stored file beside it, and
// survives being printed and read again.
func TestGood(t *testing.T) {
	t.Parallel()
	for _, file := range inputs(t, "good") {
		t.Run(filepath.Base(file), func(t *testing.T) {
			t.Parallel()
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			docs, err := manifest.Read(file, bytes.NewReader(data))
			if err != nil {
				t.Fatal(err)
			}
			var got strings.Builder
			for _, d := range docs {
				fmt.Fprintf(&got, "%d %s\n%s\n", d.Line, d.Object.Key, d.Object.Raw)
				roundTrip(t, d)
			}
			compare(t, file+".stored", got.String())
		})
	}
}

func roundTrip(t *testing.T, d manifest.Document) {
	t.Helper()
	o := d.Object
	o.Revision = 42
	raw, err := manifest.JSON(o)
	if err != nil {
		t.Fatal(err)
	}
	list, err := manifest.List(o.Key.Kind, 50, []store.Object{o})
	if err != nil {
		t.Fatal(err)
	}
	for _, j := range []json.RawMessage{raw, list} {
		y, err := manifest.YAML(j)
		if err != nil {
			t.Fatal(err)
		}
		indented, err := manifest.Indent(j)
		if err != nil {
			t.Fatal(err)
		}
		for _, text := range [][]byte{y, indented} {
			again, err := manifest.Read("printed", bytes.NewReader(text))
			if err != nil {
				t.Fatalf("%s\ncannot be read again: %v", text, err)
			}
			if len(again) != 1 {
				t.Fatalf("%s\ngives %d documents", text, len(again))
			}
			if rv := store.Meta(again[0].Object.Value).ResourceVersion; rv != "42" {
				t.Errorf("resourceVersion is %q after printing, want 42", rv)
			}
			if diff := cmp.Diff(decoded(t, o.Raw), decoded(t, again[0].Object.Raw)); diff != "" {
				t.Errorf("%s changed by printing and reading (-before +after):\n%s", o.Key, diff)
			}
		}
	}
}

func decoded(t *testing.T, raw []byte) any {
	t.Helper()
	var v any
	if err := json.Unmarshal(raw, &v); err != nil {
		t.Fatal(err)
	}
	return v
}

func TestUniqueAcrossSources(t *testing.T) {
	t.Parallel()
	const pool = `{"apiVersion":"projectcalico.org/v3","kind":"IPPool","metadata":{"name":"a"},"spec":{"cidr":"10.0.0.0/16"}}`
	var all []manifest.Document
	for _, name := range []string{"one.json", "two.json"} {
		docs, err := manifest.Read(name, strings.NewReader(pool))
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, docs...)
	}
	err := manifest.Unique(all)
	const want = "two.json:1: document 1: IPPool(a): is given twice, first at one.json:1; keep one"
	if err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}

type failingReader struct{}

func (failingReader) Read([]byte) (int, error) { return 0, os.ErrPermission }

func TestReadFails(t *testing.T) {
	t.Parallel()
	if _, err := manifest.Read("x.yaml", failingReader{}); !errors.Is(err, os.ErrPermission) {
		t.Errorf("got %v, want the reader's error", err)
	}
	huge := bytes.Repeat([]byte("# padding\n"), 2<<20)
	if _, err := manifest.Read("huge.yaml", bytes.NewReader(huge)); !errors.Is(err, store.ErrInvalid) {
		t.Errorf("a huge input gave %v", err)
	}
}

// Whatever the input, Read returns either documents that are valid, stored in
// a form that can be decoded and read again, or an error; it does not panic.
func FuzzRead(f *testing.F) {
	for _, dir := range []string{"bad", "good"} {
		for _, ext := range []string{"yaml", "json"} {
			files, err := filepath.Glob(filepath.Join("testdata", dir, "*."+ext))
			if err != nil {
				f.Fatal(err)
			}
			for _, file := range files {
				data, err := os.ReadFile(file)
				if err != nil {
					f.Fatal(err)
				}
				f.Add(data)
			}
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		docs, err := manifest.Read("fuzz", bytes.NewReader(data))
		if err != nil {
			if len(docs) > 0 {
				t.Fatal("documents beside an error")
			}
			if err.Error() == "" {
				t.Fatal("an error without a message")
			}
			return
		}
		for _, d := range docs {
			if err := store.Validate(d.Object.Value); err != nil {
				t.Fatalf("%s is invalid: %v", d.Object.Key, err)
			}
			if _, err := store.Decode(d.Object.Key, d.Object.Raw); err != nil {
				t.Fatalf("%s cannot be decoded: %v\n%s", d.Object.Key, err, d.Object.Raw)
			}
			roundTrip(t, d)
		}
	})
}

const foreign = `{"kind":"IPPool","apiVersion":"projectcalico.org/v3","metadata":{"name":"a","uid":"u","creationTimestamp":null},` +
	`"spec":{"cidr":"10.1.0.0/16","big":12345678901234567890,"list":[{"x":1},{"y":[true,null]}]},"status":{"conditions":[]},"top":"t"}`

// A field that a newer Calico stored may be given back as it is, and nothing
// else that is unknown.
func TestCheckUnknown(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, manifest, stored string
		want                   []string // fields refused
	}{
		{"as stored", foreign, foreign, nil},
		{"nothing stored", foreign, "", []string{"spec.big", "spec.list", "top"}},
		{"stored without", foreign, `{"spec":{}}`, []string{"spec.big", "spec.list", "top"}},
		{"stored is junk", foreign, `{"spec":`, []string{"spec.big", "spec.list", "top"}},
		{"another value", strings.Replace(foreign, "67890", "67891", 1), foreign, []string{"spec.big"}},
		{"another depth", strings.Replace(foreign, `[true,null]`, `[true]`, 1), foreign, []string{"spec.list"}},
		{"left out", strings.Replace(foreign, `,"top":"t"`, "", 1), foreign, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			docs, err := manifest.Read("f", strings.NewReader(tt.manifest))
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			var errs manifest.Errors
			if errors.As(docs[0].CheckUnknown([]byte(tt.stored)), &errs) {
				for _, e := range errs {
					got = append(got, e.Field)
				}
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("refused (-want +got):\n%s", diff)
			}
		})
	}
}

func TestKeepForeign(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name         string
		kind         store.Kind
		given, store string
		want         string
	}{
		{"added", "IPPool", `{"spec":{"cidr":"a"}}`, `{"spec":{"cidr":"b","new":{"x":1}},"top":2}`, `{"spec":{"cidr":"a","new":{"x":1}},"top":2}`},
		{"given wins", "IPPool", `{"spec":{"new":{"x":2}}}`, `{"spec":{"new":{"x":1,"y":1}}}`, `{"spec":{"new":{"x":2,"y":1}}}`},
		{"known newer fields can be removed", "BGPConfiguration", `{"spec":{}}`, `{"spec":{"programClusterRoutes":"Enabled","z":1}}`, `{"spec":{"z":1}}`},
		{"arrays of one length", "BGPFilter", `{"spec":{"l":[{"a":1},{"a":2}]}}`, `{"spec":{"l":[{"b":1},{}]}}`, `{"spec":{"l":[{"a":1,"b":1},{"a":2}]}}`},
		{"arrays of two lengths", "BGPFilter", `{"spec":{"l":[{"a":1}]}}`, `{"spec":{"l":[{"b":1},{}]}}`, `{"spec":{"l":[{"a":1}]}}`},
		{"large numbers", "Node", `{}`, `{"n":12345678901234567890}`, `{"n":12345678901234567890}`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			got, err := manifest.KeepForeign(tt.kind, []byte(tt.given), []byte(tt.store))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, string(got)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}
