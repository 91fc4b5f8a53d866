package manifest

import (
	"encoding"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"github.com/projectcalico/api/pkg/lib/numorstring"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/store"
)

// checker compares a document with the Go type that will hold it.
type checker struct {
	kind  store.Kind
	root  reflect.Type
	lines map[string]int // of fields, by path
	errs  []fieldError
}

type fieldError struct {
	line           int
	field, message string
	unknown        *value // of a field that nothing here knows
}

func (c *checker) fail(line int, field, format string, args ...any) {
	c.errs = append(c.errs, fieldError{line: line, field: field, message: fmt.Sprintf(format, args...)})
}

// check reports what of v does not fit into t, below path.
func (c *checker) check(path string, t reflect.Type, v *value) {
	c.lines[path] = v.line
	if v.kind == null {
		return
	}
	if t.Kind() == reflect.Pointer {
		c.check(path, t.Elem(), v)
		return
	}
	if t == reflect.TypeFor[json.RawMessage]() || t.Kind() == reflect.Interface {
		return
	}
	if readsItself(t) {
		if err := json.Unmarshal(v.appendJSON(nil), reflect.New(t).Interface()); err != nil {
			c.fail(v.line, path, "%s; found %s", wantOf(t, err), found(v))
		}
		return
	}
	switch t.Kind() {
	case reflect.Struct:
		if c.want(path, v, object) {
			c.object(path, t, v)
		}
	case reflect.Map:
		if c.want(path, v, object) {
			for _, m := range v.members {
				c.check(join(path, m.name), t.Elem(), m.value)
			}
		}
	case reflect.Slice, reflect.Array:
		if c.want(path, v, array) {
			for i, item := range v.items {
				c.check(fmt.Sprintf("%s[%d]", path, i), t.Elem(), item)
			}
		}
	default:
		c.scalar(path, t, v)
	}
}

// readsItself reports whether t has its own way of reading JSON.
func readsItself(t reflect.Type) bool {
	p := reflect.PointerTo(t)
	return p.Implements(reflect.TypeFor[json.Unmarshaler]()) || p.Implements(reflect.TypeFor[encoding.TextUnmarshaler]())
}

// wantOf says what a type that reads itself takes.
func wantOf(t reflect.Type, err error) string {
	switch t {
	case reflect.TypeFor[metav1.Duration]():
		return "must be a duration such as 90s or 1m30s"
	case reflect.TypeFor[metav1.Time]():
		return "must be a time such as 2006-01-02T15:04:05Z"
	case reflect.TypeFor[numorstring.ASNumber]():
		return `must be an AS number from 1 to 4294967295, or two 16-bit halves as text such as "1.5"`
	case reflect.TypeFor[numorstring.Port]():
		return "must be a port from 0 to 65535, a range such as 8000:8100, or a name"
	case reflect.TypeFor[numorstring.Protocol]():
		return "must be a protocol's name such as TCP, or a number from 1 to 255"
	}
	return "cannot be read: " + err.Error()
}

func (c *checker) want(path string, v *value, k kind) bool {
	if v.kind == k {
		return true
	}
	c.fail(v.line, path, "must be %s; found %s", k, found(v))
	return false
}

func found(v *value) string {
	switch v.kind {
	case text:
		return strconv.Quote(v.text)
	case number, boolean:
		return v.text
	}
	return v.kind.String()
}

func (c *checker) scalar(path string, t reflect.Type, v *value) {
	switch t.Kind() {
	case reflect.String:
		if v.kind == number || v.kind == boolean {
			c.fail(v.line, path, "must be text; put it into quotes: %q", v.text)
			return
		}
		c.want(path, v, text)
	case reflect.Bool:
		c.want(path, v, boolean)
	default:
		if !c.want(path, v, number) {
			return
		}
		p := reflect.New(t)
		if err := json.Unmarshal([]byte(v.text), p.Interface()); err != nil {
			c.fail(v.line, path, "must be %s; found %s", rangeOf(t), v.text)
		}
	}
}

func rangeOf(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Float32, reflect.Float64:
		return "a number"
	case reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64, reflect.Uint:
		return fmt.Sprintf("a whole number from 0 to %d", uint64(1)<<t.Bits()-1)
	}
	return fmt.Sprintf("a whole number of at most %d bits", t.Bits())
}

func (c *checker) object(path string, t reflect.Type, v *value) {
	known := fieldsOf(t)
	names := make([]string, len(known))
	for i, f := range known {
		names[i] = f.name
	}
	for _, twice := range v.spell(names) {
		c.fail(twice.line, join(path, twice.name), "is given twice, in another case; keep one")
	}
	for _, m := range v.members {
		field := join(path, m.name)
		if i := slices.IndexFunc(known, func(f knownField) bool { return f.name == m.name }); i >= 0 {
			c.check(field, known[i].typ, m.value)
			continue
		}
		c.lines[field] = m.line
		if newer(c.kind, field) {
			continue
		}
		c.errs = append(c.errs, fieldError{
			line: m.line, field: field, message: "unknown field" + c.suggest(path, m.name, known), unknown: m.value,
		})
	}
}

