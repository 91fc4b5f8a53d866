package cni

import (
	"encoding/json"
	"reflect"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"pgregory.net/rapid"

	apiv1 "github.com/routerd/routerd/control/api/v1"
)

// populate sets the fields of m to those of v, in order: field i of the struct is
// number i+1 of the message. It fails when one has more than the other.
func populate(t *rapid.T, m protoreflect.Message, v reflect.Value) {
	fds := m.Descriptor().Fields()
	if fds.Len() != v.NumField() {
		t.Fatalf("%s has %d fields, %s has %d", m.Descriptor().Name(), fds.Len(), v.Type(), v.NumField())
	}
	for i := range v.NumField() {
		fd, f := fds.ByNumber(protoreflect.FieldNumber(i+1)), v.Field(i)
		switch {
		case f.Kind() == reflect.Slice && f.Len() > 0:
			list := m.Mutable(fd).List()
			for j := range f.Len() {
				if f.Index(j).Kind() == reflect.Struct {
					populate(t, list.AppendMutable().Message(), f.Index(j))
				} else {
					list.Append(protoreflect.ValueOf(f.Index(j).Interface()))
				}
			}
		case f.Kind() == reflect.Slice:
		case f.Kind() == reflect.Struct:
			populate(t, m.Mutable(fd).Message(), f)
		default:
			m.Set(fd, protoreflect.ValueOf(f.Interface()))
		}
	}
}

// text is what JSON can carry as it is: valid UTF-8.
func text() rapid.MakeConfig {
	return rapid.MakeConfig{Types: map[reflect.Type]*rapid.Generator[any]{reflect.TypeFor[string](): rapid.String().AsAny()}}
}

// The messages written by hand are those of the generated code: the daemon reads
// every field of a request.
func TestRequestsAreTheGeneratedOnes(t *testing.T) {
	t.Parallel()
	check := func(t *rapid.T, ours any, got, want proto.Message) {
		populate(t, want.ProtoReflect(), reflect.ValueOf(ours))
		b, err := json.Marshal(ours)
		if err != nil {
			t.Fatal(err)
		}
		if err := protojson.Unmarshal(b, got); err != nil { // which refuses unknown fields
			t.Fatalf("%s: %v", b, err)
		}
		if !proto.Equal(want, got) {
			t.Fatalf("%+v is sent as %s, read as %v", ours, b, got)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		check(t, rapid.MakeCustom[addRequest](text()).Draw(t, "add"), new(apiv1.AddRequest), new(apiv1.AddRequest))
		check(t, rapid.MakeCustom[allocateRequest](text()).Draw(t, "allocate"), new(apiv1.AllocateRequest), new(apiv1.AllocateRequest))
		check(t, rapid.MakeCustom[delRequest](text()).Draw(t, "del"), new(apiv1.DelRequest), new(apiv1.DelRequest))
		check(t, rapid.MakeCustom[checkRequest](text()).Draw(t, "check"), new(apiv1.CheckRequest), new(apiv1.CheckRequest))
		check(t, rapid.MakeCustom[gcRequest](text()).Draw(t, "gc"), new(apiv1.GCRequest), new(apiv1.GCRequest))
		check(t, nothing{}, new(apiv1.StatusRequest), new(apiv1.StatusRequest))
	})
}

// The plugin reads every field of an answer, and leaves out one that it does not
// know: a later daemon's.
func TestResponsesAreTheGeneratedOnes(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		answers(t, rapid.MakeCustom[addResponse](text()).Draw(t, "add"), new(apiv1.AddResponse))
		answers(t, rapid.MakeCustom[allocateResponse](text()).Draw(t, "allocate"), new(apiv1.AllocateResponse))
		answers(t, rapid.MakeCustom[gcResponse](text()).Draw(t, "gc"), new(apiv1.GCResponse))
		for _, m := range []proto.Message{new(apiv1.DelResponse), new(apiv1.CheckResponse), new(apiv1.StatusResponse)} {
			answers(t, nothing{}, m)
		}
	})
}

func answers[T any](t *rapid.T, want T, m proto.Message) {
	populate(t, m.ProtoReflect(), reflect.ValueOf(want))
	b, err := protojson.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(b, &fields); err != nil {
		t.Fatal(err)
	}
	fields["later"] = json.RawMessage(`{"x":[1]}`)
	if b, err = json.Marshal(fields); err != nil {
		t.Fatal(err)
	}
	var got T
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	noneIsEmpty := cmp.FilterValues(func(a, b any) bool {
		va, vb := reflect.ValueOf(a), reflect.ValueOf(b)
		return va.Kind() == reflect.Slice && vb.Kind() == reflect.Slice && va.Len()+vb.Len() == 0
	}, cmp.Ignore())
	if d := cmp.Diff(want, got, noneIsEmpty); d != "" {
		t.Fatalf("%s (-want +got):\n%s", b, d)
	}
}
