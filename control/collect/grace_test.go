package collect

import (
	"testing"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestGraceOf: the host's own setting goes before the cluster's, which goes before the default.
func TestGraceOf(t *testing.T) {
	t.Parallel()
	const def = 15 * time.Minute
	says := func(grace time.Duration) *v3.KubeControllersConfiguration {
		k := v3.NewKubeControllersConfiguration()
		k.Spec.Controllers.Node = &v3.NodeControllerConfig{LeakGracePeriod: &metav1.Duration{Duration: grace}}
		return k
	}
	for name, c := range map[string]struct {
		own  time.Duration
		k    *v3.KubeControllersConfiguration
		want time.Duration
	}{
		"neither":               {def, nil, def},
		"the resource":          {def, says(time.Hour), time.Hour},
		"too short":             {def, says(time.Second), time.Minute},
		"leaks stay":            {def, says(0), 0},
		"the host's own":        {2 * time.Minute, says(time.Hour), 2 * time.Minute},
		"none on the host":      {0, says(time.Hour), 0},
		"no controllers":        {def, v3.NewKubeControllersConfiguration(), def},
		"a controller, no time": {def, &v3.KubeControllersConfiguration{Spec: v3.KubeControllersConfigurationSpec{Controllers: v3.ControllersConfig{Node: &v3.NodeControllerConfig{}}}}, def},
	} {
		if got := GraceOf(c.own, c.k); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}
