package store

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
)

// AnnotationTCPAO on a BGPPeer has its sessions signed by TCP-AO (RFC 5925), in the place of spec.password. Its value is what
// [ParseTCPAO] reads.
const AnnotationTCPAO = "routerd.io/tcpAO"

// TCPAOKey is one key of an [AnnotationTCPAO].
type TCPAOKey struct {
	Name, Key     string // of the secret, as a secretKeyRef has them
	Send, Receive uint8  // ids in the segments that this side and the peer sign
	Algorithm     string // as Linux names it
}

// MaxTCPAOKeys is how many keys a BGPPeer may have at a time.
const MaxTCPAOKeys = 4

// tcpAOAlgorithms are those that RFC 5926 demands, and the one that Linux and others have beside these.
func tcpAOAlgorithms() []string { return []string{"hmac(sha1)", "cmac(aes128)", "hmac(sha256)"} }

const tcpAOForm = `one to 4 keys with commas between them, the one to be used first, each the secret's name and key, id=NUMBER, and where it is not hmac(sha1) algorithm=NAME, such as "tor/2026-12 id=2 algorithm=hmac(sha256), tor/2026-06 id=1"`

// ParseTCPAO reads the value of an [AnnotationTCPAO]: keys, the one first that the peer is asked to sign with.
func ParseTCPAO(value string) ([]TCPAOKey, error) {
	var out []TCPAOKey
	for part := range strings.SplitSeq(value, ",") {
		k, err := parseTCPAOKey(strings.Fields(part))
		if err != nil {
			return nil, err
		}
		for _, q := range out {
			if q.Send == k.Send || q.Receive == k.Receive {
				return nil, fmt.Errorf("%s/%s and %s/%s have the same id: each key needs one of its own, to send and to receive", q.Name, q.Key, k.Name, k.Key)
			}
		}
		out = append(out, k)
	}
	if len(out) > MaxTCPAOKeys {
		return nil, fmt.Errorf("there are %d keys: must be %d at most; leave out what neither side uses any more", len(out), MaxTCPAOKeys)
	}
	return out, nil
}

func parseTCPAOKey(words []string) (k TCPAOKey, err error) {
	if len(words) == 0 {
		return k, errors.New("must be " + tcpAOForm)
	}
	k = TCPAOKey{Algorithm: tcpAOAlgorithms()[0]}
	var ok bool
	if k.Name, k.Key, ok = strings.Cut(words[0], "/"); !ok || !plainName(k.Name) || !plainName(k.Key) {
		return k, fmt.Errorf("%q: must be the name and the key of a secret, such as tor/2026-12", words[0])
	}
	seen := map[string]bool{}
	for _, w := range words[1:] {
		name, v, _ := strings.Cut(w, "=")
		if seen[name] {
			return k, fmt.Errorf("%q: %s is there twice", w, name)
		}
		seen[name] = true
		id, err := strconv.ParseUint(v, 10, 8)
		switch name {
		case "id":
			k.Send, k.Receive = uint8(id), uint8(id)
		case "send":
			k.Send = uint8(id)
		case "receive":
			k.Receive = uint8(id)
		case "algorithm":
			if k.Algorithm, err = v, nil; !slices.Contains(tcpAOAlgorithms(), v) {
				return k, fmt.Errorf("%q: the algorithm must be one of %s", w, strings.Join(tcpAOAlgorithms(), ", "))
			}
		default:
			return k, fmt.Errorf("%q: must be %s", w, tcpAOForm)
		}
		if err != nil {
			return k, fmt.Errorf("%q: an id must be a number from 0 to 255", w)
		}
	}
	if seen["id"] == (seen["send"] || seen["receive"]) || seen["send"] != seen["receive"] {
		return k, fmt.Errorf("key %s: give id=NUMBER, or where the peer has them the other way round send=NUMBER and receive=NUMBER", words[0])
	}
	return k, nil
}

// plainName reports whether a file may be named so.
func plainName(s string) bool { return s != "" && s != "." && s != ".." && s == filepath.Base(s) }

// TCPAOOf reads the keys of a BGPPeer. Those of one with an error are not to be taken for none: it asks for them.
func TCPAOOf(annotations map[string]string, spec v3.BGPPeerSpec) ([]TCPAOKey, error) {
	c := &checker{}
	keys := c.tcpAO(annotations, &spec)
	return keys, c.errs.Err()
}

func (c *checker) tcpAO(annotations map[string]string, s *v3.BGPPeerSpec) []TCPAOKey {
	v, ok := annotations[AnnotationTCPAO]
	if !ok {
		return nil
	}
	keys, err := ParseTCPAO(v)
	if err != nil {
		c.add(annotation(AnnotationTCPAO), v, "%v", err)
	}
	for _, k := range keys {
		c.reject(s.PeerSelector != "" && k.Send != k.Receive, annotation(AnnotationTCPAO), v, "key %s/%s: send and receive cannot differ with spec.peerSelector, for the nodes of both sides read the same; give id=NUMBER", k.Name, k.Key)
	}
	c.reject(s.Password != nil, "spec.password", nil, "cannot be given together with the annotation %s: a connection is signed by one of the two; keep the annotation where both sides have TCP-AO", AnnotationTCPAO)
	return keys
}
