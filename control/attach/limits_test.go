package attach

import (
	"bytes"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/routerd/routerd/store"
)

func TestCheckLimits(t *testing.T) {
	t.Parallel()
	const qos = store.AnnotationPrefixQoS
	for _, tc := range []struct {
		name        string
		annotations map[string]string
		names       []string
		err         string // a part of it
	}{
		{name: "none", annotations: map[string]string{"cni.projectcalico.org/ipAddrs": "[]"}},
		{
			name: "every one of a direction",
			annotations: map[string]string{
				qos + "egressBandwidth": "1M", qos + "egressBurst": "2M", qos + "egressPeakrate": "3M", qos + "egressMinburst": "1500",
				qos + "egressPacketRate": "10k", qos + "egressPacketBurst": "5", qos + "egressMaxConnections": "4294967295", qos + "dscp": "AF11",
			},
			names: []string{
				qos + "dscp", qos + "egressBandwidth", qos + "egressBurst", qos + "egressMaxConnections",
				qos + "egressMinburst", qos + "egressPacketBurst", qos + "egressPacketRate", qos + "egressPeakrate",
			},
		},
		{
			name:        "Kubernetes' own",
			annotations: map[string]string{store.AnnotationIngressBandwidth: "1Gi", qos + "ingressBurst": "1k"},
			names:       []string{store.AnnotationIngressBandwidth, qos + "ingressBurst"},
		},
		{name: "no number", annotations: map[string]string{store.AnnotationEgressBandwidth: ""}, err: `kubernetes.io/egress-bandwidth: "": want bits per second from 1k to 1P`},
		{name: "too little", annotations: map[string]string{qos + "ingressBandwidth": "999"}, err: "want bits per second from 1k"},
		{name: "too much", annotations: map[string]string{qos + "ingressPacketRate": "10001"}, err: "want packets per second from 1 to 10k"},
		{name: "a fraction of a connection", annotations: map[string]string{qos + "ingressMaxConnections": "500m"}, err: "want connections from 1"},
		{name: "a burst alone", annotations: map[string]string{qos + "ingressBurst": "1M", qos + "egressBandwidth": "1M"}, err: "means nothing without qos.projectcalico.org/ingressBandwidth"},
		{name: "a peak below the rate", annotations: map[string]string{qos + "egressBandwidth": "1M", qos + "egressPeakrate": "1M"}, err: "want more than qos.projectcalico.org/egressBandwidth, which is 1000000"},
		{name: "a mistyped name", annotations: map[string]string{qos + "ingressBandwith": "1M"}, err: "no such limit is known"},
		{name: "no direction", annotations: map[string]string{qos + "Bandwidth": "1M"}, err: "no such limit is known"},
		{name: "DSCP", annotations: map[string]string{qos + "dscp": "64"}, err: "want a number from 0 to 63"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			names, err := checkLimits(tc.annotations)
			if !slices.Equal(names, tc.names) || (err != nil) != (tc.err != "") || err != nil && !strings.Contains(err.Error(), tc.err) {
				t.Errorf("got %q, %v; want %q, %q", names, err, tc.names, tc.err)
			}
		})
	}
}

// TestLimitsAreSaid: that a pod's limits are not carried out is said once for each
// change of them.
func TestLimitsAreSaid(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	p := newPods(true, "node-a", nil, slog.New(slog.NewTextHandler(&out, nil)))
	for _, step := range []struct {
		annotations map[string]string
		want        string // empty: nothing is said
	}{
		{nil, ""},
		{map[string]string{store.AnnotationIngressBandwidth: "1M"}, "not carried out"},
		{map[string]string{store.AnnotationIngressBandwidth: "1M", "cni.projectcalico.org/x": "y"}, ""},
		{map[string]string{store.AnnotationIngressBandwidth: "x"}, "make no sense"},
		{map[string]string{store.AnnotationIngressBandwidth: "1M"}, "not carried out"},
	} {
		out.Reset()
		p.handle(told(t, kubePod("u1", step.annotations)))
		if got := out.String(); !strings.Contains(got, step.want) || step.want == "" && got != "" {
			t.Errorf("with %v: %q, want %q", step.annotations, got, step.want)
		}
	}
}
