package store

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
)

// The annotations of a Node with which routerd's nodes agree about how packets
// travel between them. Calico's tools keep what they do not know.
const (
	// AnnotationAccepts lists the encapsulations of packets that the node's kernel
	// accepts: direct,ipip,vxlan/4096/4789. A node without it is taken to accept
	// everything.
	AnnotationAccepts = "routerd.io/accepts"
	// AnnotationUses lists the encapsulations in which the node may be sending. An encapsulation
	// is named before it is used, and until its last use is over.
	AnnotationUses = "routerd.io/uses"
	// AnnotationSends names, by pool, the mode that the node has moved to as a
	// whole, as JSON: {"default":"VXLANCrossSubnet/4096/4789"}.
	AnnotationSends = "routerd.io/sends"
	// AnnotationRefuses says, by encapsulation, why the node's kernel cannot accept an
	// encapsulation that its pools ask for, as JSON.
	AnnotationRefuses = "routerd.io/refuses"
	// AnnotationStays says, by pool, which peers the node still sends to as before
	// because probes do not get through as the pool asks for, and why, as JSON.
	AnnotationStays = "routerd.io/stays"
)

// AnnotationForce of an IPPool names the encapsulation that nodes move its packets to
// whatever their probes say: VXLANCrossSubnet. It counts while the pool asks for that
// one.
const AnnotationForce = "routerd.io/force"

// Forced reports whether nodes are to move a pool's packets whatever probes say.
func Forced(p *v3.IPPool) bool {
	return p.Annotations[AnnotationForce] == string(EncapsulationOf(p))
}

// NodeEncaps is what a node publishes about how packets travel. Encaps are as
// dataplane.Encap's String has them.
type NodeEncaps struct {
	Published bool              // the node takes part at all
	Accepts   []string          // sorted
	Uses      []string          // sorted
	Sends     map[string]string // pool → mode
	Refuses   map[string]string // encapsulation → reason
	Stays     map[string]string // pool → which peers, and why
}

// NodeEncapsOf reads a node's annotations. What cannot be read counts as not there:
// its owner writes it anew.
func NodeEncapsOf(n *Node) NodeEncaps {
	accepts, ok := n.Annotations[AnnotationAccepts]
	return NodeEncaps{
		Published: ok,
		Accepts:   readList(accepts),
		Uses:      readList(n.Annotations[AnnotationUses]),
		Sends:     readMap(n.Annotations[AnnotationSends]),
		Refuses:   readMap(n.Annotations[AnnotationRefuses]),
		Stays:     readMap(n.Annotations[AnnotationStays]),
	}
}

// SetNodeEncaps writes a node's annotations, and removes those that say nothing. It
// leaves a map that the node shares with others alone.
func SetNodeEncaps(n *Node, f NodeEncaps) {
	a := maps.Clone(n.Annotations)
	if a == nil {
		a = map[string]string{}
	}
	for _, name := range []string{AnnotationAccepts, AnnotationUses, AnnotationSends, AnnotationRefuses, AnnotationStays} {
		delete(a, name)
	}
	n.Annotations = a
	if !f.Published {
		return
	}
	a[AnnotationAccepts] = writeList(f.Accepts)
	if len(f.Uses) > 0 {
		a[AnnotationUses] = writeList(f.Uses)
	}
	for name, m := range map[string]map[string]string{AnnotationSends: f.Sends, AnnotationRefuses: f.Refuses, AnnotationStays: f.Stays} {
		if len(m) > 0 {
			// A map of strings is always JSON; its keys come sorted.
			b, _ := json.Marshal(m) //nolint:errchkjson // see above
			a[name] = string(b)
		}
	}
}

func readList(s string) []string {
	var out []string
	for v := range strings.SplitSeq(s, ",") {
		if v = strings.TrimSpace(v); v != "" {
			out = append(out, v)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

func writeList(list []string) string {
	list = slices.Clone(list)
	slices.Sort(list)
	return strings.Join(slices.Compact(list), ",")
}

func readMap(s string) map[string]string {
	if s == "" {
		return nil
	}
	var m map[string]string
	if err := json.Unmarshal([]byte(s), &m); err != nil {
		return nil
	}
	return m
}
