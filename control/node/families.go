package node

import (
	"errors"
	"fmt"
	"strings"

	"github.com/routerd/routerd/dataplane"
)

// The methods that concern a family as a whole. They stand beside those of
// [Detect].
const (
	// MethodNone says that this host has no address of the family.
	MethodNone = "none"
	// MethodAuto is for IPv6: first-found on a host that has no IPv4 address,
	// none on every other, as Calico has it by default.
	MethodAuto = "auto"

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

// wantsFamily reports whether an address of a family is to be looked for even
// when another one has been found.
func wantsFamily(methods map[dataplane.Family]string, f dataplane.Family) bool {
	m := methodOf(methods, f)
	return m != MethodNone && m != MethodAuto
}

// unwanted lists the families that this host shall have no address of.
func unwanted(methods map[dataplane.Family]string) []dataplane.Family {
	var out []dataplane.Family
	for _, f := range families() {
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
	for _, f := range families() {
		m := methodOf(methods, f)
		if m == MethodNone || m == MethodAuto && f == dataplane.IPv6 {
			continue
		}
		if err := CheckMethod(m, f); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", methodKey(f), err))
		}
	}
	if len(unwanted(methods)) == len(families()) {
		errs = append(errs, errors.New("address.ipv4 and address.ipv6 are both none: a host needs an address; set one of them"))
	}
	return errors.Join(errs...)
}

func methodKey(f dataplane.Family) string { return "address." + strings.ToLower(f.String()) }

// DetectAll finds this host's addresses, at most one of a family. That
// first-found finds nothing is no error where the other family has an address;
// that any other method finds nothing is one, beside what was found.
func DetectAll(u dataplane.Underlay, methods map[dataplane.Family]string) (map[dataplane.Family]Detected, error) {
	found := map[dataplane.Family]Detected{}
	var errs, missing []error
	for _, f := range families() {
		m := methodOf(methods, f)
		if m == MethodAuto {
			if len(found) > 0 || len(errs) > 0 {
				continue
			}
			m = methodFirstFound
		}
		if m == MethodNone {
			continue
		}
		d, err := Detect(u, m, f)
		switch {
		case err == nil:
			found[f] = d
		case m == methodFirstFound && errors.Is(err, ErrNoAddress):
			missing = append(missing, err)
		default:
			errs = append(errs, err)
		}
	}
	if len(found) == 0 {
		errs = append(missing, errs...)
	}
	return found, errors.Join(errs...)
}
