package workload

import (
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestDeviceName(t *testing.T) {
	t.Parallel()
	id := "0123456789abcdef0123"
	for _, tt := range []struct {
		name      string
		owner     Owner
		namespace string
		pod       string
		want      string
	}{
		{"pod, as Calico names it", Owner{"net1", id, "eth0"}, "ns1", "web-0", "caliabc48332923"},
		{"container with a hexadecimal id", Owner{"net1", id, "eth0"}, "", "", "cali0123456789a"},
		{"container with another id", Owner{"net1", "web-container-1", "eth0"}, "", "", "cali" + hash("web-container-1/eth0")},
		{"short hexadecimal id", Owner{"net1", "abc", "eth0"}, "", "", "cali" + hash("abc/eth0")},
		{"second interface of a pod", Owner{"net1", id, "net1"}, "ns1", "web-0", "cali" + hash(id+"/net1")},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			got := DeviceName(tt.owner, tt.namespace, tt.pod)
			if got != tt.want {
				t.Errorf("got %s, want %s", got, tt.want)
			}
			if len(got) != 15 {
				t.Errorf("%s has %d characters, want 15", got, len(got))
			}
		})
	}
}

func TestAlias(t *testing.T) {
	t.Parallel()
	part := rapid.StringMatching(`[a-zA-Z0-9][a-zA-Z0-9_.-]{0,60}`)
	rapid.Check(t, func(t *rapid.T) {
		o := Owner{part.Draw(t, "network"), part.Draw(t, "container"), part.Draw(t, "interface")}
		got, ok := ParseAlias(o.Alias())
		if !ok || got != o {
			t.Fatalf("ParseAlias(%q) = %v, %v; want %v", o.Alias(), got, ok, o)
		}
	})
	long := Owner{"net1", strings.Repeat("a", 300), "eth0"}
	if n := len(long.Alias()); n > maxAlias {
		t.Errorf("alias of a long id has %d characters", n)
	}
	other := Owner{"net1", strings.Repeat("a", 299) + "b", "eth0"}
	if long.Alias() == other.Alias() {
		t.Error("two long owners have one alias")
	}
	for _, s := range []string{"", "uplink to tor1", "routerd:", long.Alias()} {
		if o, ok := ParseAlias(s); ok {
			t.Errorf("ParseAlias(%q) = %v", s, o)
		}
	}
}
