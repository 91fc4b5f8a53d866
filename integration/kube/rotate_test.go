package kube_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/kube"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/store/kube/convert"
	"github.com/routerd/routerd/store/kube/kubetest"
)

var (
	rotateFor   = flag.Duration("rotate-for", 0, "how long pods start and end at least in TestCredentialsRotated; 0: until each credential was replaced once")
	rotateEvery = flag.Duration("rotate-every", 500*time.Millisecond, "how often a pod starts on a host of TestCredentialsRotated") // what a small machine carries beside the rest
)

// tokenLife is the least that the API takes, and tokenUse for how long a kubelet lets a
// token of that life be used: four fifths.
const tokenLife, tokenUse = 10 * time.Minute, 8 * time.Minute

// rotation is two hosts whose credentials for the API change while pods start and end there:
// the first shows a token of routerd's account, the second a client certificate.
type rotation struct {
	*cluster
	dirs    map[string]string // of each host's kubeconfig and what that names
	trust   kube.Trust
	clients *kubetest.Authority
	uids    map[string]string // of the pods that start and end, by host and name
	adds    atomic.Int64
}

func (r *rotation) write(dir, name string, text []byte) string {
	r.t.Helper()
	file := filepath.Join(dir, name)
	if err := os.WriteFile(file, text, 0o600); err != nil {
		r.t.Fatal(err)
	}
	return file
}

// serve has a server's certificate of an authority at the server's next start, and tells the
// hosts the authority, in one file that they share as a pod's.
func (r *rotation) serve(by *kubetest.Authority) {
	cert, key := by.Issue(time.Time{}, "kube-apiserver")
	dir := r.dirs["server"]
	r.trust.CertFile, r.trust.KeyFile = r.write(dir, "server.pem", cert), r.write(dir, "server-key.pem", key)
	r.trust.CAFile = r.write(dir, "ca.pem", by.PEM)
}

// identify gives a host what it shows to the server.
func (r *rotation) identify(host string) {
	dir := r.dirs[host]
	if host == "node1" {
		r.write(dir, "token", []byte(tokenFor(r.t, host, tokenLife)))
		return
	}
	cert, key := r.clients.Issue(time.Time{}, host, "system:masters")
	r.write(dir, "cert.pem", cert)
	r.write(dir, "key.pem", key)
}

// rotate starts the server again with what it is to believe and to show.
func (r *rotation) rotate() {
	r.t.Helper()
	if err := server.Rotate(await.Context(r.t), r.trust); err != nil {
		r.t.Fatal(err)
	}
}

// churn starts and ends pods on a host until ctx ends. None may fail.
func (r *rotation) churn(ctx context.Context, host string) {
	tick := time.NewTicker(*rotateEvery)
	defer tick.Stop()
	for n := 0; ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		where := fmt.Sprintf("%s/p%d-%s", host, n%3, host)
		if _, err := r.AttachKubePod(r.t.Context(), where, "default", r.uids[where]); err != nil {
			r.t.Errorf("ADD number %d, of %s: %v", r.adds.Load(), where, err)
			return
		}
		r.adds.Add(1)
		if err := r.DetachPod(r.t.Context(), where); err != nil {
			r.t.Errorf("DEL of %s: %v", where, err)
			return
		}
	}
}

// more returns when some pods more were started.
func (r *rotation) more(n int64) {
	r.t.Helper()
	from := r.adds.Load()
	await.Until(r.t, "pods start", func() error {
		if now := r.adds.Load(); now < from+n && !r.t.Failed() {
			return fmt.Errorf("%d of %d", now-from, n)
		}
		return nil
	})
}

// use has the credentials be used for as long as a kubelet lets a token be.
func (r *rotation) use() {
	r.t.Helper()
	for end := time.Now().Add(tokenUse); time.Now().Before(end); {
		r.more(1)
	}
	r.identify("node1")
	r.identify("node2")
}

// round replaces each credential once.
func (r *rotation) round(n int, works func(what string)) {
	t := r.t
	t.Helper()
	for range 5 {
		r.identify("node1")
		r.identify("node2")
		r.more(2)
	}
	works("other tokens and certificates")

	key := func(name string) string {
		t.Helper()
		file, err := server.NewAccountsKey(fmt.Sprintf("%s-%d", name, n))
		if err != nil {
			t.Fatal(err)
		}
		return file
	}
	before := append(slices.Clone(r.trust.AccountKeys), server.AccountsKey())[:1]
	second := key("second")
	r.trust.AccountKeys = append([]string{second}, before...)
	r.rotate()
	r.more(2)
	r.identify("node1")
	works("a second key")
	r.trust.AccountKeys = []string{second}
	r.rotate()
	works("without the first key")

	r.trust.AccountKeys = []string{key("third")}
	told := func() int {
		return strings.Count(r.LogTail("node1", 16<<20), "the token in "+filepath.Join(r.dirs["node1"], "token")+" is refused")
	}
	was := told()
	r.rotate()
	await.Until(t, "the first host's token is refused", func() error {
		if told() == was {
			return errors.New("the log does not say so")
		}
		return nil
	})
	r.more(6)
	r.identify("node1")
	works("a key before its token")

	r.serve(kubetest.NewAuthority(t, "second"))
	r.rotate()
	works("another authority")

	r.clients = kubetest.NewAuthority(t, "other clients")
	r.write(r.dirs["server"], "clients.pem", r.clients.PEM)
	r.identify("node2")
	r.rotate()
	works("other clients")
}

