package credentials_test

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/kube"
	"github.com/routerd/routerd/integration/kube/cluster"
	"github.com/routerd/routerd/store/kube/kubetest"
)

// tokenLife is the least that the API takes for a token of a pod, and renewed when a kubelet
// asks for the next one: at four fifths of it.
const (
	tokenLife = 10 * time.Minute
	renewed   = tokenLife * 4 / 5
)

// shortTokens has the daemons use tokens of that life, in place of those that the API server
// adds to every pod. The volume is as that of these, but for the life and its name.
var shortTokens = fmt.Sprintf(`{"spec":{"template":{"spec":{"automountServiceAccountToken":false,
"volumes":[{"name":"api","projected":{"sources":[
  {"serviceAccountToken":{"path":"token","expirationSeconds":%d}},
  {"configMap":{"name":"kube-root-ca.crt","items":[{"key":"ca.crt","path":"ca.crt"}]}},
  {"downwardAPI":{"items":[{"path":"namespace","fieldRef":{"fieldPath":"metadata.namespace"}}]}}]}}],
"containers":[{"name":"routerd","volumeMounts":[{"name":"api","mountPath":"/var/run/secrets/kubernetes.io/serviceaccount","readOnly":true}]}]}}}}`, int(tokenLife.Seconds()))

// credentials are what daemons and the API server know each other by.
type credentials struct {
	*churn
	c         *cluster.Cluster
	dir       string
	trust     kube.Trust
	authority *kubetest.Authority // of the server's certificate
	keys      int                 // that signed tokens so far
	away      []span              // when the server was
	tokens    map[string][]token  // of each node's daemon, in order
	looked    time.Time           // at those
}

// token is one of a service account.
type token struct {
	text string
	key  string // that signed it
	life time.Duration
}

func parseToken(text string) (tk token, err error) {
	parts := strings.Split(text, ".")
	if len(parts) != 3 {
		return tk, fmt.Errorf("no token: %q", text)
	}
	var head struct{ Kid string }
	var claims struct{ Exp, Iat int64 }
	for i, into := range []any{&head, &claims} {
		raw, err := base64.RawURLEncoding.DecodeString(parts[i])
		if err == nil {
			err = json.Unmarshal(raw, into)
		}
		if err != nil {
			return tk, err
		}
	}
	return token{text, head.Kid, time.Duration(claims.Exp-claims.Iat) * time.Second}, nil
}

func (r *credentials) file(name string, text []byte) string {
	r.t.Helper()
	file := filepath.Join(r.dir, name)
	if err := os.WriteFile(file, text, 0o600); err != nil {
		r.t.Fatal(err)
	}
	return file
}

// newAuthority makes another one for the server's certificates.
func newAuthority(t *testing.T, name string) *kubetest.Authority {
	t.Helper()
	a := kubetest.NewAuthority(t, name)
	for _, addr := range cluster.ServerAddrs() {
		a.Addrs = append(a.Addrs, net.IP(addr.AsSlice()))
	}
	return a
}

// certify has the server show another certificate at its next start.
func (r *credentials) certify() {
	r.t.Helper()
	cert, key := r.authority.Issue(time.Time{}, "kube-apiserver")
	r.trust.CertFile, r.trust.KeyFile = r.file("server.pem", cert), r.file("server-key.pem", key)
}

// restart starts the server again, with what it is to believe and to show. Pods are on their
// way when it goes.
func (r *credentials) restart() {
	r.t.Helper()
	for range r.c.Nodes {
		r.start()
	}
	from := time.Now()
	if err := r.c.Rotate(await.Context(r.t), r.trust); err != nil {
		r.t.Fatal(err)
	}
	r.away = append(r.away, span{from, time.Now()})
	r.due = time.Now()
	// The server believes nobody before it has read the rights.
	await.Until(r.t, "the API server answers", func() error {
		_, err := r.c.Do(r.t.Context(), http.MethodGet, podsPath, "", nil)
		return err
	})
}

// newKey has another key sign tokens. Those before it are believed.
func (r *credentials) newKey() {
	r.t.Helper()
	r.keys++
	file, err := r.c.NewAccountsKey(fmt.Sprintf("accounts-%d", r.keys))
	if err != nil {
		r.t.Fatal(err)
	}
	before := r.trust.AccountKeys
	if len(before) == 0 {
		before = []string{r.c.AccountsKey()}
	}
	r.trust.AccountKeys = append([]string{file}, before...)
	r.restart()
}

