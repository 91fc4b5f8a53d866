package store

import (
	"testing"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestReflectors(t *testing.T) {
	t.Parallel()
	for value, want := range map[string]Reflectors{
		"2": {Count: 2}, "1 per rack": {1, "rack"}, "3 per topology.kubernetes.io/zone": {3, "topology.kubernetes.io/zone"},
		"": {}, "0": {}, "17": {}, "two": {}, "2 per ": {}, "2 per a b": {}, "2,3": {},
	} {
		got, err := ParseReflectors(value)
		if got != want || (err == nil) != (want != Reflectors{}) {
			t.Errorf("%q is %v, %v, want %v", value, got, err, want)
		}
		if err == nil && got.String() != value {
			t.Errorf("%q is written %q", value, got)
		}
		c := &v3.BGPConfiguration{ObjectMeta: metav1.ObjectMeta{Name: DefaultName, Annotations: map[string]string{AnnotationReflectors: value}}}
		if invalid := Validate(c); (invalid == nil) != (err == nil) {
			t.Errorf("%q: %v", value, invalid)
		}
	}
}

func TestNodeReflection(t *testing.T) {
	t.Parallel()
	n := &Node{}
	n.Annotations = map[string]string{"other": "stays"}
	for _, want := range []NodeReflection{
		{Reflects: true}, {Reflects: true, Ready: true, By: map[string]bool{"node2": true, "node3": false, ReflectedMesh: true}}, {By: map[string]bool{"node-1": true}}, {},
	} {
		before := n.Annotations
		SetNodeReflection(n, want)
		if got := NodeReflectionOf(n.Annotations); !got.Equal(want) {
			t.Errorf("%v is read as %v", want, got)
		}
		if n.Annotations["other"] != "stays" || len(n.Annotations) > 3 {
			t.Errorf("annotations %v", n.Annotations)
		}
		if len(before) == 1 && before[AnnotationReflects] != "" {
			t.Error("the map that was shared is changed")
		}
	}
	if len(n.Annotations) != 1 {
		t.Errorf("annotations %v are left", n.Annotations)
	}
}
