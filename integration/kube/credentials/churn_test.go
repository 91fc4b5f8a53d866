package credentials_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/kube/cluster"
)

const (
	podsPath  = "/api/v1/namespaces/default/pods"
	mostPods  = 6 // that start at a time
	lookEvery = 250 * time.Millisecond
)

// counted is a plugin that executes the one whose name its own has at the end, and writes down
// what became of it: the command, the exit code, from when to when in nanoseconds, whose it
// was, and what it said if it failed.
const counted = `#!/bin/sh
type=${0##*/counted-}
in=$(sed "s/counted-$type/$type/")
begin=$(date +%s%N)
out=$(printf %s "$in" | "/opt/cni/bin/$type")
code=$?
said=
[ $code = 0 ] || said=$(printf %s "$out" | tr '\n' ' ')
echo "$CNI_COMMAND $code $begin $(date +%s%N) $CNI_ARGS $said" >>/var/lib/counted
printf %s "$out"
exit $code
`

// count has a node's runtime execute routerd's plugin by [counted].
func count(t *testing.T, n *cluster.Node) {
	t.Helper()
	must := func(stdin string, args ...string) []byte {
		t.Helper()
		cmd := n.Command(t.Context(), args...)
		cmd.Stdin = strings.NewReader(stdin)
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%v on %s: %v", args, n.Name, err)
		}
		return out
	}
	var list map[string]any
	if err := json.Unmarshal(must("", "cat", "/etc/cni/net.d/10-routerd.conflist"), &list); err != nil {
		t.Fatal(err)
	}
	first := list["plugins"].([]any)[0].(map[string]any)
	name := "counted-" + first["type"].(string)
	first["type"] = name
	raw, err := json.Marshal(list)
	if err != nil {
		t.Fatal(err)
	}
	must(counted, "sh", "-c", "cat >/opt/cni/bin/"+name+" && chmod 755 /opt/cni/bin/"+name)
	must(string(raw), "sh", "-c", "cat >/etc/cni/net.d/counted.new && mv /etc/cni/net.d/counted.new /etc/cni/net.d/00-counted.conflist")
}

// execution is one of the plugin.
type execution struct {
	command, pod, said string
	code               int
	begin, end         time.Time
}

// executions lists those of a node.
func executions(t *testing.T, n *cluster.Node) (list []execution) {
	t.Helper()
	out, err := n.Output(t.Context(), "sh", "-c", "touch /var/lib/counted; cat /var/lib/counted")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(out) {
		f := strings.SplitN(strings.TrimSpace(line), " ", 6)
		if len(f) < 5 {
			t.Fatalf("%s: %q", n.Name, line)
		}
		number := func(s string) int64 {
			v, err := strconv.ParseInt(s, 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			return v
		}
		e := execution{command: f[0], code: int(number(f[1])), begin: time.Unix(0, number(f[2])), end: time.Unix(0, number(f[3]))}
		if _, pod, found := strings.Cut(f[4], "K8S_POD_NAME="); found {
			e.pod, _, _ = strings.Cut(pod, ";")
		}
		if len(f) == 6 {
			e.said = f[5]
		}
		list = append(list, e)
	}
	return list
}

// span is from when to when something was so.
type span struct{ from, to time.Time }

func (s span) overlaps(e execution) bool { return e.begin.Before(s.to) && e.end.After(s.from) }

// churn has pods come and go: one is started in turn on each node every so often, and ended
// when it is ready and the daemon has written its addresses to it.
type churn struct {
	t       *testing.T
	c       *cluster.Cluster
	due     time.Time
	started map[string]time.Time // those that run
	next    int
	done    int
}

type pod struct {
	Metadata struct {
		Name              string
		Annotations       map[string]string
		DeletionTimestamp *time.Time
	}
	Status struct {
		Conditions []struct{ Type, Status string }
	}
}

// ready reports whether it runs and its daemon was able to say so.
func (p pod) ready() bool {
	return p.Metadata.Annotations["cni.projectcalico.org/podIPs"] != "" &&
		slices.ContainsFunc(p.Status.Conditions, func(c struct{ Type, Status string }) bool { return c.Type == "Ready" && c.Status == "True" })
}

// do makes a request, again and again while the server is too busy to answer, as kubelets do.
func (p *churn) do(method, path, body string) (out []byte) {
	p.t.Helper()
	await.Until(p.t, method+" "+path, func() (err error) {
		out, err = p.c.Do(p.t.Context(), method, path, "application/json", []byte(body))
		if err != nil && (method == http.MethodPost && strings.Contains(err.Error(), "AlreadyExists") || method == http.MethodDelete && strings.Contains(err.Error(), "NotFound")) {
			return nil // the request before did it
		}
		return err
	})
	return out
}

// start starts a pod.
func (p *churn) start() {
	p.t.Helper()
	name := fmt.Sprintf("p%d", p.next)
	node := p.c.Nodes[p.next%len(p.c.Nodes)].Name
	p.next++
	p.do(http.MethodPost, podsPath, fmt.Sprintf(`{"apiVersion":"v1","kind":"Pod","metadata":{"name":%q,"labels":{"app":"come-and-go"}},"spec":{"nodeName":%q,"terminationGracePeriodSeconds":1,`+
		`"automountServiceAccountToken":false,"containers":[{"name":"c","image":%q,"args":["pause"]}]}}`, name, node, cluster.AgnhostImage))
	p.started[name] = time.Now()
}

// step starts what is due and ends what is ready.
func (p *churn) step(starts bool) {
	p.t.Helper()
	if now := time.Now(); starts && !now.Before(p.due) && len(p.started) < mostPods {
		p.start()
		p.due = now.Add(*every)
	}
	var list struct{ Items []pod }
	if err := json.Unmarshal(p.do(http.MethodGet, podsPath+"?labelSelector=app%3Dcome-and-go", ""), &list); err != nil {
		p.t.Fatal(err)
	}
	there := map[string]bool{}
	for _, item := range list.Items {
		name := item.Metadata.Name
		there[name] = true
		if item.ready() && item.Metadata.DeletionTimestamp == nil {
			p.do(http.MethodDelete, podsPath+"/"+name, "")
		}
		if took := time.Since(p.started[name]); took > await.Patience {
			p.t.Fatalf("%s came and went not within %v: %+v", name, took, item)
		}
	}
	for name := range p.started {
		if !there[name] {
			delete(p.started, name)
			p.done++
		}
	}
}

// until has pods come and go until check returns nil.
func (p *churn) until(what string, bound time.Duration, check func() error) {
	p.t.Helper()
	for begin := time.Now(); ; {
		p.step(true)
		err := check()
		if err == nil {
			return
		}
		if time.Since(begin) > bound {
			p.t.Fatalf("%s: not within %v: %v", what, bound, err)
		}
		<-time.After(lookEvery)
	}
}

// more has n pods more come and go.
func (p *churn) more(n int) {
	p.t.Helper()
	to := p.done + n
	p.until("pods come and go", await.Patience, func() error {
		if p.done < to {
			return fmt.Errorf("%d are to be", to-p.done)
		}
		return nil
	})
}

// end ends all.
func (p *churn) end() {
	p.t.Helper()
	await.Until(p.t, "all pods have gone", func() error {
		p.step(false)
		if len(p.started) > 0 {
			return fmt.Errorf("%d are there", len(p.started))
		}
		return nil
	})
}
