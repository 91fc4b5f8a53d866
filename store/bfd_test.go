package store_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/routerd/routerd/store"
)

func TestParseBFD(t *testing.T) {
	t.Parallel()
	const form = `must be "on", "off", an interval such as "100ms", or an interval and a multiplier such as "50ms x 3"`
	for _, c := range []struct {
		value string
		want  store.BFD
		err   string
	}{
		{"on", store.BFD{Interval: 300 * time.Millisecond, Multiplier: 3}, "<nil>"},
		{"off", store.BFD{}, "<nil>"},
		{"100ms", store.BFD{Interval: 100 * time.Millisecond, Multiplier: 3}, "<nil>"},
		{"50ms x 5", store.BFD{Interval: 50 * time.Millisecond, Multiplier: 5}, "<nil>"},
		{"50msx5", store.BFD{Interval: 50 * time.Millisecond, Multiplier: 5}, "<nil>"},
		{"", store.BFD{}, form},
		{"true", store.BFD{}, form},
		{"50", store.BFD{}, form},
		{"5ms", store.BFD{}, "the interval 5ms must be from 10ms to 1m0s"},
		{"2m x 3", store.BFD{}, "the interval 2m0s must be from 10ms to 1m0s"},
		{"50ms x 0", store.BFD{}, `the multiplier "0" must be a number from 1 to 255, as in "50ms x 3"`},
		{"50ms x 256", store.BFD{}, `the multiplier "256" must be a number from 1 to 255, as in "50ms x 3"`},
	} {
		got, err := store.ParseBFD(c.value)
		if got != c.want || fmt.Sprint(err) != c.err {
			t.Errorf("%q: %+v, %v; want %+v, %s", c.value, got, err, c.want, c.err)
		}
	}
}

// TestBFDAnnotation: a wrong value is refused, by its field.
func TestBFDAnnotation(t *testing.T) {
	t.Parallel()
	const want = `metadata.annotations[routerd.io/bfd]: "5ms": the interval 5ms must be from 10ms to 1m0s`
	peer := resource(t, store.KindBGPPeer, "tor", `{"peerIP":"10.1.0.1","asNumber":64999}`)
	conf := resource(t, store.KindBGPConfiguration, "default", `{}`)
	for _, r := range []any{peer, conf} {
		store.Meta(r).SetAnnotations(map[string]string{store.AnnotationBFD: "5ms"})
		if err := store.Validate(r); fmt.Sprint(err) != want {
			t.Errorf("%T: %v; want %s", r, err, want)
		}
		store.Meta(r).SetAnnotations(map[string]string{store.AnnotationBFD: "50ms x 3"})
		if err := store.Validate(r); err != nil {
			t.Errorf("%T: %v", r, err)
		}
	}
}
