package main

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/routerd/routerd/control/operator"
	"github.com/routerd/routerd/control/probe"
)

var updateDocs = flag.Bool("update", false, "write docs/metrics.md anew")

// metric is what the daemon registers under a name.
type metric struct{ name, kind, labels, help string }

// registered lists everything that the daemon registers, by name.
func registered(t *testing.T) []metric {
	t.Helper()
	all := append(operator.New(operator.Config{}).Collectors(), newCounters().collectors()...)
	all = append(all, probe.NewCollector(nil), newWatches(nil))
	text := regexp.MustCompile(`fqName: "([^"]*)", help: "((?:[^"\\]|\\.)*)", (?:unit: "[^"]*", )?constLabels: {}, variableLabels: {([^}]*)}`)
	var out []metric
	for _, c := range all {
		descs := make(chan *prometheus.Desc, 256)
		c.Describe(descs)
		close(descs)
		for d := range descs {
			m := text.FindStringSubmatch(d.String())
			if m == nil {
				t.Fatalf("cannot read %s", d)
			}
			kind := "gauge"
			switch c.(type) {
			case *prometheus.HistogramVec, prometheus.Histogram:
				kind = "histogram"
			default:
				if strings.HasSuffix(m[1], "_total") {
					kind = "counter"
				}
			}
			out = append(out, metric{m[1], kind, strings.ReplaceAll(m[3], ",", ", "), m[2]})
		}
	}
	slices.SortFunc(out, func(a, b metric) int { return strings.Compare(a.name, b.name) })
	return out
}

// TestMetricsReference holds docs/metrics.md to what the daemon registers; with -update
// it writes the file.
func TestMetricsReference(t *testing.T) {
	const file = "../../docs/metrics.md"
	var b bytes.Buffer
	b.WriteString(`# Metrics

With ` + "`health.listen`" + ` set, ` + "`/metrics`" + ` serves these metrics, and those of the Go runtime and the process (` + "`go_*`, `process_*`" + `). Names and labels are
stable. The number of label values is bounded by pools, peers, kinds of objects and actions, never by workloads or prefixes. Alert rules and a
dashboard are in ` + "`configs/prometheus` and `configs/grafana`" + `; [alerts](operations/alerts.md) says what to do about each alert.

Generated from what the daemon registers (` + "`go test ./cmd/routerd -run TestMetricsReference -update`" + `).

| name | type | labels | meaning |
|---|---|---|---|
`)
	for _, m := range registered(t) {
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", m.name, m.kind, m.labels, m.help)
	}
	if *updateDocs {
		if err := os.WriteFile(file, b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), b.String()); diff != "" {
		t.Errorf("%s differs from what the daemon registers (-file +daemon):\n%s", file, diff)
	}
}

// TestAlertsAndDashboard: both use metrics that there are, each alert has its runbook,
// and Prometheus' own tool finds the rules right and has them fire as their tests say.
func TestAlertsAndDashboard(t *testing.T) {
	t.Parallel()
	const configs = "../../configs"
	have := map[string]bool{}
	for _, m := range registered(t) {
		have[m.name] = true
		if m.kind == "histogram" {
			have[m.name+"_bucket"], have[m.name+"_sum"], have[m.name+"_count"] = true, true, true
		}
	}
	read := func(path string) string {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	rules, dashboard := read(filepath.Join(configs, "prometheus/alerts.yml")), read(filepath.Join(configs, "grafana/routerd.json"))
	for name, text := range map[string]string{"alerts": rules, "dashboard": dashboard} {
		used := regexp.MustCompile(`\brouterd_[a-z0-9_]+`).FindAllString(text, -1)
		if len(used) < 10 {
			t.Errorf("%s: only %v", name, used)
		}
		for _, m := range used {
			if !have[m] {
				t.Errorf("%s: the daemon has no metric %s", name, m)
			}
		}
	}
	runbook := read("../../docs/operations/alerts.md")
	alerts := regexp.MustCompile(`(?m)- alert: (\w+)`).FindAllStringSubmatch(rules, -1)
	tests := read(filepath.Join(configs, "prometheus/alerts_test.yml"))
	for _, a := range alerts {
		if !strings.Contains(runbook, "\n## "+a[1]+"\n") {
			t.Errorf("docs/operations/alerts.md has no heading %s", a[1])
		}
		if !strings.Contains(rules, "docs/operations/alerts.md#"+strings.ToLower(a[1])+"\n") {
			t.Errorf("%s has no runbook_url", a[1])
		}
		if !strings.Contains(tests, "alertname: "+a[1]+"\n") {
			t.Errorf("no test has %s fire", a[1])
		}
	}
	if headings := strings.Count(runbook, "\n## "); headings != len(alerts) {
		t.Errorf("docs/operations/alerts.md has %d headings for %d alerts", headings, len(alerts))
	}
	for _, args := range [][]string{{"check", "rules", "alerts.yml"}, {"test", "rules", "alerts_test.yml"}} {
		cmd := exec.CommandContext(t.Context(), "promtool", args...)
		cmd.Dir = filepath.Join(configs, "prometheus")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
}
