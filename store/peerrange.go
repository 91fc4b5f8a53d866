package store

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
)

// Annotations of a BGPPeer for neighbours that are not named one by one: whoever connects from a prefix.
const (
	// AnnotationListenRange is the prefix; the BGPPeer has no spec.peerIP then. Its settings are those of each neighbour.
	AnnotationListenRange = "routerd.io/listenRange"

	// AnnotationListenLimit is how many neighbours of the range a node has at a time, [DefaultListenLimit] without it.
	AnnotationListenLimit = "routerd.io/listenLimit"
)

// Limits of an [AnnotationListenLimit].
const (
	DefaultListenLimit = 100
	maxListenLimit     = 10_000
)

// ListenRange is what a BGPPeer listens for; the zero value is nothing.
type ListenRange struct {
	Prefix netip.Prefix
	Limit  int
}

// ListenRangeOf reads a BGPPeer's annotations. It is zero where [CheckListenRange] finds something wrong with them.
func ListenRangeOf(annotations map[string]string) ListenRange {
	return (&checker{}).listenAnnotations(annotations)
}

func (c *checker) listenAnnotations(annotations map[string]string) ListenRange {
	text, ok := annotations[AnnotationListenRange]
	limit, limited := annotations[AnnotationListenLimit]
	r := ListenRange{Limit: DefaultListenLimit}
	if !ok {
		c.reject(limited, annotation(AnnotationListenLimit), limit, "is for a BGPPeer with the annotation %s; leave it out", AnnotationListenRange)
		return ListenRange{}
	}
	p, err := parseListenRange(text)
	if r.Prefix = p; err != nil {
		c.add(annotation(AnnotationListenRange), text, "%v", err)
	}
	if limited {
		if r.Limit, err = strconv.Atoi(limit); err != nil || r.Limit < 1 || r.Limit > maxListenLimit {
			c.add(annotation(AnnotationListenLimit), limit, "must be a number of neighbours from 1 to %d", maxListenLimit)
		}
	}
	if len(c.errs) > 0 {
		return ListenRange{}
	}
	return r
}

// annotation is the field of an annotation.
func annotation(key string) string { return "metadata.annotations[" + key + "]" }

func parseListenRange(s string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(s)
	switch {
	case err != nil || p.Addr().Is4In6():
		return netip.Prefix{}, errors.New("must be one prefix, such as 10.9.0.0/24; of two there are two BGPPeers")
	case p != p.Masked():
		return netip.Prefix{}, fmt.Errorf("has bits beyond its length: give %s, or the address alone as spec.peerIP", p.Masked())
	case p.Bits() == 0:
		return netip.Prefix{}, errors.New("is the whole internet: give the network that the neighbours are in")
	}
	ranges := unroutables()
	for _, what := range slices.Sorted(maps.Keys(ranges)) {
		if p.Overlaps(ranges[what]) {
			return netip.Prefix{}, fmt.Errorf("overlaps the %s: give the network that the neighbours are in; on a link without addresses that is the device, in the annotation %s", what, AnnotationPeerInterface)
		}
	}
	return p, nil
}

// CheckListenRange says what is wrong with the annotations of a BGPPeer that are about a range, and with the fields that these
// concern. The error names the field and the cure.
func CheckListenRange(annotations map[string]string, spec v3.BGPPeerSpec) error {
	c := &checker{}
	c.listenRange(annotations, &spec)
	return c.errs.Err()
}

func (c *checker) listenRange(annotations map[string]string, s *v3.BGPPeerSpec) {
	own := &checker{}
	r := own.listenAnnotations(annotations)
	c.errs = append(c.errs, own.errs...)
	if r == (ListenRange{}) {
		return
	}
	for _, f := range [][2]string{
		{"spec.peerIP", s.PeerIP},
		{"spec.peerSelector", s.PeerSelector},
		{"spec.localWorkloadSelector", s.LocalWorkloadSelector},
		{"spec.reachableBy", s.ReachableBy},
		{annotation(AnnotationPeerInterface), annotations[AnnotationPeerInterface]},
	} {
		c.reject(f[1] != "", f[0], f[1], "cannot be given together with the annotation %s; keep one of the two", AnnotationListenRange)
	}
	c.reject(s.ASNumber == 0, "spec.asNumber", nil, "required with the annotation %s: the AS number of each neighbour", AnnotationListenRange)
	c.reject(annotations[AnnotationExtendedNextHop] == "true" && r.Prefix.Addr().Is4(), annotation(AnnotationExtendedNextHop), "true",
		"is for sessions over IPv6, and the annotation %s is IPv4; leave it out", AnnotationListenRange)
}
