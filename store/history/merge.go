package history

import (
	"bytes"
	"cmp"
	"encoding/json"
	"maps"
	"reflect"
	"slices"
	"strings"
)

// absent is the value of a member that is not there.
type absent struct{}

// revert takes back in now what led from before to after. It also returns the members that were changed by both, which
// stay as they are unless it is forced: then they are as before, and none is returned. Empty before and after stand for an
// object that is not there.
func revert(before, after, now []byte, force bool) (out []byte, both []string) {
	b, a, n := parse(before), parse(after), parse(now)
	m := merger{force: force}
	v := m.merge("", b, a, n)
	both = m.both
	if _, gone := v.(absent); gone {
		return nil, both
	}
	out, err := json.Marshal(v)
	if err != nil {
		return nil, append(both, err.Error()) // of what was JSON there is none
	}
	return out, both
}

func parse(raw []byte) any {
	if len(raw) == 0 {
		return absent{}
	}
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	var v any
	if d.Decode(&v) != nil {
		return string(raw)
	}
	return v
}

// merger takes back changes member by member.
type merger struct {
	force bool
	both  []string // members that were changed by both
}

func (x *merger) merge(path string, before, after, now any) any {
	switch {
	case reflect.DeepEqual(after, now):
		return before
	case reflect.DeepEqual(before, after):
		return now
	case reflect.DeepEqual(before, now):
		return now // it was taken back already
	}
	b, okB := members(before)
	a, okA := members(after)
	n, okN := members(now)
	if !okB || !okA || !okN || path == "" && !present(before) {
		if x.force {
			return before
		}
		x.both = append(x.both, cmp.Or(strings.TrimPrefix(path, "."), "it"))
		return now
	}
	out := map[string]any{}
	names := map[string]bool{}
	for _, m := range []map[string]any{b, a, n} {
		for k := range m {
			names[k] = true
		}
	}
	for _, k := range slices.Sorted(maps.Keys(names)) {
		if v := x.merge(path+"."+k, of(b, k), of(a, k), of(n, k)); present(v) {
			out[k] = v
		}
	}
	if len(out) == 0 && !present(before) {
		return absent{}
	}
	return out
}

func present(v any) bool {
	_, gone := v.(absent)
	return !gone
}

// members returns those of an object; one that is not there has none.
func members(v any) (map[string]any, bool) {
	if !present(v) {
		return nil, true
	}
	m, ok := v.(map[string]any)
	return m, ok
}

func of(m map[string]any, k string) any {
	if v, ok := m[k]; ok {
		return v
	}
	return absent{}
}
