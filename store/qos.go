package store

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/projectcalico/api/pkg/lib/numorstring"
	quantity "k8s.io/apimachinery/pkg/api/resource"
)

// QoSControls bound what a workload receives (ingress) and sends (egress), as Calico's
// WorkloadEndpointSpec has them. Zero stands for no bound.
type QoSControls struct {
	IngressBandwidth      uint64 `json:"ingressBandwidth,omitempty"` // bits per second
	IngressBurst          uint64 `json:"ingressBurst,omitempty"`     // bits
	IngressPeakrate       uint64 `json:"ingressPeakrate,omitempty"`  // bits per second
	IngressMinburst       uint64 `json:"ingressMinburst,omitempty"`  // bytes
	IngressPacketRate     uint64 `json:"ingressPacketRate,omitempty"`
	IngressPacketBurst    uint64 `json:"ingressPacketBurst,omitempty"`
	IngressMaxConnections uint64 `json:"ingressMaxConnections,omitempty"`
	EgressBandwidth       uint64 `json:"egressBandwidth,omitempty"`
	EgressBurst           uint64 `json:"egressBurst,omitempty"`
	EgressPeakrate        uint64 `json:"egressPeakrate,omitempty"`
	EgressMinburst        uint64 `json:"egressMinburst,omitempty"`
	EgressPacketRate      uint64 `json:"egressPacketRate,omitempty"`
	EgressPacketBurst     uint64 `json:"egressPacketBurst,omitempty"`
	EgressMaxConnections  uint64 `json:"egressMaxConnections,omitempty"`

	DSCP *numorstring.DSCP `json:"dscp,omitempty"` // of what it sends out of the cluster
}

// QoS returns an endpoint's limits.
func (s *WorkloadEndpointSpec) QoS() (q QoSControls, err error) {
	if len(s.QoSControls) == 0 {
		return q, nil
	}
	if err := json.Unmarshal(s.QoSControls, &q); err != nil {
		return QoSControls{}, fmt.Errorf("qosControls %s: %w", s.QoSControls, err)
	}
	return q, nil
}

// limit is what the value of one annotation may be.
type limit struct {
	least, most string // quantities as Kubernetes writes them
	want        string // in words
	needs       string // the annotation without which it means nothing; empty: none
}

// limits are those of Calico, by the end of the annotation's name without the
// direction (libcalico-go, handleQoSControlsAnnotations).
var limits = map[string]limit{
	"Bandwidth":      {"1k", "1P", "bits per second", ""},
	"Burst":          {"1k", fmt.Sprint(uint64(math.MaxUint32) * 8), "bits", "Bandwidth"},
	"Peakrate":       {"1.01k", "1.01P", "bits per second", "Bandwidth"},
	"Minburst":       {"1k", "100M", "bytes", "Peakrate"},
	"PacketRate":     {"1", "10k", "packets per second", ""},
	"PacketBurst":    {"1", "10k", "packets", "PacketRate"},
	"MaxConnections": {"1", fmt.Sprint(uint32(math.MaxUint32)), "connections", ""},
}

// ParseDSCP returns the code point of differentiated services that a text names.
func ParseDSCP(text string) (numorstring.DSCP, error) {
	d := numorstring.DSCPFromString(text)
	if d.Validate() != nil {
		return numorstring.DSCP{}, errors.New("want " + dscpWanted)
	}
	return d, nil
}

const dscpWanted = "a number from 0 to 63, or a name such as AF11"

// QoSOf returns the limits that annotations of a pod ask for, as its endpoint has them,
// nil: none. The error names the first annotation that makes no sense.
func QoSOf(annotations map[string]string) (json.RawMessage, error) {
	controls, values := make(map[string]any), make(map[string]int64)
	var names []string
	for _, key := range slices.Sorted(maps.Keys(annotations)) {
		name, known := limitName(key)
		if !known {
			continue
		}
		v, err := limitValue(name, annotations[key])
		if err != nil {
			return nil, fmt.Errorf("annotation %s: %q: %w", key, annotations[key], err)
		}
		names = append(names, key)
		if n, ok := v.(int64); ok {
			values[name] = n
		}
		controls[name] = v
	}
	if len(controls) == 0 {
		return nil, nil
	}
	for _, key := range names {
		name, _ := limitName(key)
		direction, kind := limitKind(name)
		needs := limits[kind].needs
		if needs == "" {
			continue
		}
		switch base, ok := values[direction+needs]; {
		case !ok:
			return nil, fmt.Errorf("annotation %s: %q: it means nothing without %s: set that, or remove this one", key, annotations[key], AnnotationPrefixQoS+direction+needs)
		case kind == "Peakrate" && values[name] <= base:
			return nil, fmt.Errorf("annotation %s: %q: want more than %s, which is %d bits per second", key, annotations[key], AnnotationPrefixQoS+direction+needs, base)
		}
	}
	return json.Marshal(controls)
}

// limitName returns what an annotation limits, as the end of Calico's names, and whether
// it limits anything.
func limitName(key string) (name string, known bool) {
	switch key {
	case AnnotationIngressBandwidth:
		return "ingressBandwidth", true
	case AnnotationEgressBandwidth:
		return "egressBandwidth", true
	}
	return strings.CutPrefix(key, AnnotationPrefixQoS)
}

// limitKind divides a name into the direction and what is limited.
func limitKind(name string) (direction, kind string) {
	for _, d := range []string{"ingress", "egress"} {
		if kind, ok := strings.CutPrefix(name, d); ok {
			return d, kind
		}
	}
	return "", name
}

func limitValue(name, text string) (any, error) {
	if AnnotationPrefixQoS+name == AnnotationDSCP {
		return ParseDSCP(text)
	}
	direction, kind := limitKind(name)
	l, ok := limits[kind]
	if !ok || direction == "" {
		return nil, errors.New("no such limit is known: mend its name, or remove it")
	}
	least, most := quantity.MustParse(l.least), quantity.MustParse(l.most)
	q, err := quantity.ParseQuantity(text)
	if err != nil || q.Cmp(least) < 0 || q.Cmp(most) > 0 {
		return nil, fmt.Errorf("want %s from %s to %s, such as %s", l.want, l.least, l.most, l.least)
	}
	return q.Value(), nil
}
