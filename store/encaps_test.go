package store_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/store"
)

func TestNodeForms(t *testing.T) {
	n := &store.Node{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{"other": "stays"}}}
	if f := store.NodeEncapsOf(n); f.Published {
		t.Errorf("a node without annotations: %+v", f)
	}
	want := store.NodeEncaps{
		Published: true, Accepts: []string{"direct", "vxlan/4096/4789"}, Uses: []string{"direct"},
		Sends: map[string]string{"default": "VXLANCrossSubnet/4096/4789"}, Refuses: map[string]string{"ipip": "no such module"},
		Stays: map[string]string{"default": "node3: lost"},
	}
	before := n.Annotations
	store.SetNodeEncaps(n, want)
	if len(before) != 1 {
		t.Errorf("the map of before was changed: %v", before)
	}
	if diff := cmp.Diff(want, store.NodeEncapsOf(n)); diff != "" {
		t.Errorf("read back (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[string]string{
		"other": "stays", "routerd.io/accepts": "direct,vxlan/4096/4789", "routerd.io/uses": "direct",
		"routerd.io/sends": `{"default":"VXLANCrossSubnet/4096/4789"}`, "routerd.io/refuses": `{"ipip":"no such module"}`,
		"routerd.io/stays": `{"default":"node3: lost"}`,
	}, n.Annotations); diff != "" {
		t.Errorf("annotations (-want +got):\n%s", diff)
	}
	// A node that takes part and accepts nothing differs from one that does not.
	store.SetNodeEncaps(n, store.NodeEncaps{Published: true})
	if diff := cmp.Diff(map[string]string{"other": "stays", "routerd.io/accepts": ""}, n.Annotations); diff != "" {
		t.Errorf("annotations (-want +got):\n%s", diff)
	}
	store.SetNodeEncaps(n, store.NodeEncaps{})
	if diff := cmp.Diff(map[string]string{"other": "stays"}, n.Annotations); diff != "" {
		t.Errorf("annotations (-want +got):\n%s", diff)
	}
}

// FuzzFormsOf: whatever stands in the annotations, what is read is written and
// read the same.
func FuzzFormsOf(f *testing.F) {
	f.Add("direct,ipip", "direct", `{"default":"IPIP"}`, `{"ipip":"why"}`)
	f.Add(",, direct ,direct", "\x00", `{"default":1}`, `[]`)
	f.Add("", "", `{`, `null`)
	f.Fuzz(func(t *testing.T, accepts, uses, sends, refuses string) {
		n := &store.Node{}
		n.Annotations = map[string]string{
			store.AnnotationAccepts: accepts, store.AnnotationUses: uses,
			store.AnnotationSends: sends, store.AnnotationRefuses: refuses,
		}
		want := store.NodeEncapsOf(n)
		store.SetNodeEncaps(n, want)
		if diff := cmp.Diff(want, store.NodeEncapsOf(n), cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("read, written and read (-first +second):\n%s", diff)
		}
	})
}