// onNode returns what a file of the daemon's volume says on a node.
func (r *credentials) onNode(n *cluster.Node, name string) (string, error) {
	return n.Output(r.t.Context(), "sh", "-c", "cat /var/lib/kubelet/pods/*/volumes/kubernetes.io~projected/api/"+name)
}

// look reads the tokens, every few seconds.
func (r *credentials) look() {
	r.t.Helper()
	if time.Since(r.looked) < 5*time.Second {
		return
	}
	r.looked = time.Now()
	for _, n := range r.c.Nodes {
		text, err := r.onNode(n, "token")
		if err != nil {
			r.t.Fatal(err)
		}
		l := r.tokens[n.Name]
		if len(l) > 0 && l[len(l)-1].text == text {
			continue
		}
		tk, err := parseToken(text)
		if err != nil {
			r.t.Fatal(err)
		}
		if tk.life != tokenLife {
			r.t.Fatalf("a token on %s lives %v, want %v", n.Name, tk.life, tokenLife)
		}
		r.tokens[n.Name] = append(l, tk)
	}
}

// renew waits until every daemon has a token that no earlier key signed: in time, or because
// kubelets, which know those that they asked for, are started again.
func (r *credentials) renew(inTime bool) {
	r.t.Helper()
	bound := 2 * renewed
	if !inTime {
		bound = await.Patience
		if err := r.c.RestartClients(await.Context(r.t)); err != nil {
			r.t.Fatal(err)
		}
	}
	was := map[string]string{} // the key of each
	for name, l := range r.tokens {
		was[name] = l[len(l)-1].key
	}
	r.until("tokens by the next key", bound, func() error {
		r.look()
		for name, l := range r.tokens {
			if l[len(l)-1].key == was[name] {
				return fmt.Errorf("%s has one of the last key", name)
			}
		}
		return nil
	})
}

// newAuthority has another authority sign the server's certificate, once all believe it.
func (r *credentials) newAuthority(name string) {
	r.t.Helper()
	next := newAuthority(r.t, name)
	r.file("ca.pem", slices.Concat(r.authority.PEM, next.PEM))
	if err := r.c.RestartClients(await.Context(r.t)); err != nil {
		r.t.Fatal(err)
	}
	r.until("every daemon is told of the next authority", await.Patience, func() error {
		for _, n := range r.c.Nodes {
			text, err := r.onNode(n, "ca.crt")
			if err == nil && !strings.Contains(text, string(next.PEM)) {
				err = errors.New("it is not")
			}
			if err != nil {
				return fmt.Errorf("%s: %w", n.Name, err)
			}
		}
		return nil
	})
	r.authority = next
	r.certify()
	r.restart()
	r.file("ca.pem", next.PEM)
}

// daemonPods names the daemons and how often each was started again.
func daemonPods(t *testing.T, c *cluster.Cluster) string {
	t.Helper()
	return kubectl(t, c, "-n", "kube-system", "get", "pods", "-l", "app.kubernetes.io/name=routerd", "--sort-by=.metadata.name",
		"-o", `jsonpath={range .items[*]}{.metadata.name} {.status.containerStatuses[0].restartCount}{"\n"}{end}`)
}

