package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store/embedded"
	"github.com/routerd/routerd/store/etcd"
)

// TestRestoreCommand: the snapshot goes where the configuration has the datastore.
func TestRestoreCommand(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	server, err := embedded.Start(await.Context(t), embedded.Config{Dir: filepath.Join(dir, "d"), Socket: filepath.Join(dir, "s")})
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	s, err := etcd.Open(t.Context(), etcd.Config{Endpoints: []string{server.Endpoint()}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var snapshot bytes.Buffer
	if _, err := s.Snapshot(await.Context(t), &snapshot); err != nil {
		t.Fatal(err)
	}
	file := func(name, content string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	backup := file("backup.db", snapshot.String())
	for _, tt := range []struct {
		config, want string
		ok           bool
	}{
		{"nodeName: n\nstateDir: " + dir + "/state\n", "Restored 0 keys as of revision ", true},
		{"nodeName: n\nstateDir: " + dir + "/state\n", "What was there before is in " + dir + "/state/etcd/data.before-", true},
		{"nodeName: n\ndatastore: {endpoints: ['https://10.0.0.1:2379']}\n", "is an external etcd", false},
	} {
		var out bytes.Buffer
		c := newCommand()
		c.SetArgs([]string{"restore", backup, "--config", file("routerd.yaml", tt.config)})
		c.SetOut(&out)
		c.SetErr(&out)
		err := c.ExecuteContext(t.Context())
		if err != nil {
			out.WriteString(err.Error())
		}
		if (err == nil) != tt.ok || !strings.Contains(out.String(), tt.want) {
			t.Errorf("%q: %v\n%s\nwant %q", tt.config, err, &out, tt.want)
		}
	}
}
