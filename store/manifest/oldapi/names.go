package oldapi

import (
	"crypto/sha1"
	"encoding/hex"
	"net/netip"
	"regexp"
	"strings"
)

// Names of before version 3 could hold any character. Calico's upgrade and its `convert` make names of version 3 of them by
// these rules, so that what refers to a name by them finds it (projectcalico/libcalico-go, lib/upgrade/converters/names.go):
// lower case; "/" is a dot; what else a name may not hold is a dash; a run of dots and dashes with a dot in it is a dot;
// dots and dashes at the ends go.

// plainName is a name of a node.
func plainName(name string) string {
	name = strings.ReplaceAll(strings.ToLower(name), "/", ".")
	name = regexp.MustCompile(`[^-.a-z0-9]+`).ReplaceAllString(name, "-")
	name = regexp.MustCompile(`[.-]*\.[.-]*`).ReplaceAllString(name, ".")
	return strings.Trim(name, ".-")
}

// uniqueName is a name that, if it had to be changed, ends with eight digits of the hash of what it was.
func uniqueName(name string) string { return hashed(name, plainName(name)) }

// undottedName is [uniqueName] of a kind whose names have no dots.
func undottedName(name string) string {
	return hashed(name, strings.ReplaceAll(plainName(name), ".", "-"))
}

func hashed(was, is string) string {
	if was == is {
		return is
	}
	sum := sha1.Sum([]byte(was)) //nolint:gosec // it is Calico's choice, and guards nothing
	return is + "-" + hex.EncodeToString(sum[:4])
}

// profileName is a name of a profile: those of Kubernetes' namespaces begin with kns in version 3.
func profileName(name string) string {
	if ns, ok := strings.CutPrefix(name, "k8s_ns."); ok {
		name = "kns." + ns
	}
	return uniqueName(name)
}

// addrName is the name of a peer: its address, in full, with dashes.
func addrName(a netip.Addr) string {
	return strings.NewReplacer(".", "-", ":", "-").Replace(a.StringExpanded())
}

// cidrName is the name of a pool.
func cidrName(p netip.Prefix) string {
	return strings.NewReplacer(".", "-", ":", "-", "/", "-").Replace(p.String())
}
