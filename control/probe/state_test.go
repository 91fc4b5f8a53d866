package probe

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/routerd/routerd/dataplane"
)

func FuzzRecords(f *testing.F) {
	f.Add([]byte(`{"kernel":"6.1","paths":{"x":{"path":"y","result":1,"off":["checksum off"],"at":5}}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var in file
		if json.Unmarshal(b, &in) != nil {
			return
		}
		out, err := json.Marshal(in)
		if err != nil {
			t.Fatal(err)
		}
		var again file
		if err := json.Unmarshal(out, &again); err != nil {
			t.Errorf("%s cannot be read again: %v", out, err)
		}
	})
}

func TestSettings(t *testing.T) {
	t.Parallel()
	for s := range NoChecksum | NoTCPSegments | NoUDPSegments + 1 {
		b, err := json.Marshal(s)
		var back Setting
		if err != nil || json.Unmarshal(b, &back) != nil || back != s {
			t.Errorf("%v: %s, %v", s, b, err)
		}
		for _, o := range s.features(device) {
			f := o.(dataplane.Feature)
			if s&NoChecksum != 0 && f.On {
				t.Errorf("%v wants %s on, which the kernel refuses without checksums", s, f.Name)
			}
		}
		if (s == 0) != (s.Cure(device) == "") || s != 0 && !strings.HasPrefix(s.Cure(device), "ethtool -K "+device+" tx-") {
			t.Errorf("cure of %v: %q", s, s.Cure(device))
		}
	}
	var s Setting
	if err := json.Unmarshal([]byte(`["everything off"]`), &s); err == nil || !strings.Contains(err.Error(), "everything off") {
		t.Errorf("a setting that is not known: %v", err)
	}
}
