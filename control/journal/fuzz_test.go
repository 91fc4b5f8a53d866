package journal

import (
	"bytes"
	"encoding/json"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// FuzzParse: a line that is taken is written again as one that says the same, and a
// line's checksum alone does not make it one.
func FuzzParse(f *testing.F) {
	for _, l := range []line{
		{Key: "a", Value: json.RawMessage(`{"b":[1,null,"\u0000"]}`)},
		{Key: "a\n\x00\"", Value: json.RawMessage("0"), More: true},
		{Key: "gone"},
	} {
		f.Add(must(encode(l))[len("00000000 "):])
	}
	for _, body := range []string{"", "{}", "null", `{"k":1}`, `{"k":"a","v":null}`, `{"K":"a","k":""}`, "[[", "{\"k\":\"\xff\"}"} {
		f.Add([]byte(body))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		if _, ok := parse(body); ok && len(body) < len("00000000 ") {
			t.Errorf("%q is taken, which has no checksum", body)
		}
		l, ok := parse(summed(body))
		if !ok {
			return
		}
		text, err := encode(l)
		if err != nil {
			t.Fatal(err)
		}
		again, ok := parse(bytes.TrimSuffix(text, []byte{'\n'}))
		if diff := cmp.Diff(l, again); !ok || diff != "" {
			t.Errorf("%q is read again as another line (-want +got):\n%s", text, diff)
		}
	})
}

// FuzzReplay: whatever a file holds, its good part is read again as what it was, and
// what a daemon then writes behind it counts. A line that begins with # is given its
// checksum, which no fuzzer would find.
func FuzzReplay(f *testing.F) {
	for _, script := range []string{
		`#{"k":"a","v":1}` + "\n" + `#{"k":"b","v":2,"m":true}` + "\n" + `#{"k":"a"}` + "\n",
		`#{"k":"a","v":1}` + "\n" + `#{"k":"b","v":2,"m":true}` + "\n",
		`#{"k":"a","v":1}` + "\n" + `#{"k":"b","v":2,"m":true}` + "\n" + `#{"k":"a"}`,
		`#{"k":"a","v":1}` + "\n" + `00000000 {"k":"a"}` + "\n" + `#{"k":"b","v":null}` + "\n12345678 {",
		"\n\n",
	} {
		f.Add([]byte(script))
	}
	f.Fuzz(func(t *testing.T, script []byte) {
		var file []byte
		for text := range bytes.Lines(script) {
			if body, ok := bytes.CutPrefix(text, []byte("#")); ok {
				trimmed := bytes.TrimSuffix(body, []byte{'\n'})
				text = append(summed(trimmed), body[len(trimmed):]...)
			}
			file = append(file, text...)
		}
		first := replayed(file)
		if first.size > int64(len(file))+1 || first.size == int64(len(file))+1 && !first.endless {
			t.Fatalf("the good part of %d bytes has %d", len(file), first.size)
		}
		good := append(bytes.Clone(file), '\n')[:first.size] // as mend leaves it
		next := must(encode(line{Key: "next", Value: json.RawMessage("3")}))
		second := replayed(append(good, next...))
		want := values(first)
		want["next"] = "3"
		if diff := cmp.Diff(want, values(second)); diff != "" || second.endless {
			t.Errorf("after the file was mended and written on (-want +got):\n%s", diff)
		}
		var live int64
		for _, e := range first.entries {
			live += e.size
		}
		if live != first.live {
			t.Errorf("%d bytes are live, and the entries take %d", first.live, live)
		}
	})
}

// summed puts a body's checksum before it, which no fuzzer would find.
func summed(body []byte) []byte { return fmt.Appendf(nil, "%08x %s", checksum(body), body) }

// replayed reads what a file holds.
func replayed(b []byte) *Journal {
	j := &Journal{entries: map[string]entry{}}
	j.replay(b)
	return j
}

func values(j *Journal) map[string]string {
	out := map[string]string{}
	for k, e := range j.entries {
		out[k] = string(e.value)
	}
	return out
}
