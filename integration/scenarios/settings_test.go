package scenarios

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/store"
)

// TestSettingsChange changes the VXLAN network, the port, both, and the MTU of a
// cluster under traffic, and puts them back.
func TestSettingsChange(t *testing.T) {
	beside(t)
	c := changeLab(t, "settings", store.VXLAN)
	expectNoLoss(t, "before any change", c.load)
	const vni, port = store.DefaultVXLANVNI, store.DefaultVXLANPort
	mtu := modeOf(store.VXLAN).mtu
	for _, step := range []struct {
		what string
		spec string
		mode store.Mode
		mtu  int
	}{
		{"another VNI", "vxlanVNI: 5000", store.NewMode(store.VXLAN, 5000, port), mtu},
		{"another port", "vxlanVNI: 5000, vxlanPort: 4790", store.NewMode(store.VXLAN, 5000, 4790), mtu},
		{"a smaller MTU", "vxlanVNI: 5000, vxlanPort: 4790, vxlanMTU: 1400", store.NewMode(store.VXLAN, 5000, 4790), 1400},
		{"all put back", fmt.Sprintf("vxlanVNI: %d, vxlanPort: %d, vxlanMTU: 0", vni, port), store.NewMode(store.VXLAN, vni, port), mtu},
	} {
		start := time.Now()
		applySettings(t, c.Lab, step.spec)
		c.waitNumbers(t, step.what, step.mode)
		waitPodMTU(t, c.Lab, step.mtu)
		t.Logf("%s took %.2f s", step.what, time.Since(start).Seconds())
		expectNoLoss(t, step.what, c.load)
		if t.Failed() {
			t.Fatalf("stopped after %s", step.what)
		}
	}
}

// applySettings replaces the settings of the cluster.
func applySettings(t *testing.T, l *lab.Lab, spec string) {
	t.Helper()
	routerctl(t, l, l.Hosts()[0], fmt.Sprintf(`apiVersion: projectcalico.org/v3
kind: FelixConfiguration
metadata: {name: default}
spec: {%s}
`, spec), "apply", "-f", "-")
}

// waitNumbers waits until every host sends in a mode, and takes in VXLAN of no
// other network or port any more.
func (c *changing) waitNumbers(t *testing.T, what string, m store.Mode) {
	t.Helper()
	poll(t, what, func() string {
		forms := c.forms(t)
		for _, h := range c.Hosts() {
			f := forms[h]
			if f.Sends[defaultPool] != m.String() {
				return fmt.Sprintf("%s has not moved to %s: %+v", h, m, f)
			}
			for _, accepted := range f.Accepts {
				if accepted != "direct" && !slices.Contains(m.Encaps(), accepted) {
					return fmt.Sprintf("%s still takes in %s: %+v", h, accepted, f)
				}
			}
		}
		return ""
	})
}
