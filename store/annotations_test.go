package store

import (
	"strings"
	"testing"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestSwitches: an annotation that is on or off is nothing else, and the error names it
// and what it may be.
func TestSwitches(t *testing.T) {
	t.Parallel()
	for _, name := range []string{AnnotationServiceCIDRs, AnnotationServicesNeedEndpoints} {
		for value, good := range map[string]bool{"true": true, "false": true, "yes": false, "": false, "True": false} {
			err := Validate(&v3.BGPConfiguration{ObjectMeta: metav1.ObjectMeta{Name: DefaultName, Annotations: map[string]string{name: value}}})
			if good != (err == nil) || err != nil && (!strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), `want "true" or "false"`)) {
				t.Errorf("%s: %q: %v", name, value, err)
			}
		}
	}
}
