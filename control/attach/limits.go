package attach

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/projectcalico/api/pkg/lib/numorstring"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/routerd/routerd/store"
)

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

// checkLimits reads the annotations that limit a pod's traffic. It returns the names
// of those that make sense, in order, and why another does not.
func checkLimits(annotations map[string]string) (names []string, err error) {
	values := make(map[string]int64)
	for _, key := range slices.Sorted(maps.Keys(annotations)) {
		name, known := limitName(key)
		if !known {
			continue
		}
		if values[name], err = limitValue(name, annotations[key]); err != nil {
			return nil, fmt.Errorf("annotation %s: %q: %w", key, annotations[key], err)
		}
		names = append(names, key)
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
			return nil, fmt.Errorf("annotation %s: %q: it means nothing without %s: set that, or remove this one", key, annotations[key], store.AnnotationPrefixQoS+direction+needs)
		case kind == "Peakrate" && values[name] <= base:
			return nil, fmt.Errorf("annotation %s: %q: want more than %s, which is %d bits per second", key, annotations[key], store.AnnotationPrefixQoS+direction+needs, base)
		}
	}
	return names, nil
}

// limitName returns what an annotation limits, as the end of Calico's names, and whether
// it limits anything.
func limitName(key string) (name string, known bool) {
	switch key {
	case store.AnnotationIngressBandwidth:
		return "ingressBandwidth", true
	case store.AnnotationEgressBandwidth:
		return "egressBandwidth", true
	}
	return strings.CutPrefix(key, store.AnnotationPrefixQoS)
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

func limitValue(name, text string) (int64, error) {
	if name == "dscp" {
		d := numorstring.DSCPFromString(text)
		if d.Validate() != nil {
			return 0, errors.New("want a number from 0 to 63, or a name such as AF11")
		}
		return 0, nil
	}
	direction, kind := limitKind(name)
	l, ok := limits[kind]
	if !ok || direction == "" {
		return 0, errors.New("no such limit is known: mend its name, or remove it")
	}
	least, most := resource.MustParse(l.least), resource.MustParse(l.most)
	q, err := resource.ParseQuantity(text)
	if err != nil || q.Cmp(least) < 0 || q.Cmp(most) > 0 {
		return 0, fmt.Errorf("want %s from %s to %s, such as %s", l.want, l.least, l.most, l.least)
	}
	return q.Value(), nil
}
