package workload

import (
	"crypto/sha1" //nolint:gosec // names must match those that Calico gives, not keep a secret
	"crypto/sha256"
	"encoding/hex"
	"strings"
)

// DevicePrefix is what the name of every host end begins with.
const DevicePrefix = "cali"

// hashLen is how much of a hash or of a container id follows the prefix. With
// it the name has the 15 characters that the kernel allows (IFNAMSIZ-1).
const hashLen = 11

// defaultInterface is the container's first interface: the one that the names
// Calico gives are for.
const defaultInterface = "eth0"

// Owner says whose a wire is: one interface of one container in one network.
// It is comparable.
type Owner struct {
	Network     string // name of the CNI network
	ContainerID string
	Interface   string // the interface's name inside the container
}

// aliasPrefix begins the alias of every device that routerd made.
const aliasPrefix = "routerd:"

// maxAlias is the longest alias that the kernel takes (IFALIASZ-1).
const maxAlias = 255

// Alias is what the kernel keeps on the host end to say whose it is. None of
// the three parts can hold a slash. An owner too long for an alias is hashed,
// which still identifies it but cannot be read back.
func (o Owner) Alias() string {
	s := aliasPrefix + o.Network + "/" + o.ContainerID + "/" + o.Interface
	if len(s) <= maxAlias {
		return s
	}
	sum := sha256.Sum256([]byte(s))
	return aliasPrefix + hex.EncodeToString(sum[:])
}

// ParseAlias is the inverse of [Owner.Alias]. It reports false for the alias
// of a foreign device and for one that is a hash.
func ParseAlias(alias string) (Owner, bool) {
	rest, ok := strings.CutPrefix(alias, aliasPrefix)
	if !ok {
		return Owner{}, false
	}
	parts := strings.Split(rest, "/")
	if len(parts) != 3 {
		return Owner{}, false
	}
	return Owner{parts[0], parts[1], parts[2]}, true
}

// DeviceName returns the name of the host end. It depends only on its
// arguments, so that a retry, or a DEL after the daemon lost its memory, finds
// the device.
//
// Namespace and pod are Kubernetes' names, both empty elsewhere. The first
// interface of a pod and of a container with a hexadecimal id have the names
// that Calico gives them: a hash of "namespace.pod", and the id's beginning.
// All others have a hash of container and interface.
func DeviceName(o Owner, namespace, pod string) string {
	switch {
	case o.Interface == defaultInterface && pod != "":
		return DevicePrefix + hash(namespace+"."+pod)
	case o.Interface == defaultInterface && isHex(o.ContainerID) && len(o.ContainerID) >= hashLen:
		return DevicePrefix + o.ContainerID[:hashLen]
	}
	return DevicePrefix + hash(o.ContainerID+"/"+o.Interface)
}

func hash(s string) string {
	sum := sha1.Sum([]byte(s)) //nolint:gosec // see the import
	return hex.EncodeToString(sum[:])[:hashLen]
}

func isHex(s string) bool {
	return strings.Trim(s, "0123456789abcdefABCDEF") == ""
}
