package store

import (
	"fmt"
	"strings"
	"testing"
)

func TestParseTunnelAddresses(t *testing.T) {
	t.Parallel()
	tests := []struct {
		in, want string
		bad      bool
	}{
		{"", "[]", false},
		{"198.51.100.7", "[198.51.100.7]", false},
		{"198.51.100.7, 2001:db8::7", "[198.51.100.7 2001:db8::7]", false},
		{"198.51.100.7,198.51.100.8", "[198.51.100.7]", true},
		{"127.0.0.1", "[]", true},
		{"fe80::1%eth0", "[]", true},
		{"::ffff:198.51.100.7", "[]", true},
		{"224.0.0.1,2001:db8::7", "[2001:db8::7]", true},
		{"public", "[]", true},
	}
	for _, tt := range tests {
		got, err := ParseTunnelAddresses(tt.in)
		if fmt.Sprint(got) != tt.want || (err != nil) != tt.bad {
			t.Errorf("ParseTunnelAddresses(%q) = %v, %v; want %s, error %t", tt.in, got, err, tt.want, tt.bad)
		}
		n := &Node{}
		n.Name, n.Annotations = "node1", map[string]string{AnnotationTunnelAddress: tt.in}
		if err := Validate(n); (err != nil) != tt.bad {
			t.Errorf("Validate of a node with %q: %v, want error %t", tt.in, err, tt.bad)
		}
	}
}

// A secret stays one in every form of printing.
func TestSecretDoesNotPrint(t *testing.T) {
	t.Parallel()
	s := &Secret{Key: []byte("hidden")}
	for _, format := range []string{"%v", "%+v", "%#v", "%s"} {
		for _, v := range []any{s, Object{Key: SecretKey("x"), Value: s}} {
			if got := fmt.Sprintf(format, v); strings.Contains(got, "hidden") || strings.Contains(got, "104 105") {
				t.Errorf("%s prints %s", format, got)
			}
		}
	}
}
