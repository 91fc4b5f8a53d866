package scenarios

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/guides"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/store"
)

// byHand are the blocks of commands in the guides that are not run here, by document and the beginning of the first command, and
// why. Their fences have that word behind the language, where a reader does not see it.
func byHand() map[string]string {
	return map[string]string{
		"guides/dual-stack.md: routerctl lab up":                                  "brings a lab up: cmd/routerctl/labcmd",
		"guides/from-calico.md: ":                                                 "wants a host that Calico had: TestTakeoverFromCalico, which runs those of clean-up and of the way back as they stand there",
		"guides/from-flannel.md: ":                                                "wants a host that flannel had: TestMoveFromOtherNetworks, which runs those on the node after the last one moved as they stand there",
		"guides/getting-started.md: routerd join":                                 "the lab's hosts have joined by it",
		"guides/getting-started.md: etcd":                                         "another program, which does not end",
		"guides/kubernetes.md: echo '{apiVersion: v1, kind: Node":                 "wants Kubernetes: integration/kube TestHostWithoutKubernetes",
		"guides/kubernetes.md: make image":                                        "wants Kubernetes: integration/kube/cluster",
		"guides/kubernetes.md: kubectl label nodes":                               "wants Kubernetes: integration/kube/cluster TestHostServiceBecomesDaemonSet",
		"guides/kubernetes.md: ssh node1 systemctl disable":                       "the same",
		"guides/kubernetes.md: kubectl drain":                                     "wants Kubernetes: integration/kube/cluster TestCleanup",
		"guides/kubernetes.md: routerctl datastore lock":                          "wants Kubernetes: integration/kube TestMove",
		"guides/kubernetes.md: export DATASTORE_TYPE=kubernetes KUBECONFIG":       "the same",
		"guides/kubernetes.md: kubectl -n kube-system create":                     "wants Kubernetes: integration/kube TestFollowSecret",
		"guides/kubernetes.md: ln -s routerctl":                                   "wants Kubernetes: integration/kube TestKubectlPlugin",
		"guides/members.md: routerctl cluster remove":                             "wants a member that died: TestMembers",
		"guides/members.md: routerctl cluster snapshot":                           "wants a daemon that is stopped: TestMembers",
		"operations/backup.md: systemctl stop":                                    "the same",
		"operations/backup.md: routerctl datastore lock":                          "wants a second datastore: cmd/routerctl, datastore.txtar",
		"operations/cleanup.md: systemctl disable --now routerd":                  "takes the host's network away: control/cleanup",
		"operations/cleanup.md: systemctl disable --now calico":                   "wants what Calico left: the same",
		"operations/packages.md: ssh-keygen":                                      "wants packages: integration/packages",
		"operations/packages.md: dpkg -i routerd_1.2.3":                           "the same",
		"operations/packages.md: dpkg -i routerd_1.2.4":                           "the same",
		"operations/packages.md: routerd cleanup":                                 "the same",
		"operations/trace.md: routerctl trace --from default/client --to service": "wants Services of Kubernetes: integration/kube TestServices",
		"operations/trace.md: routerctl trace --from other/client":                "the same: integration/kube TestEtcd",
		"operations/troubleshoot.md: curl":                                        "half a minute, and a compiler",
	}
}

// guideSetups are what the commands of a document find, as shell commands before them.
func guideSetups() map[string]string {
	const policy = `{apiVersion: projectcalico.org/v3, kind: %sGlobalNetworkPolicy, metadata: {name: %s}, spec: {selector: "none == \"x\"", ingress: [{action: Allow}]}}`
	return map[string]string{
		"guides/bgp.md": `echo $$ >/run/keepalived.pid`,
		// The daemon does not see a namespace that was mounted aside: a process in it leads there.
		"guides/getting-started.md": `within() { ip netns exec $1 sleep 600 >/dev/null 2>&1 & echo $! >pid; until [ $(readlink /proc/$!/ns/net) != $(readlink /proc/self/ns/net) ]; do :; done; echo /proc/$!/ns/net; }; trap 'kill $(cat pid)' EXIT`,
		"guides/policy.md":          fmt.Sprintf("echo '"+policy+"' >policy.yaml; echo '"+policy+"' >staged.yaml", "", "p", "Staged", "s"),
		"operations/change.md":      fmt.Sprintf("echo '"+policy+"' | routerctl apply -f - >/dev/null; echo '"+policy+"' >change.yaml; id() { routerctl history | awk 'NR==3 {print $1}'; }", "", "before", "", "changed"),
	}
}

// guideCodes are the commands of the guides that are to end with another exit code than 0, by their beginnings, and why.
func guideCodes() map[string]int {
	return map[string]int{
		"routerctl ipam release --ip": 1, // it is in use, and so refused
	}
}

