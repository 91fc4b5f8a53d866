package config_test

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/routerd/routerd/control/config"
)

// proposed is a setting that a manifest has as a comment, for who wants it.
var proposed = regexp.MustCompile(`(?m)^( *)# ([a-zA-Z0-9]+: [^ ]+)$`)

// TestManifests: what the ConfigMaps of configs/kubernetes configure is valid, and differs
// from what they say with all that they propose in nothing but a second address family.
func TestManifests(t *testing.T) {
	files, err := filepath.Glob("../../configs/kubernetes/*/config.yaml")
	if err != nil || len(files) < 3 {
		t.Fatalf("manifests %q, %v", files, err)
	}
	for _, file := range files {
		t.Run(filepath.Base(filepath.Dir(file)), func(t *testing.T) {
			raw, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			var manifest struct{ Data map[string]string }
			if err := yaml.Unmarshal(raw, &manifest); err != nil {
				t.Fatal(err)
			}
			text := manifest.Data["routerd.yaml"]
			load := func(text string) config.Config {
				t.Helper()
				c, err := config.Load(write(t, text))
				if err == nil {
					err = c.Validate()
				}
				if err != nil {
					t.Fatalf("%v:\n%s", err, text)
				}
				return c
			}
			want, got := load(text), load(proposed.ReplaceAllString(text, "$1$2"))
			if got.DefaultPool.CIDR6 == "none" || !got.CNI.AssignIPv6 || got.Address.IPv6 == config.Default().Address.IPv6 {
				t.Errorf("what is proposed gives pods no address of IPv6: %+v, %+v, %+v", got.DefaultPool, got.CNI, got.Address)
			}
			want.DefaultPool.CIDR6, want.CNI.AssignIPv6, want.Address.IPv6 = got.DefaultPool.CIDR6, true, got.Address.IPv6
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("what is proposed changes more (-want +got):\n%s", diff)
			}
		})
	}
}
