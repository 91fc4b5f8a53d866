package attach

import (
	"encoding/json"
	"testing"
)

// FuzzParseRecord: a record that is taken from the disk is written and read as the same,
// and all that the daemon asks of it has an answer.
func FuzzParseRecord(f *testing.F) {
	for _, s := range []string{
		`{"version":1,"network":"n","containerID":"c","interface":"eth0","device":"cali1","netns":"/n","mac":"02:00:00:00:00:01","mtu":1450,"state":"attached","addresses":[{"addr":"10.0.0.1","gateway":"169.254.1.1","block":"10.0.0.0/26"}],"claims":["10.0.0.1"],"since":"2026-11-27T00:00:00Z"}`,
		`{"version":1,"network":"n","containerID":"c","interface":"eth0","addressesOnly":true,"state":"releasing","queued":true,"lost":"w","disowned":true,"endpoint":{}}`,
		`{"version":2}`, `null`, `[]`, `{"version":1,"addresses":[null]}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := parseRecord(b)
		if err != nil {
			return
		}
		r.id()
		r.workload()
		r.addrs()
		r.families()
		r.mac()
		text, err := json.Marshal(r)
		if err != nil {
			t.Fatalf("%+v cannot be written: %v", r, err)
		}
		again, err := parseRecord(text)
		if err != nil {
			t.Fatalf("%s was written, and is refused: %v", text, err)
		}
		if more, err := json.Marshal(again); err != nil || string(more) != string(text) {
			t.Errorf("%s is read and written as %s, %v", text, more, err)
		}
		if again.State != r.State {
			t.Errorf("%s: state %v is read again as %v", text, r.State, again.State)
		}
	})
}