type knownField struct {
	name string
	typ  reflect.Type
}

// fieldsOf lists the members of a struct as encoding/json names them.
func fieldsOf(t reflect.Type) []knownField {
	var fields []knownField
	for f := range t.Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case name == "-" || !f.IsExported():
		case name == "" && f.Anonymous:
			fields = append(fields, fieldsOf(f.Type)...)
		case name == "":
			fields = append(fields, knownField{f.Name, f.Type})
		default:
			fields = append(fields, knownField{name, f.Type})
		}
	}
	return fields
}

// suggest proposes what an unknown field may have been meant to be: a name
// that is spelled nearly the same, or the same name in spec or metadata.
func (c *checker) suggest(path, name string, known []knownField) string {
	// Two slips in a word of some length, one in a short one.
	best, distance := "", 1+min(max(2, len(name)/4), len(name)/2)
	for _, f := range known {
		if strings.EqualFold(f.name, name) {
			return fmt.Sprintf("; did you mean %s?", join(path, f.name))
		}
		if d := editDistance(strings.ToLower(name), strings.ToLower(f.name)); d < distance {
			best, distance = f.name, d
		}
	}
	if best != "" {
		return fmt.Sprintf("; did you mean %s?", join(path, best))
	}
	for _, top := range fieldsOf(c.root) {
		if top.name == path || top.typ.Kind() != reflect.Struct {
			continue
		}
		for _, f := range fieldsOf(top.typ) {
			if strings.EqualFold(f.name, name) {
				return fmt.Sprintf("; did you mean %s?", join(top.name, f.name))
			}
		}
	}
	return allowed(known)
}

// allowed lists what could have been written. The nearly two hundred fields of
// a FelixConfiguration are no help to anybody.
func allowed(known []knownField) string {
	if len(known) == 0 || len(known) > 32 {
		return ""
	}
	names := make([]string, len(known))
	for i, f := range known {
		names[i] = f.name
	}
	slices.Sort(names)
	return "; must be one of " + strings.Join(names, ", ")
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// editDistance is Levenshtein's: how many characters must be added, removed
// or replaced.
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

// newer reports whether Calico has this field in a version after the pinned
// API module's. Calico's CRDs were compared with the module's structs.
func newer(k store.Kind, field string) bool {
	path := withoutIndices(field)
	switch k {
	case store.KindIPAMConfiguration:
		return path == "spec.autoAllocateBlocks"
	case v3.KindIPPool, v3.KindTier:
		return path == "status"
	case v3.KindBGPPeer:
		return path == "spec.keepaliveTime"
	case v3.KindBGPConfiguration:
		return slices.Contains([]string{"spec.programClusterRoutes", "spec.ipv4NormalRoutePriority", "spec.ipv6NormalRoutePriority"}, path)
	case v3.KindBGPFilter:
		list, name, _ := strings.Cut(strings.TrimPrefix(path, "spec."), ".")
		return slices.Contains([]string{"exportV4", "importV4", "exportV6", "importV6"}, list) &&
			slices.Contains([]string{"peerType", "communities", "asPathPrefix", "priority", "operations"}, name)
	case v3.KindFelixConfiguration:
		name, ok := strings.CutPrefix(path, "spec.")
		return ok && (slices.Contains(newerFelix(), name) || strings.HasPrefix(name, "bpf") || strings.HasPrefix(name, "istio"))
	}
	return false
}

func newerFelix() []string {
	return []string{
		"nodeSelector",
		"ipv4NormalRoutePriority", "ipv4ElevatedRoutePriority", "ipv6NormalRoutePriority", "ipv6ElevatedRoutePriority",
		"liveMigrationRouteConvergenceTime", "localSubnetL2Reachability", "localSubnetL2ReachabilityRefreshInterval",
		"logActionRateLimit", "logActionRateLimitBurst",
		"nftablesFlowTableOffload", "nftablesFlowTableDataIfacePattern",
		"prometheusMetricsCAFile", "prometheusMetricsCertFile", "prometheusMetricsKeyFile", "prometheusMetricsClientAuth",
	}
}

func withoutIndices(path string) string {
	var b strings.Builder
	depth := 0
	for _, r := range path {
		switch r {
		case '[':
			depth++
		case ']':
			depth--
		default:
			if depth == 0 {
				b.WriteRune(r)
			}
		}
	}
	return b.String()
}