func kubectl(t *testing.T, c *cluster.Cluster, args ...string) string {
	t.Helper()
	out, err := c.Kubectl(context.WithoutCancel(t.Context()), "", args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// TestCredentials: pods come and go under real kubelets, for as long as -for says, while the
// daemons' tokens live ten minutes, the API server is started again and again, and the key that
// signs tokens, the server's certificate and who signed it are replaced. No ADD fails, also of
// pods that start while the server is away, and each daemon goes on telling the API of its
// pods, without a start of its own.
func TestCredentials(t *testing.T) {
	r := &credentials{dir: t.TempDir(), tokens: map[string][]token{}, authority: newAuthority(t, "authority-0")}
	r.churn = &churn{t: t, started: map[string]time.Time{}}
	r.certify()
	r.trust.CAFile = r.file("ca.pem", r.authority.PEM)
	world.Config.Trust = r.trust
	c := world.Up(t)
	r.c, r.churn.c = c, c

	kubectl(t, c, "-n", "kube-system", "patch", "daemonset", "routerd", "-p", shortTokens)
	kubectl(t, c, "-n", "kube-system", "rollout", "status", "daemonset/routerd", "--timeout=120s")
	for _, n := range c.Nodes {
		count(t, n)
	}
	daemons := daemonPods(t, c)
	r.until("every runtime uses the plugin that counts", await.Patience, func() error {
		for _, n := range c.Nodes {
			if len(executions(t, n)) == 0 {
				return fmt.Errorf("%s's does not", n.Name)
			}
		}
		return nil
	})

	begin := time.Now()
	defer func() { r.report(begin, daemons) }()
	pause := *lasts / 40
	stage := func(what string, do func()) {
		t.Helper()
		since := time.Now()
		do()
		r.more(2 * len(c.Nodes))
		r.until("a while", pause+await.Patience, func() error {
			if r.look(); time.Since(since) < pause {
				return errors.New("it is not over")
			}
			return nil
		})
		t.Logf("%6.0f s: %s; %d pods came and went", time.Since(begin).Seconds(), what, r.done)
	}
	stage("at first", func() {})
	for round := 1; round == 1 || time.Since(begin) < *lasts; round++ {
		for _, s := range []struct {
			what string
			do   func()
		}{
			{"the API server was started again", r.restart},
			{"another certificate of the server's", func() { r.certify(); r.restart() }},
			{"another authority", func() { r.newAuthority(fmt.Sprintf("authority-%d", round)) }},
			{"another key signs", r.newKey},
			{"all tokens are by it", func() { r.renew(*lasts > 0) }},
			{"the key before is believed no more", func() {
				r.trust.AccountKeys = r.trust.AccountKeys[:1]
				r.restart()
			}},
		} {
			if round == 1 || time.Since(begin) < *lasts {
				stage(s.what, s.do)
			}
		}
	}
	r.end()
}

// report fails the test for each execution of the plugin that failed, and says how many there were, also if the
// test has failed for another reason.
func (r *credentials) report(begin time.Time, daemons string) {
	t, c := r.t, r.c
	t.Helper()
	took := time.Since(begin)

	var away time.Duration
	for _, s := range r.away {
		away += s.to.Sub(s.from)
	}
	t.Logf("in %v %d pods came and went; the API server was started %d times and away for %v", took.Round(time.Second), r.done, len(r.away), away.Round(time.Second))
	for _, n := range c.Nodes {
		commands, failed, while := map[string]int{}, 0, 0
		var adds []time.Duration
		for _, e := range executions(t, n) {
			commands[e.command]++
			if e.code != 0 {
				failed++
				t.Errorf("%s: %s of %s failed at %v: %s", n.Name, e.command, e.pod, e.begin, e.said)
			}
			if e.command == "ADD" {
				adds = append(adds, e.end.Sub(e.begin))
				if slices.ContainsFunc(r.away, func(s span) bool { return s.overlaps(e) }) {
					while++
				}
			}
		}
		if len(adds) == 0 {
			t.Errorf("%s: no ADD was executed", n.Name)
			continue
		}
		slices.Sort(adds)
		if while == 0 {
			t.Errorf("%s: no ADD while the API server was away", n.Name)
		}
		t.Logf("%s: %v, %d failed; %d ADDs while the API server was away; ADD p50 %v, p99 %v; %d tokens of %v", n.Name, commands, failed, while,
			adds[len(adds)/2].Round(time.Millisecond), adds[len(adds)*99/100].Round(time.Millisecond), len(r.tokens[n.Name]), tokenLife)
		if want := int(took / tokenLife); len(r.tokens[n.Name]) < max(2, want) {
			t.Errorf("%s had %d tokens", n.Name, len(r.tokens[n.Name]))
		}
	}
	if now := daemonPods(t, c); now != daemons {
		t.Errorf("the daemons are\n%sand were\n%s", now, daemons)
	}
	if out := kubectl(t, c, "get", "events", "--field-selector=reason=FailedCreatePodSandBox", "-o", `jsonpath={range .items[*]}{.involvedObject.name} {.message}{"\n"}{end}`); out != "" {
		t.Errorf("pods that did not start:\n%s", out)
	}
	told(t, c)
}

// told fails the test for each error in a daemon's log, and reports its warnings.
func told(t *testing.T, c *cluster.Cluster) {
	t.Helper()
	for line := range strings.Lines(daemonPods(t, c)) {
		name := strings.Fields(line)[0]
		warnings := map[string]int{}
		for line := range strings.Lines(kubectl(t, c, "-n", "kube-system", "logs", name)) {
			switch {
			case strings.Contains(line, "level=ERROR"):
				t.Errorf("%s: %s", name, line)
			case strings.Contains(line, "level=WARN"):
				_, message, _ := strings.Cut(line, "msg=")
				warnings[message[:min(len(message), 60)]]++
			}
		}
		t.Logf("%s warned:", name)
		for _, message := range slices.Sorted(maps.Keys(warnings)) {
			t.Logf("  %4d %s", warnings[message], message)
		}
	}
}
