package policy_test

import (
	"context"
	"encoding/json"
	"flag"
	"io"
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/control/policy"
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/store"
)

// cyclonus is the program .ci/cyclonus. It knows NetworkPolicy alone.
var cyclonus = flag.String("cyclonus", "", "ask the program at this path too what NetworkPolicies allow (make kubernetes does)") //nolint:gochecknoglobals // a flag

// asker asks another program.
type asker struct {
	in  *json.Encoder
	out *json.Decoder

	worlds, probes int
}

type askedPeer struct {
	Internal *askedPod
	IP       string
}

type askedPod struct {
	PodLabels, NamespaceLabels map[string]string
	Namespace                  string
}

type askedTraffic struct {
	Source, Destination askedPeer
	ResolvedPort        int
	ResolvedPortName    string
	Protocol            corev1.Protocol
}

func newAsker(t *testing.T, program string) *asker {
	t.Helper()
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), program) // it ends with its input
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = t.Output()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		_, _ = io.Copy(io.Discard, out)
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	})
	return &asker{in: json.NewEncoder(in), out: json.NewDecoder(out)}
}

// allowed asks of each packet whether it may pass at this host: what is said of pods on
// others is left out.
func (a *asker) allowed(t *rapid.T, k *kubernetes, packets []filter.Packet) (answers []bool) {
	q := struct {
		Policies []*networkingv1.NetworkPolicy
		Traffic  []askedTraffic
	}{}
	for _, np := range k.policies {
		if np = np.DeepCopy(); len(np.Spec.PolicyTypes) == 0 { // the API server writes the default
			np.Spec.PolicyTypes = []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}
			if len(np.Spec.Egress) > 0 {
				np.Spec.PolicyTypes = append(np.Spec.PolicyTypes, networkingv1.PolicyTypeEgress)
			}
		}
		q.Policies = append(q.Policies, np)
	}
	peer := func(addr netip.Addr) askedPeer {
		p := askedPeer{IP: addr.String()}
		if pod := k.pod(addr); pod != nil {
			p.Internal = &askedPod{pod.Labels, k.namespaces[pod.Namespace], pod.Namespace}
		}
		return p
	}
	for _, f := range packets {
		tr := askedTraffic{Source: peer(f.Src), Destination: peer(f.Dst), ResolvedPort: int(f.DstPort)}
		tr.Protocol = map[uint8]corev1.Protocol{6: corev1.ProtocolTCP, 17: corev1.ProtocolUDP, 132: corev1.ProtocolSCTP}[f.Protocol]
		if pod := k.pod(f.Dst); pod != nil {
			for _, port := range pod.Spec.Containers[0].Ports {
				if port.Protocol == tr.Protocol && int(port.ContainerPort) == tr.ResolvedPort {
					tr.ResolvedPortName = port.Name
				}
			}
		}
		q.Traffic = append(q.Traffic, tr)
	}
	var said []struct{ Ingress, Egress bool }
	if err := a.in.Encode(q); err != nil {
		t.Fatalf("%v", err)
	}
	if err := a.out.Decode(&said); err != nil || len(said) != len(packets) {
		t.Fatalf("%d answers to %d questions: %v", len(said), len(packets), err)
	}
	here := func(addr netip.Addr) bool { pod := k.pod(addr); return pod != nil && pod.Spec.NodeName == thisNode }
	for i, f := range packets {
		answers = append(answers, (said[i].Egress || !here(f.Src)) && (said[i].Ingress || !here(f.Dst)))
	}
	a.worlds++
	a.probes += len(packets)
	return answers
}

// allLabels returns the labels of all namespaces and pods.
func (k *kubernetes) allLabels() (out []map[string]string) {
	for _, labels := range k.namespaces {
		out = append(out, labels)
	}
	for _, p := range k.pods {
		out = append(out, p.Labels)
	}
	return out
}

// byAnother compares what is decided of connections by NetworkPolicies that went through the
// datastore with what the other program says of them.
func byAnother(t *testing.T, program string) {
	t.Helper()
	a := newAsker(t, program)
	rapid.Check(t, func(t *rapid.T) {
		k := drawKubernetes(t)
		k.cluster = nil
		if text := k.String(); strings.Contains(text, `"NotIn"`) || strings.Contains(text, `:""`) {
			// Cyclonus has NotIn match nobody who lacks the label, and an empty value match whoever does; to
			// Kubernetes it is the other way round (k8s.io/apimachinery/pkg/labels, Requirement.Matches).
			for _, labels := range k.allLabels() {
				for _, key := range []string{"a", "b"} {
					if _, has := labels[key]; !has {
						labels[key] = "w"
					}
				}
			}
		}
		c, mirror := newMirror(policy.Config{})
		c.Update(store.Batch{Events: events(k.objects(t)), Synced: true})
		step(t, c, mirror)
		var flows []filter.Flow
		var packets []filter.Packet
		k.flows(t, []uint8{6, 17, 132}, func(f filter.Flow) { flows, packets = append(flows, f), append(packets, f.Packet) })
		if len(packets) == 0 {
			return
		}
		for i, want := range a.allowed(t, k, packets) {
			if got := mirror.Judge(flows[i]); got.Allowed != want {
				t.Fatalf("%+v: allowed is %v, cyclonus says %v; %+v\n%s", packets[i], got.Allowed, want, got.Steps, k)
			}
		}
	})
	t.Logf("cyclonus agrees: %d worlds, %d connections", a.worlds, a.probes)
}
