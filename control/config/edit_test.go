package config

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// joined is what a host that joins is to have.
func joined() Datastore {
	return Datastore{Endpoints: []string{"https://10.1.0.11:2379"}, CAFile: "/p/ca.crt", CertFile: "/p/client.crt", KeyFile: "/p/client.key"}
}

const section = `datastore:
  caFile: /p/ca.crt
  certFile: /p/client.crt
  endpoints: ['https://10.1.0.11:2379']
  keyFile: /p/client.key
`

// TestUseDatastore: the section is in the text, and all else is as it was.
func TestUseDatastore(t *testing.T) {
	t.Parallel()
	body := strings.TrimPrefix(section, "datastore:\n")
	for _, tt := range []struct {
		name, text, want string
		force            bool
	}{
		{"no file", "", section, false},
		{"comments alone", "# mine\n", "# mine\n" + section, false},
		{"other keys, no newline at the end", "nodeName: host12 # mine", "nodeName: host12 # mine\n\n" + section, false},
		{"an empty section", "datastore:\nlogLevel: info\n", "datastore:\n" + body + "logLevel: info\n", false},
		{"null", "datastore: null # not yet\nlogLevel: info\n", "datastore: # not yet\n" + body + "logLevel: info\n", false},
		{"the other null", "datastore:   ~\nlogLevel: info\n", "datastore:\n" + body + "logLevel: info\n", false},
		{"another key of it", "datastore:\n    # patient\n    dialTimeout: 30s\n", "datastore:\n" + strings.ReplaceAll(body, "  ", "    ") + "    # patient\n    dialTimeout: 30s\n", false},
		{"empty keys", "datastore:\n  endpoints: []   # of the others\n  caFile: \"\"\n  certfile:\n  embedded: {listen: ''}\n", "datastore:\n  keyFile: /p/client.key\n  endpoints: ['https://10.1.0.11:2379'] # of the others\n  caFile: /p/ca.crt\n  certfile: /p/client.crt\n  embedded: {listen: ''}\n", false},
		{"a second run", section + "# mine\n", section + "# mine\n", false},
		{"by force", "datastore:\n  kind: kubernetes\n  endpoints: [http://a:1]\n  embedded:\n    listen: 10.0.0.1:2379\n    hosts: [a]\n", "datastore:\n  caFile: /p/ca.crt\n  certFile: /p/client.crt\n  keyFile: /p/client.key\n  kind: \"\"\n  endpoints: ['https://10.1.0.11:2379']\n  embedded:\n    listen: \"\"\n    hosts: [a]\n", true},
	} {
		got, err := UseDatastore([]byte(tt.text), joined(), tt.force)
		if err != nil {
			t.Errorf("%s: %v", tt.name, err)
			continue
		}
		if diff := cmp.Diff(tt.want, string(got)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
		file := filepath.Join(t.TempDir(), "routerd.yaml")
		if err := os.WriteFile(file, got, 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := Load(file)
		if err != nil {
			t.Errorf("%s: %v", tt.name, err)
			continue
		}
		if d := c.Datastore; d.Own() || d.Endpoints[0] != joined().Endpoints[0] || d.KeyFile != joined().KeyFile {
			t.Errorf("%s is read as %+v", tt.name, d)
		}
		if again, err := UseDatastore(got, joined(), false); err != nil || string(again) != string(got) {
			t.Errorf("%s: a second time: %v\n%s", tt.name, err, again)
		}
	}
}

// TestUseDatastoreRefused: what somebody wrote stays, and is named.
func TestUseDatastoreRefused(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		text, want string
		force      bool
	}{
		{"datastore: {endpoints: ['https://10.0.0.1:2379']}", "datastore.endpoints is ['https://10.0.0.1:2379'] there", false},
		{"datastore:\n  kind: kubernetes\n", "datastore.kind is kubernetes there", false},
		{"datastore:\n  certFile: /mine\n", "datastore.certFile is /mine there", false},
		{"datastore:\n  username: root\n", "datastore.username is root there", false},
		{"datastore:\n  embedded:\n    listen: 10.0.0.1:2379\n", "datastore.embedded.listen is 10.0.0.1:2379 there", false},
		{"datastore: {dialTimeout: 3s}\n", "by hand:\ndatastore:\n  caFile: /p/ca.crt\n", false},
		{"datastore: !!null null\n", "by hand", false},
		{"datastore: &a null\n", "by hand", false},
		{"{nodeName: a}\n", "by hand", false},
		{"datastore:\n  endpoints: [\n  ]\n", "by hand", false},
		{"datastore:\n  endpoints:\n    - https://a:1\n", "by hand", true},
		{"nodeName: a\n---\nnodeName: b\n", "several documents", false},
		{"nodeName: [\n", "cannot be read", false},
		{"- a\n", "cannot be read", false},
	} {
		_, err := UseDatastore([]byte(tt.text), joined(), tt.force)
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%q: %v, want %q", tt.text, err, tt.want)
		}
		var w *Written
		if errors.As(err, &w) != strings.HasPrefix(tt.want, "datastore.") {
			t.Errorf("%q: %T", tt.text, err)
		}
	}
}

// TestUseDatastoreInSample: the file that comes with routerd takes the section.
func TestUseDatastoreInSample(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../configs/routerd.yaml")
	if err != nil {
		t.Fatal(err)
	}
	got, err := UseDatastore(text, joined(), false)
	if err != nil {
		t.Fatal(err)
	}
	if before, after := strings.Count(string(text), "\n"), strings.Count(string(got), "\n"); before != after {
		t.Errorf("%d lines became %d", before, after)
	}
}
