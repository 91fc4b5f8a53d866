package node

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// The methods that concern a family as a whole. They stand beside those of
// [Detect].
const (
	// MethodNone says that this host has no address of the family.
	MethodNone = "none"
	// MethodAuto is for IPv6: first-found on a host that has no IPv4 address,
	// none on every other, as Calico has it by default.
	MethodAuto = "auto"
	// MethodInternal is the InternalIP of the host's Node in Kubernetes.
	MethodInternal = "kubernetes-internal-ip"

	methodFirstFound = "first-found"
)

// methodOf returns the method of a family, or its default.
func methodOf(methods map[dataplane.Family]string, f dataplane.Family) string {
	switch m := methods[f]; {
	case m != "":
		return m
	case f == dataplane.IPv6:
		return MethodAuto
	}
	return methodFirstFound
}

// unwanted lists the families that this host shall have no address of.
func unwanted(methods map[dataplane.Family]string) []dataplane.Family {
	var out []dataplane.Family
	for _, f := range dataplane.Families() {
		if methodOf(methods, f) == MethodNone {
			out = append(out, f)
		}
	}
	return out
}

// CheckMethods reports whether the methods of both families are well formed,
// whatever the host. Errors name the configuration's key.
func CheckMethods(methods map[dataplane.Family]string) error {
	var errs []error
	for _, f := range dataplane.Families() {
		m := methodOf(methods, f)
		if m == MethodNone || m == MethodInternal || m == MethodAuto && f == dataplane.IPv6 {
			continue
		}
		if err := CheckMethod(m, f); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", methodKey(f), err))
		}
	}
	if len(unwanted(methods)) == len(dataplane.Families()) {
		errs = append(errs, errors.New("address.ipv4 and address.ipv6 are both none: a host needs an address; set one of them"))
	}
	return errors.Join(errs...)
}

// internalIPs lists the addresses of this type that a Node resource has.
func internalIPs(self *store.Node) (list []netip.Addr) {
	if self == nil {
		return nil
	}
	for _, a := range self.Spec.Addresses {
		if addr, err := netip.ParseAddr(a.Address); err == nil && a.Type == "InternalIP" {
			list = append(list, addr)
		}
	}
	return list
}

// SetInternalIPs says which addresses the kubelet names in its Node, where the datastore has
// another one, as one in etcd has. It does not block.
func (a *Agent) SetInternalIPs(addrs []netip.Addr) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if slices.Equal(a.internal, addrs) {
		return
	}
	a.internal = slices.Clone(addrs)
	a.wake.Set()
}

// kubeletSays lists the addresses that the kubelet says this host has. Where the datastore's Node is
// another one, and nothing was said yet, those that the host is registered with stand for them.
func (a *Agent) kubeletSays(self *store.Node) []netip.Addr {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.internal) > 0 {
		return a.internal
	}
	return internalIPs(self)
}

// withInternal puts the addresses that the kubelet says this host has in the place of
// the method that asks for them. Where it names one of the other family alone,
// the host has none of this one.
func withInternal(methods map[dataplane.Family]string, says []netip.Addr) map[dataplane.Family]string {
	internal := map[dataplane.Family]string{}
	for _, addr := range says {
		if f := dataplane.FamilyOf(addr); internal[f] == "" {
			internal[f] = addr.String()
		}
	}
	out := maps.Clone(methods)
	for f, m := range methods {
		switch {
		case m != MethodInternal || len(internal) == 0:
		case internal[f] != "":
			out[f] = internal[f]
		default:
			out[f] = MethodNone
		}
	}
	return out
}

func methodKey(f dataplane.Family) string { return "address." + strings.ToLower(f.String()) }

// situation is what decides which addresses a host is registered with.
type situation struct {
	underlay dataplane.Underlay
	methods  map[dataplane.Family]string
	now      map[dataplane.Family]netip.Prefix  // registered at present
	missing  map[dataplane.Family]time.Duration // for how long the host has not had them
	peers    []netip.Addr                       // addresses of other nodes
}

// chooseAll decides on this host's addresses, at most one of a family; see
// [choose]. That first-found finds nothing is no error where the other family
// has an address; that any other method finds nothing is one, beside what was
// chosen. trouble says what is wrong with addresses that stay all the same.
func chooseAll(s situation) (chosen map[dataplane.Family]choice, trouble, err error) {
	chosen = map[dataplane.Family]choice{}
	var troubles, errs, missing []error
	for _, f := range dataplane.Families() {
		m := methodOf(s.methods, f)
		if m == MethodAuto {
			if len(chosen) > 0 || len(errs) > 0 {
				continue
			}
			m = methodFirstFound
		}
		if m == MethodNone {
			continue
		}
		c, err := choose(s.underlay, m, f, s.now[f], s.missing[f], s.peers...)
		if c.Prefix.IsValid() {
			chosen[f] = c
		}
		switch {
		case err == nil:
		case c.Prefix.IsValid():
			troubles = append(troubles, err)
		case m == methodFirstFound && errors.Is(err, ErrNoAddress):
			missing = append(missing, err)
		default:
			errs = append(errs, err)
		}
	}
	if len(chosen) == 0 {
		errs = append(missing, errs...)
	}
	return chosen, errors.Join(troubles...), errors.Join(errs...)
}
