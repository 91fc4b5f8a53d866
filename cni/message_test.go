package cni

import (
	"reflect"
	"testing"

	"github.com/google/go-cmp/cmp"
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

// The messages written by hand are those of the generated code.
func TestRequestsAreTheGeneratedOnes(t *testing.T) {
	t.Parallel()
	check := func(t *rapid.T, ours any, encoded []byte, got, want proto.Message) {
		populate(t, want.ProtoReflect(), reflect.ValueOf(ours))
		if err := proto.Unmarshal(encoded, got); err != nil {
			t.Fatal(err)
		}
		if !proto.Equal(want, got) {
			t.Fatalf("%+v is encoded as %v", ours, got)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		add := rapid.Make[addRequest]().Draw(t, "add")
		check(t, add, add.encode(), new(apiv1.AddRequest), new(apiv1.AddRequest))
		alloc := rapid.Make[allocateRequest]().Draw(t, "allocate")
		check(t, alloc, alloc.encode(), new(apiv1.AllocateRequest), new(apiv1.AllocateRequest))
		del := rapid.Make[delRequest]().Draw(t, "del")
		check(t, del, del.encode(), new(apiv1.DelRequest), new(apiv1.DelRequest))
		chk := rapid.Make[checkRequest]().Draw(t, "check")
		check(t, chk, chk.encode(), new(apiv1.CheckRequest), new(apiv1.CheckRequest))
		gc := rapid.Make[gcRequest]().Draw(t, "gc")
		check(t, gc, gc.encode(), new(apiv1.GCRequest), new(apiv1.GCRequest))
	})
	if n := new(apiv1.StatusRequest).ProtoReflect().Descriptor().Fields().Len(); n != 0 {
		t.Errorf("a StatusRequest has %d fields", n)
	}
}

// unknown is a field of each wire type that no message has: a later daemon's.
func unknown() []byte {
	return []byte{
		0xf8, 0x3f, 0x96, 0x01, // varint
		0xfa, 0x3f, 0x02, 'h', 'i', // length
		0xfd, 0x3f, 1, 2, 3, 4, // 32 bits
		0xf9, 0x3f, 1, 2, 3, 4, 5, 6, 7, 8, // 64 bits
	}
}

func TestResponsesAreTheGeneratedOnes(t *testing.T) {
	t.Parallel()
	encode := func(t *rapid.T, ours any, m proto.Message) []byte {
		populate(t, m.ProtoReflect(), reflect.ValueOf(ours))
		b, err := proto.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		return append(b, unknown()...)
	}
	nilIsEmpty := cmp.FilterValues(func(a, b []address) bool { return len(a)+len(b) == 0 }, cmp.Ignore())
	nilIsEmptyToo := cmp.FilterValues(func(a, b []attachment) bool { return len(a)+len(b) == 0 }, cmp.Ignore())
	rapid.Check(t, func(t *rapid.T) {
		want := rapid.Make[addResponse]().Draw(t, "add")
		var got addResponse
		if err := got.decode(encode(t, want, new(apiv1.AddResponse))); err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(want, got, nilIsEmpty); d != "" {
			t.Fatalf("(-want +got):\n%s", d)
		}
		wantAlloc := rapid.Make[allocateResponse]().Draw(t, "allocate")
		var gotAlloc allocateResponse
		if err := gotAlloc.decode(encode(t, wantAlloc, new(apiv1.AllocateResponse))); err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(wantAlloc, gotAlloc, nilIsEmpty); d != "" {
			t.Fatalf("(-want +got):\n%s", d)
		}
		wantGC := rapid.Make[gcResponse]().Draw(t, "gc")
		var gotGC gcResponse
		if err := gotGC.decode(encode(t, wantGC, new(apiv1.GCResponse))); err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(wantGC, gotGC, nilIsEmptyToo); d != "" {
			t.Fatalf("(-want +got):\n%s", d)
		}
	})
	for _, m := range []proto.Message{new(apiv1.DelResponse), new(apiv1.CheckResponse), new(apiv1.StatusResponse)} {
		if n := m.ProtoReflect().Descriptor().Fields().Len(); n != 0 {
			t.Errorf("%s has %d fields that nobody reads", m.ProtoReflect().Descriptor().Name(), n)
		}
	}
}

// Whatever comes, decoding ends with an error or without.
func TestDecodeGarbage(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		b := rapid.SliceOf(rapid.Byte()).Draw(t, "bytes")
		_ = new(addResponse).decode(b)
		_ = new(gcResponse).decode(b)
		_ = new(allocateResponse).decode(b)
		_, _ = detailOf(b)
	})
	for _, b := range [][]byte{{0x80}, {0x0a, 0x05, 'x'}, {0x0a, 0x80}, {0x08, 0x80}, {0x0d, 1}, {0x09, 1}, {0x0b}, {0x2a, 1, 0x80}} {
		if err := new(addResponse).decode(b); err == nil {
			t.Errorf("%x is taken for a message", b)
		}
	}
}
