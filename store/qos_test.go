package store

import (
	"strings"
	"testing"
)

func TestQoSOf(t *testing.T) {
	t.Parallel()
	const qos = AnnotationPrefixQoS
	for _, tc := range []struct {
		name        string
		annotations map[string]string
		want        string // JSON
		err         string // a part of it
	}{
		{name: "none", annotations: map[string]string{"cni.projectcalico.org/ipAddrs": "[]"}},
		{
			name: "every one of a direction",
			annotations: map[string]string{
				qos + "egressBandwidth": "1M", qos + "egressBurst": "2M", qos + "egressPeakrate": "3M", qos + "egressMinburst": "1500",
				qos + "egressPacketRate": "10k", qos + "egressPacketBurst": "5", qos + "egressMaxConnections": "4294967295", qos + "dscp": "AF11",
			},
			want: `{"dscp":"AF11","egressBandwidth":1000000,"egressBurst":2000000,"egressMaxConnections":4294967295,"egressMinburst":1500,"egressPacketBurst":5,"egressPacketRate":10000,"egressPeakrate":3000000}`,
		},
		{
			name:        "Kubernetes' own",
			annotations: map[string]string{AnnotationIngressBandwidth: "1Gi", qos + "ingressBurst": "1k"},
			want:        `{"ingressBandwidth":1073741824,"ingressBurst":1000}`,
		},
		{name: "no number", annotations: map[string]string{AnnotationEgressBandwidth: ""}, err: `kubernetes.io/egress-bandwidth: "": want bits per second from 1k to 1P`},
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
			raw, err := QoSOf(tc.annotations)
			if string(raw) != tc.want || (err != nil) != (tc.err != "") || err != nil && !strings.Contains(err.Error(), tc.err) {
				t.Errorf("got %s, %v; want %s, %q", raw, err, tc.want, tc.err)
			}
			if _, err := (&WorkloadEndpointSpec{QoSControls: raw}).QoS(); err != nil {
				t.Errorf("read again: %v", err)
			}
		})
	}
}

// TestQoSValidated: an endpoint whose limits are no numbers, or negative, is refused by the
// field.
func TestQoSValidated(t *testing.T) {
	t.Parallel()
	for raw, ok := range map[string]bool{`{"ingressBandwidth":1000,"later":"x"}`: true, `{"egressPacketRate":-1}`: false, `{"egressPacketRate":"1k"}`: false, `[]`: false} {
		spec := WorkloadEndpointSpec{Node: "n", Orchestrator: "k8s", Pod: "p", Endpoint: "eth0", InterfaceName: "cali1", QoSControls: []byte(raw)}
		w := &WorkloadEndpoint{Spec: spec}
		w.Name, w.Namespace = "n-k8s-p-eth0", "default"
		err := Validate(w)
		if (err == nil) != ok || err != nil && !strings.Contains(err.Error(), "spec.qosControls") {
			t.Errorf("%s: %v", raw, err)
		}
	}
}
