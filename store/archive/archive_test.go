package archive_test

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/store/archive"
)

func write(t interface {
	Helper()
	Fatal(...any)
}, entries ...archive.Entry,
) string {
	t.Helper()
	var b bytes.Buffer
	w, err := archive.NewWriter(&b, archive.Header{ClusterGUID: "g", Revision: 7, Time: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)})
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if err := w.Write(e); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// What is written comes back byte for byte, whatever the values are.
func TestRoundTrip(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		value := rapid.OneOf(
			rapid.SliceOf(rapid.Byte()),
			rapid.SampledFrom([][]byte{[]byte(`{"a":"b <&>"}`), []byte(`{"a": 1}`), []byte(`{"a":1.50}`), []byte("null"), []byte(`"x"`), []byte("{\"a\":1}\n"), []byte(`{"s":"\u0026\u0026"}`), {}}),
		)
		var want []archive.Entry
		for i := range rapid.IntRange(0, 20).Draw(t, "n") {
			want = append(want, archive.Entry{Path: "/calico/" + string(rune('a'+i)), Value: value.Draw(t, "value")})
		}
		a, err := archive.Read(strings.NewReader(write(t, want...)))
		if err != nil {
			t.Fatal(err)
		}
		same := cmp.Comparer(func(x, y []byte) bool { return bytes.Equal(x, y) })
		if diff := cmp.Diff(want, a.Entries, same); diff != "" {
			t.Errorf("entries (-written +read):\n%s", diff)
		}
		if a.Revision != 7 || a.ClusterGUID != "g" || a.Time.Year() != 2026 {
			t.Errorf("header %+v", a.Header)
		}
	})
}

func TestDamage(t *testing.T) {
	t.Parallel()
	whole := write(t, archive.Entry{Path: "/calico/a", Value: []byte(`{"a":1}`)}, archive.Entry{Path: "/calico/b", Value: []byte("x")})
	lines := strings.SplitAfter(whole, "\n")
	for name, tt := range map[string]struct{ text, want string }{
		"nothing":      {"", "is empty"},
		"another file": {"apiVersion: v1\n", "line 1: is not the beginning of what `routerctl datastore export` writes"},
		"newer":        {strings.Replace(whole, `"version":1`, `"version":2`, 1), "line 1: has version 2 of the format; this program knows 1"},
		"cut off":      {lines[0] + lines[1], "ends after 1 keys without its last line"},
		"cut in line":  {whole[:len(whole)-10], "line 4: is not JSON"},
		"a line less":  {lines[0] + lines[1] + lines[3], "it holds 1 keys, its last line says 2"},
		"changed":      {strings.Replace(whole, `{"a":1}`, `{"a":2}`, 1), "its checksum is wrong"},
		"swapped":      {lines[0] + lines[2] + lines[1] + lines[3], "line 3: key /calico/a is out of order"},
		"two":          {whole + whole, "line 5: there is more after the end"},
	} {
		if _, err := archive.Read(strings.NewReader(tt.text)); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", name, err, tt.want)
		}
	}
}

// A line of the file is what a person reads.
func TestText(t *testing.T) {
	t.Parallel()
	got := write(t, archive.Entry{Path: "/calico/a", Value: []byte(`{"a":1}`)})
	want := `{"format":"routerd-datastore","version":1,"clusterGUID":"g","revision":7,"time":"2026-01-02T03:04:05Z"}
{"key":"/calico/a","value":{"a":1}}
{"keys":1,"sha256":"` + strings.Split(got, `"`)[len(strings.Split(got, `"`))-2] + `"}
`
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}
