package convert

import (
	"crypto/sha256"
	"crypto/sha3"
	"encoding/base32"
	"encoding/hex"
	"math/bits"
	"net/netip"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/routerd/routerd/store"
)

const (
	namespaceProfile = store.PrefixNamespace
	accountProfile   = store.PrefixServiceAccount
	networkPolicy    = store.PrefixNetworkPolicy
	clusterPolicy    = store.PrefixClusterNetworkPolicy
	defaultTier      = "default."
)

// maxName is how long the name of an object may be (RFC 1123, as Kubernetes
// reads it).
const maxName = 253

// CIDRName returns the name of the object of a prefix: "10-0-0-0-26".
func CIDRName(p netip.Prefix) string {
	return strings.NewReplacer(".", "-", ":", "-", "/", "-").Replace(p.String())
}

// parseCIDRName is the inverse of [CIDRName].
func parseCIDRName(s string) (netip.Prefix, bool) {
	i := strings.LastIndexByte(s, '-')
	if i < 0 {
		return netip.Prefix{}, false
	}
	length, err := strconv.Atoi(s[i+1:])
	if err != nil {
		return netip.Prefix{}, false
	}
	// An IPv6 address has more parts, or an empty one.
	addr, err := netip.ParseAddr(strings.ReplaceAll(s[:i], "-", "."))
	if err != nil {
		addr, err = netip.ParseAddr(strings.ReplaceAll(s[:i], "-", ":"))
	}
	if err != nil {
		return netip.Prefix{}, false
	}
	p := netip.PrefixFrom(addr, length)
	return p, p.IsValid() && CIDRName(p) == s
}

// AffinityName returns the name of the object that says that a node holds a
// block. One that would be too long has part of the node's name replaced by a
// hash of both, as Calico does it.
func AffinityName(node string, cidr netip.Prefix) string {
	tail := CIDRName(cidr)
	name := node + "-" + tail
	if len(name) < maxName {
		return name
	}
	const hash = 11
	sum := sha256.Sum256([]byte(node + "+" + tail))
	return node[:maxName-1-len(tail)-hash-2] + "-" + tail + "-" + hex.EncodeToString(sum[:])[:hash]
}

// hostnameHash is the value of the label by which Calico lists the affinities of
// a node, whose name a label need not have room for.
func hostnameHash(node string) string {
	sum := sha3.Sum256([]byte(node))
	return base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(sum[:])
}

// turnUID returns the uid that a v3 resource has of the one of the object in
// [V1] that holds it, and the other way round: the bits of each byte reversed,
// but for the two that carry the version and the variant of a UUID. What is no
// UUID stays as it is.
func turnUID(uid types.UID) types.UID {
	raw, err := hex.DecodeString(strings.ReplaceAll(string(uid), "-", ""))
	if err != nil || len(raw) != 16 || len(uid) != 36 {
		return uid
	}
	for i := range raw {
		if i != 6 && i != 8 {
			raw[i] = bits.Reverse8(raw[i])
		}
	}
	s := hex.EncodeToString(raw)
	return types.UID(s[:8] + "-" + s[8:12] + "-" + s[12:16] + "-" + s[16:20] + "-" + s[20:])
}

// locate returns the namespace and name under which the resource of s has the
// object of a key, false when it cannot have it.
func (s Source) locate(key store.Key) (namespace, name string, ok bool) {
	switch s.Resource.APIKind {
	case "Node", "IPAMConfig", "IPAMConfiguration":
		return "", key.Name, true
	case "Pod":
		pod, ok := podOfEndpoint(key.Name)
		return key.Namespace, pod, ok && key.Namespace != ""
	case "Namespace":
		name, ok := strings.CutPrefix(key.Name, namespaceProfile)
		return "", name, ok && name != ""
	case "ServiceAccount":
		rest, ok := strings.CutPrefix(key.Name, accountProfile)
		namespace, name, dot := strings.Cut(rest, ".") // a namespace has no dot in its name
		return namespace, name, ok && dot && namespace != "" && name != ""
	case "IPAMBlock":
		return "", CIDRName(key.CIDR()), key.CIDR().IsValid()
	case "BlockAffinity":
		return "", AffinityName(key.Namespace, key.CIDR()), key.CIDR().IsValid() && key.Namespace != ""
	case "IPAMHandle":
		return "", strings.ToLower(key.Name), key.Name != ""
	}
	if prefix := nativePrefix(s.Kind); prefix != "" {
		native, is := strings.CutPrefix(key.Name, prefix)
		if is != !s.custom {
			return "", "", false
		}
		if is {
			return key.Namespace, native, native != "" && (key.Namespace != "") == s.Resource.Namespaced
		}
	}
	return key.Namespace, key.Name, key.Name != ""
}

// OlderName returns the other name that the object of a policy may have in [V1]:
// clients of Calico before v3.32 put the tier in front, "default" where the
// policy's own name shows none. It reports false where there is no such name.
func (s Source) OlderName(key store.Key) (string, bool) {
	if !s.custom || s.group != V1 || !tiered(s.Kind) || strings.Contains(key.Name, ".") {
		return "", false
	}
	return defaultTier + key.Name, true
}

// nativePrefix is what the names of policies begin with that stand for one of
// Kubernetes' own, for the kinds of which there are such.
func nativePrefix(kind store.Kind) string {
	switch kind {
	case store.KindNetworkPolicy:
		return networkPolicy
	case store.KindGlobalNetworkPolicy:
		return clusterPolicy
	}
	return ""
}

func tiered(kind store.Kind) bool {
	switch kind {
	case store.KindNetworkPolicy, store.KindGlobalNetworkPolicy, store.KindStagedNetworkPolicy, store.KindStagedGlobalNetworkPolicy:
		return true
	}
	return false
}

// podOfEndpoint returns the pod that the name of an endpoint is about,
// "<node>-k8s-<pod>-eth0" with the dashes inside the parts doubled.
func podOfEndpoint(name string) (string, bool) {
	// Single dashes part the name; a double one is a dash.
	const dash = "\x00"
	parts := strings.Split(strings.ReplaceAll(name, "--", dash), "-")
	if len(parts) != 4 || parts[1] != "k8s" || parts[3] != "eth0" {
		return "", false
	}
	return strings.ReplaceAll(parts[2], dash, "-"), parts[2] != ""
}
