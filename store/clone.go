package store

import (
	"reflect"

	"k8s.io/apimachinery/pkg/runtime"
)

// Clone returns a deep copy of a Value of an [Object], which may then be
// changed. It panics on a type that no kind has.
func Clone(v any) any {
	if v == nil {
		return nil
	}
	if o, ok := v.(runtime.Object); ok { // the v3 types of Calico's API module
		return o.DeepCopyObject()
	}
	if _, ok := KindOf(v); !ok {
		panic("store: clone of a value of no kind")
	}
	return clone(reflect.ValueOf(v)).Interface()
}

// clone copies what v leads to by exported fields; of others, such as a time's, nothing is ever changed.
func clone(v reflect.Value) reflect.Value {
	switch v.Kind() {
	case reflect.Pointer:
		if v.IsNil() {
			return v
		}
		out := reflect.New(v.Type().Elem())
		out.Elem().Set(clone(v.Elem()))
		return out
	case reflect.Slice:
		if v.IsNil() {
			return v
		}
		out := reflect.MakeSlice(v.Type(), v.Len(), v.Len())
		reflect.Copy(out, v)
		switch v.Type().Elem().Kind() {
		case reflect.Pointer, reflect.Slice, reflect.Map, reflect.Struct:
			for i := range v.Len() {
				out.Index(i).Set(clone(v.Index(i)))
			}
		default:
		}
		return out
	case reflect.Map:
		if v.IsNil() {
			return v
		}
		out := reflect.MakeMapWithSize(v.Type(), v.Len())
		for at := v.MapRange(); at.Next(); {
			out.SetMapIndex(at.Key(), clone(at.Value()))
		}
		return out
	case reflect.Struct:
		out := reflect.New(v.Type()).Elem()
		out.Set(v)
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				out.Field(i).Set(clone(v.Field(i)))
			}
		}
		return out
	default:
		return v
	}
}
