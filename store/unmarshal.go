package store

import (
	"bytes"
	"encoding/json"
	"math"
	"strings"
	"time"
	"unique"

	"github.com/projectcalico/api/pkg/lib/numorstring"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// unmarshal is [json.Unmarshal]. What there is one of for each node of the
// cluster, in the spelling in which Calico and routerd write it, costs a tenth.
func unmarshal(raw []byte, v any) error {
	r := reader{text: raw}
	switch v := v.(type) {
	case *Node:
		n := *v
		if r.node(&n); r.done() {
			*v = n
			return nil
		}
	case *Block:
		b := *v
		if r.block(&b); r.done() {
			*v = b
			return nil
		}
	case *Affinity:
		a := *v
		if r.affinity(&a); r.done() {
			*v = a
			return nil
		}
	}
	return json.Unmarshal(raw, v)
}

// reader reads JSON without white space whose members are all known. At
// anything else it gives up: [json.Unmarshal] has the last word about that.
type reader struct {
	text []byte
	at   int
	odd  bool // it gave up
}

// done reports whether all was read and understood.
func (r *reader) done() bool { return !r.odd && r.at == len(r.text) }

// next takes a byte if it is the next.
func (r *reader) next(c byte) bool {
	if r.odd || r.at >= len(r.text) || r.text[r.at] != c {
		return false
	}
	r.at++
	return true
}

// must takes this text, or gives up.
func (r *reader) must(text string) {
	if r.odd || !bytes.HasPrefix(r.text[r.at:], []byte(text)) {
		r.odd = true
		return
	}
	r.at += len(text)
}

func (r *reader) null() bool {
	if r.odd || !bytes.HasPrefix(r.text[r.at:], []byte("null")) {
		return false
	}
	r.at += len("null")
	return true
}

// object calls member for each member that is not null, to read its value. It
// gives up at a name that is not one of names, or comes twice.
func (r *reader) object(member func(name string), names ...string) {
	seen := 0
	r.members(func(name []byte) {
		for i, known := range names {
			if string(name) == known {
				r.odd = r.odd || seen&(1<<i) != 0
				seen |= 1 << i
				if !r.null() {
					member(known)
				}
				return
			}
		}
		r.odd = true
	})
}

// members calls member for each member of an object, to read its value.
func (r *reader) members(member func(name []byte)) {
	r.must("{")
	if r.next('}') {
		return
	}
	for !r.odd {
		name, plain := r.quoted()
		r.must(":")
		if r.odd = r.odd || !plain; r.odd {
			return
		}
		member(name[1 : len(name)-1])
		if !r.next(',') {
			break
		}
	}
	r.must("}")
}

// array calls element for each element of an array, to read it.
func (r *reader) array(element func()) {
	r.must("[")
	if r.next(']') {
		return
	}
	for !r.odd {
		element()
		if !r.next(',') {
			break
		}
	}
	r.must("]")
}

// quoted takes a string with its quotes. It is plain if its bytes stand for
// themselves.
func (r *reader) quoted() (text []byte, plain bool) {
	start := r.at
	r.must(`"`)
	plain = true
	for ; !r.odd && r.at < len(r.text); r.at++ {
		switch c := r.text[r.at]; {
		case c == '"':
			r.at++
			return r.text[start:r.at], plain
		case c == '\\':
			r.at++
			plain = false
		case c < ' ' || c >= 0x80:
			plain = false
		}
	}
	r.odd = true
	return nil, false
}

func (r *reader) string() string {
	text, plain := r.quoted()
	if plain {
		return string(text[1 : len(text)-1])
	}
	return r.unquoted(text)
}

// unquoted is a string with escapes, or what is none.
func (r *reader) unquoted(text []byte) (s string) {
	if s, ok := unescaped(text); ok {
		return s
	}
	r.odd = r.odd || json.Unmarshal(text, &s) != nil
	return s
}

// unescaped is a string of ASCII in which no more is escaped than JSON inside JSON has to.
func unescaped(text []byte) (string, bool) {
	if len(text) < 2 {
		return "", false
	}
	text = text[1 : len(text)-1]
	var s strings.Builder
	s.Grow(len(text))
	for len(text) > 0 {
		plain := bytes.IndexByte(text, '\\')
		if plain < 0 {
			plain = len(text)
		}
		for _, c := range text[:plain] {
			if c < ' ' || c >= 0x80 {
				return "", false
			}
		}
		s.Write(text[:plain])
		if text = text[plain:]; len(text) == 0 {
			break
		}
		if len(text) < 2 || text[1] != '"' && text[1] != '\\' && text[1] != '/' {
			return "", false
		}
		s.WriteByte(text[1])
		text = text[2:]
	}
	return s.String(), true
}

func (r *reader) bool() bool {
	if r.next('t') {
		r.must("rue")
		return true
	}
	r.must("false")
	return false
}

// number reads a whole number that is not negative.
func (r *reader) number() (n uint64) {
	start := r.at
	for ; r.at < len(r.text); r.at++ {
		c := r.text[r.at] - '0'
		if c > 9 {
			break
		}
		if n > (math.MaxInt64-9)/10 {
			r.odd = true
			return 0
		}
		n = 10*n + uint64(c)
	}
	if r.at == start || r.at > start+1 && r.text[start] == '0' {
		r.odd = true
	}
	return n
}

// other reads a value that is not worth a method here.
func (r *reader) other(v any) {
	start, depth := r.at, 0
	for !r.odd && r.at < len(r.text) {
		switch r.text[r.at] {
		case '"':
			r.quoted()
			continue
		case '{', '[':
			depth++
		case '}', ']':
			depth--
		}
		if depth < 0 || depth == 0 && r.text[r.at] == ',' {
			break
		}
		r.at++
	}
	r.odd = r.odd || json.Unmarshal(r.text[start:r.at], v) != nil
}

func (r *reader) time() *metav1.Time {
	t, err := time.Parse(time.RFC3339, r.string())
	r.odd = r.odd || err != nil
	return &metav1.Time{Time: t.Local()}
}

// labels reads a map whose names and values recur from object to object, apart from the name
// of the object itself.
func (r *reader) labels(own string) map[string]string {
	m := map[string]string{}
	r.members(func(name []byte) { m[unique.Make(string(name)).Value()] = r.shared(own) })
	return m
}

// stringMap reads a map whose names recur from object to object.
func (r *reader) stringMap() map[string]string {
	m := map[string]string{}
	r.members(func(name []byte) { m[unique.Make(string(name)).Value()] = r.string() })
	return m
}

// shared is [reader.string] for what many objects say: it stands in memory once.
func (r *reader) shared(own string) string {
	text, plain := r.quoted()
	switch {
	case !plain:
		return r.unquoted(text)
	case string(text[1:len(text)-1]) == own:
		return own
	}
	return unique.Make(string(text[1 : len(text)-1])).Value()
}

func (r *reader) node(n *Node) {
	r.object(func(name string) {
		switch name {
		case "kind":
			n.Kind = r.string()
		case "apiVersion":
			n.APIVersion = r.string()
		case "metadata":
			r.meta(&n.ObjectMeta)
		case "spec":
			r.nodeSpec(&n.Spec)
		case "status":
			r.other(&n.Status)
		}
	}, "kind", "apiVersion", "metadata", "spec", "status")
}

func (r *reader) meta(m *metav1.ObjectMeta) {
	r.object(func(name string) {
		switch name {
		case "name":
			m.Name = r.string()
		case "uid":
			m.UID = types.UID(r.string())
		case "creationTimestamp":
			m.CreationTimestamp = *r.time()
		case "labels":
			m.Labels = r.labels(m.Name)
		case "annotations":
			m.Annotations = r.stringMap()
		}
	}, "name", "uid", "creationTimestamp", "labels", "annotations")
}

func (r *reader) nodeSpec(s *NodeSpec) {
	r.object(func(name string) {
		switch name {
		case "bgp":
			s.BGP = &NodeBGPSpec{}
			r.nodeBGP(s.BGP)
		case "ipv4VXLANTunnelAddr":
			s.IPv4VXLANTunnelAddr = r.string()
		case "vxlanTunnelMACAddr":
			s.VXLANTunnelMACAddr = r.string()
		case "ipv6VXLANTunnelAddr":
			s.IPv6VXLANTunnelAddr = r.string()
		case "vxlanTunnelMACAddrV6":
			s.VXLANTunnelMACAddrV6 = r.string()
		case "orchRefs":
			s.OrchRefs = []OrchRef{}
			r.array(func() {
				var o OrchRef
				r.object(func(name string) {
					if name == "nodeName" {
						o.NodeName = r.string()
					} else {
						o.Orchestrator = r.string()
					}
				}, "nodeName", "orchestrator")
				s.OrchRefs = append(s.OrchRefs, o)
			})
		case "addresses":
			s.Addresses = []NodeAddress{}
			r.array(func() {
				var a NodeAddress
				r.object(func(name string) {
					if name == "address" {
						a.Address = r.string()
					} else {
						a.Type = r.string()
					}
				}, "address", "type")
				s.Addresses = append(s.Addresses, a)
			})
		case "wireguard":
			r.other(&s.Wireguard)
		case "interfaces":
			r.other(&s.Interfaces)
		}
	}, "bgp", "ipv4VXLANTunnelAddr", "vxlanTunnelMACAddr", "ipv6VXLANTunnelAddr", "vxlanTunnelMACAddrV6", "orchRefs", "addresses", "wireguard", "interfaces")
}

func (r *reader) nodeBGP(b *NodeBGPSpec) {
	r.object(func(name string) {
		switch name {
		case "asNumber":
			n := r.number()
			as := numorstring.ASNumber(n)
			r.odd = r.odd || n > math.MaxUint32
			b.ASNumber = &as
		case "ipv4Address":
			b.IPv4Address = r.string()
		case "ipv6Address":
			b.IPv6Address = r.string()
		case "ipv4IPIPTunnelAddr":
			b.IPv4IPIPTunnelAddr = r.string()
		case "routeReflectorClusterID":
			b.RouteReflectorClusterID = r.string()
		}
	}, "asNumber", "ipv4Address", "ipv6Address", "ipv4IPIPTunnelAddr", "routeReflectorClusterID")
}

func (r *reader) affinity(a *Affinity) {
	r.object(func(name string) {
		if name == "state" {
			a.State = r.string()
		} else {
			a.Deleted = r.bool()
		}
	}, "state", "deleted")
}

func (r *reader) block(b *Block) {
	r.object(func(name string) {
		switch name {
		case "cidr":
			b.CIDR = r.string()
		case "affinity":
			s := r.string()
			b.Affinity = &s
		case "affinity_claim_time":
			b.AffinityClaimTime = r.time()
		case "allocations":
			b.Allocations = make([]*int, 0, r.elements())
			r.array(func() {
				if r.null() {
					b.Allocations = append(b.Allocations, nil)
					return
				}
				n := int(r.number())
				b.Allocations = append(b.Allocations, &n)
			})
		case "unallocated":
			b.Unallocated = make([]int, 0, r.elements())
			r.array(func() { b.Unallocated = append(b.Unallocated, int(r.number())) })
		case "attributes":
			b.Attributes = []Attribute{}
			r.array(func() {
				var a Attribute
				r.attribute(&a)
				b.Attributes = append(b.Attributes, a)
			})
		case "sequenceNumber":
			b.SequenceNumber = r.number()
		case "sequenceNumberForAllocation":
			b.SequenceNumberForAllocation = map[string]uint64{}
			r.members(func(name []byte) { b.SequenceNumberForAllocation[string(name)] = r.number() })
		case "deleted":
			b.Deleted = r.bool()
		}
	}, "cidr", "affinity", "affinity_claim_time", "allocations", "unallocated", "attributes", "sequenceNumber", "sequenceNumberForAllocation", "deleted")
}

// elements is how many an array of numbers that is next may have at most.
func (r *reader) elements() int {
	end := bytes.IndexByte(r.text[r.at:], ']')
	return 1 + bytes.Count(r.text[r.at:r.at+max(0, end)], []byte(","))
}

func (r *reader) attribute(a *Attribute) {
	r.object(func(name string) {
		switch name {
		case "handle_id":
			s := r.string()
			a.HandleID = &s
		case "secondary":
			a.Secondary = r.stringMap()
		case "alternateOwnerAttrs":
			a.AlternateOwnerAttrs = r.stringMap()
		case "releasedAt":
			a.ReleasedAt = r.time()
		}
	}, "handle_id", "secondary", "alternateOwnerAttrs", "releasedAt")
}