// TestCredentialsRotated: pods start and end on two hosts without one failure while tokens, the
// key that signs them, the server's certificate and who signed it, and the client certificates
// and who signed these become others, one after the other, and what was good before is refused
// at once; for the key also before the host has its new token. Afterwards each host is told of
// new pods, and tells the API of them. What the daemons log of it is bounded. With -rotate-for
// all that is done again and again, and between two rounds a token is used for as long as a
// kubelet lets it be.
func TestCredentialsRotated(t *testing.T) {
	open(t, convert.V3)
	r := &rotation{dirs: map[string]string{"server": t.TempDir()}, clients: kubetest.NewAuthority(t, "clients"), uids: map[string]string{}}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), await.Patience)
		defer cancel()
		if err := server.Rotate(ctx, kube.Trust{}); err != nil {
			t.Error(err)
		}
	})
	r.cluster = &cluster{t: t}
	r.serve(kubetest.NewAuthority(t, "first"))
	r.trust.ClientCAFile = r.write(r.dirs["server"], "clients.pem", r.clients.PEM)
	r.rotate()
	install(t)

	pods, hosts := 0, []string{"node1", "node2"}
	top := lab.DefaultTopology(len(hosts))
	top.Pods, top.APIGroup = &pods, string(convert.V3)
	var err error
	if top.Kubeconfig, err = server.Kubeconfig("", kube.Token); err != nil {
		t.Fatal(err)
	}
	users := map[string]string{"node1": "tokenFile: token", "node2": "client-certificate: cert.pem, client-key: key.pem"}
	next := 0
	r.cluster = bringUpWith(t, "r", top, nil, func(string) map[string]any {
		host := hosts[next]
		next++
		r.dirs[host] = t.TempDir()
		r.identify(host)
		text := strings.Replace(server.KubeconfigText("", "-"), `token: "-"`, users[host], 1)
		return map[string]any{
			"address":   map[string]any{"ipv4": "kubernetes-internal-ip", "ipv6": "kubernetes-internal-ip"},
			"datastore": map[string]any{"kubernetes": map[string]any{"kubeconfig": r.write(r.dirs[host], "config", []byte(text)), "apiGroup": convert.V3.APIVersion()}},
		}
	})
	for _, host := range hosts {
		for i := range 3 {
			where := fmt.Sprintf("%s/p%d-%[1]s", host, i)
			p := r.run(where)
			r.uids[where] = r.pod(p.Name).Metadata.UID
			if err := r.DetachPod(t.Context(), where); err != nil {
				t.Fatal(err)
			}
		}
	}
	ctx, stop := context.WithCancel(t.Context())
	var churning sync.WaitGroup
	defer churning.Wait()
	defer stop()
	for _, host := range hosts {
		churning.Go(func() { r.churn(ctx, host) })
	}
	stage := 0
	works := func(what string) {
		t.Helper()
		r.more(6)
		for _, host := range hosts {
			stage++
			name := fmt.Sprintf("new%d", stage)
			p := r.run(host + "/" + name)
			await.Until(t, what+": the API is told by "+host, func() error {
				if got := r.pod(name).Metadata.Annotations["cni.projectcalico.org/podIPs"]; got != p.Addrs[0].String()+"/32" {
					return fmt.Errorf("podIPs %q", got)
				}
				return nil
			})
		}
		t.Logf("%s: %d ADDs so far", what, r.adds.Load())
	}
	works("at first")
	begin, rounds := time.Now(), 0
	for rounds == 0 || time.Since(begin) < *rotateFor {
		if rounds++; rounds > 1 {
			r.use()
			works("a token at its end")
		}
		r.round(rounds, works)
	}
	stop()
	churning.Wait()
	t.Logf("%d ADDs in %v and %d rounds", r.adds.Load(), time.Since(begin).Round(time.Second), rounds)
	const perRound, most = 6, 5 // starts of the server; lines for each
	starts := rounds * perRound
	for _, host := range hosts {
		var warnings []string
		for line := range strings.Lines(r.LogTail(host, 16<<20)) {
			switch {
			case strings.Contains(line, "level=ERROR"):
				t.Errorf("%s: %s", host, line)
			case strings.Contains(line, "level=WARN"):
				warnings = append(warnings, line)
			}
		}
		if len(warnings) > starts*most {
			t.Errorf("%s warned %d times:\n%s", host, len(warnings), strings.Join(warnings, ""))
		}
		t.Logf("%s warned %d times", host, len(warnings))
	}
}
