package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/routerd/routerd/integration/await"
)

const prometheusAddr = "127.0.0.1:9090"

// prometheus starts a server that reads this host's metrics, with the alert rules.
func (h *host) prometheus(rules string) {
	h.t.Helper()
	dir := h.t.TempDir()
	conf := filepath.Join(dir, "prometheus.yml")
	text := fmt.Sprintf("global: {scrape_interval: 1s, evaluation_interval: 1s}\nrule_files: [%s]\nscrape_configs: [{job_name: routerd, static_configs: [{targets: ['127.0.0.1:9099']}]}]\n", rules)
	if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
		h.t.Fatal(err)
	}
	// It ends when the test does, in whatever way: with its standard input.
	cmd := exec.CommandContext(h.t.Context(), "sh", "-c", `"$@" & read _; kill $!; wait`, "sh",
		"prometheus", "--config.file="+conf, "--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address="+prometheusAddr, "--log.level=warn")
	in, err := cmd.StdinPipe()
	if err != nil {
		h.t.Fatal(err)
	}
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr, cmd.Cancel = &said, &said, in.Close
	if err := h.ns.Do(cmd.Start); err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() {
		_ = cmd.Wait() // it was ended
		if h.t.Failed() {
			h.t.Logf("log of Prometheus:\n%s", said.String())
		}
	})
}

// asked decodes the data of Prometheus' answer.
func (h *host) asked(path string, data any) error {
	code, body, err := h.getFrom(prometheusAddr, "/api/v1/"+path)
	if err == nil && code != http.StatusOK {
		err = fmt.Errorf("%s: status %d: %s", path, code, body)
	}
	if err != nil {
		return err
	}
	return json.Unmarshal([]byte(body), &struct {
		Data any `json:"data"`
	}{data})
}

// TestPrometheus: a real Prometheus reads a daemon's metrics, evaluates every alert rule, and answers what the dashboard asks.
func TestPrometheus(t *testing.T) {
	t.Parallel()
	rules, err := filepath.Abs("../../configs/prometheus/alerts.yml")
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(rules)
	if err != nil {
		t.Fatal(err)
	}
	alerts := regexp.MustCompile(`(?m)- alert: `).FindAll(text, -1)
	h := newHost(t, "10.1.0.11/24")
	h.config["health"] = map[string]any{"listen": "127.0.0.1:9099"}
	h.start().ready()
	h.prometheus(rules)

	await.Until(t, "every rule is evaluated", func() error {
		var got struct {
			Groups []struct {
				Rules []struct{ Name, Health, LastError, State string }
			}
		}
		if err := h.asked("rules?type=alert", &got); err != nil {
			return err
		}
		n := 0
		for _, g := range got.Groups {
			for _, r := range g.Rules {
				if r.Health != "ok" {
					return fmt.Errorf("rule %s is %s: %s", r.Name, r.Health, r.LastError)
				}
				n++
			}
		}
		if n != len(alerts) {
			return fmt.Errorf("%d rules, want %d", n, len(alerts))
		}
		return nil
	})
	type answer struct {
		Result []struct{ Value [2]any }
	}
	await.Until(t, "the host is ready by its metrics", func() error {
		var got answer
		err := h.asked("query?query="+url.QueryEscape(`routerd_healthy{job="routerd",check="ready"} and on (instance) up == 1`), &got)
		if err == nil && (len(got.Result) != 1 || got.Result[0].Value[1] != "1") {
			err = fmt.Errorf("answer %v", got)
		}
		return err
	})

	b, err := os.ReadFile("../../configs/grafana/routerd.json")
	if err != nil {
		t.Fatal(err)
	}
	var dashboard struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(b, &dashboard); err != nil {
		t.Fatal(err)
	}
	asked := 0
	variables := strings.NewReplacer("$instance", ".*", "$__rate_interval", "1m") // as Grafana fills them in
	for _, p := range dashboard.Panels {
		for _, target := range p.Targets {
			asked++
			var got answer
			if err := h.asked("query?query="+url.QueryEscape(variables.Replace(target.Expr)), &got); err != nil {
				t.Errorf("panel %q: %v", p.Title, err)
			}
		}
	}
	if asked < 10 {
		t.Errorf("the dashboard asks %d things only", asked)
	}
}