// TestGuides runs the commands of docs/guides and docs/operations as they stand there, but for the names and addresses of hosts
// and workloads, on a lab whose daemon is where the commands look for it. What they write into the host's directories is a copy's.
func TestGuides(t *testing.T) {
	beside(t)
	top := topology(3, 1, store.VXLANCrossSubnet)
	top.Join = true
	top.Nodes[0].Config = map[string]any{"ui": map[string]any{"listen": "127.0.0.1:7749"}}
	l := bringUp(t, "guides", top)
	names := strings.NewReplacer(
		"host11", "node1", "host12", "node2", "host13", "node3", "10.1.0.13", "10.2.0.11", "/tmp/", "./", "CNI_NETNS=/run/netns/pod1", "CNI_NETNS=$(within pod1)", "0mjwaid1k", `"$(id)"`,
		"default/client", addr(t, l, "node1/pod1").String(), "default/web-0", addr(t, l, "node3/pod1").String(), "default/web ", addr(t, l, "node2/pod1").String()+" ",
		"192.168.166.128", addr(t, l, "node1/pod1").String(), "192.168.135.1", addr(t, l, "node3/pod1").String(), "192.168.12.5", addr(t, l, "node2/pod1").String(),
		"ns1/web-0", addr(t, l, "node1/pod1").String(), "ns1/a", addr(t, l, "node1/pod1").String(), "ns1/b", addr(t, l, "node2/pod1").String(),
	)
	var docs []string
	for _, dir := range []string{"guides", "operations"} {
		list, err := filepath.Glob(filepath.Join("..", "..", "docs", dir, "*.md"))
		if err != nil || len(list) == 0 {
			t.Fatalf("documents of %s: %d, %v", dir, len(list), err)
		}
		docs = append(docs, list...)
	}
	unseen, codes := byHand(), guideCodes()
	for _, path := range docs {
		doc := filepath.Base(filepath.Dir(path)) + "/" + filepath.Base(path)
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		script := guideSetups()[doc] + "\n"
		n := 0
		for _, b := range guides.Blocks(t, doc, string(text)) {
			known := ""
			for begin := range byHand() {
				if strings.HasPrefix(b.Name, begin) {
					known = begin
					delete(unseen, begin)
				}
			}
			if b.ByHand != (known != "") {
				t.Errorf("%s: its fence says by-hand: %t, and byHand has it: %t", b.Name, b.ByHand, known != "")
			}
			if b.ByHand {
				continue
			}
			for _, c := range b.Commands {
				code := 0
				for begin := range codes {
					if strings.HasPrefix(c, begin) {
						code = codes[begin]
					}
				}
				c = names.Replace(c)
				script += fmt.Sprintf("{ %s\n} >out 2>&1 </dev/null; r=$?; [ $r = %d ] || { echo; echo \"exit code $r, want %[2]d:\" '%s'; cat out; }\n", c, code, strings.ReplaceAll(c, "'", `'\''`))
				n++
			}
		}
		if n == 0 {
			continue
		}
		t.Run(doc, func(t *testing.T) { runGuide(t, l, script) })
	}
	if len(unseen) > 0 {
		t.Errorf("the documents do not have %q", slices.Sorted(maps.Keys(unseen)))
	}
}

// aside is what goes before a script, in a mount namespace of its own: a copy of what the commands write to, the lab's host where
// they look for it, and in place of programs that are not for this what does nothing.
const aside = `set -e
mount -t tmpfs tmpfs /mnt
mkdir -p /mnt/bin /mnt/etc/cni /mnt/opt/cni /mnt/root /mnt/var/backups /mnt/work /mnt/programs /mnt/run/netns /mnt/run/routerd
mount --bind "$1" /mnt/programs
mount --bind "$2" /mnt/run/routerd
mkdir -p "/mnt$2"
mount --bind "$2" "/mnt$2"
for f in alternatives group iproute2 nsswitch.conf passwd; do [ ! -e /etc/$f ] || cp -a /etc/$f /mnt/etc/; done
for d in etc opt root run var; do mount --rbind /mnt/$d /$d; done
for p in make systemctl journalctl ssh; do printf '#!/bin/sh\n' >/mnt/bin/$p; chmod +x /mnt/bin/$p; done
export PATH=/mnt/bin:/mnt/programs:$PATH TZ=UTC
cd /mnt/work
set +e
`

func runGuide(t *testing.T, l *lab.Lab, script string) {
	t.Helper()
	bin, err := filepath.Abs(binDir(t))
	if err != nil {
		t.Fatal(err)
	}
	out, err := l.Output(await.Context(t), "node1", "unshare", "--mount", "--propagation", "private", "bash", "-c", aside+script, "bash", bin, filepath.Dir(lab.Socket(l.Name(), "node1")))
	if err != nil {
		t.Fatal(err)
	}
	if out != "" {
		t.Error(out)
	}
}
