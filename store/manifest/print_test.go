package manifest_test

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
	"sigs.k8s.io/yaml"

	"github.com/routerd/routerd/store/manifest"
)

// TestYAMLKeepsText: whatever somebody wrote into a string, the YAML of it can be printed
// and says the same.
func TestYAMLKeepsText(t *testing.T) {
	t.Parallel()
	same := func(t interface {
		Helper()
		Errorf(string, ...any)
	}, raw []byte,
	) {
		t.Helper()
		text, err := manifest.YAML(raw)
		if err != nil {
			t.Errorf("%s: %v", raw, err)
			return
		}
		var want, got any
		if err := json.Unmarshal(raw, &want); err != nil {
			t.Errorf("%s: %v", raw, err)
		}
		if err := yaml.Unmarshal(text, &got); err != nil {
			t.Errorf("%s: %v", text, err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", text, diff)
		}
	}
	for _, raw := range []string{
		`{"a":"\u001b[31m\u009b\u007f\u0085\u2028\u202e\ufeff\ufffe\uffff"}`, "{\"a\":\"\u009b\u0085\u2028\x7f\ufeff\"}",
		`{"a":"\ud83d\ude00"}`, `{"a":"\ud83d"}`, `{"a":"\/"}`, "{\"a\":\"\U000e0001\"}", `{"\u009b":9007199254740993}`,
	} {
		same(t, []byte(raw))
	}
	rapid.Check(t, func(t *rapid.T) {
		raw, err := json.Marshal(map[string]string{rapid.String().Draw(t, "key"): rapid.String().Draw(t, "value")})
		if err != nil {
			t.Fatal(err)
		}
		same(t, raw)
	})
}
