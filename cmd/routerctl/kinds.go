package main

import (
	"cmp"
	"slices"
	"strings"

	"github.com/routerd/routerd/store"
)

func kindList() string {
	var names []string
	for _, k := range store.Kinds() {
		names = append(names, k.Plural())
	}
	slices.Sort(names)
	return strings.Join(names, ", ")
}

// parseKinds reads "ippools,nodes".
func parseKinds(s string) ([]store.Kind, error) {
	var kinds []store.Kind
	for name := range strings.SplitSeq(s, ",") {
		k, ok := store.KindByName(name)
		if !ok {
			return nil, usagef("unknown kind %q: must be one of %s", name, kindList())
		}
		if !slices.Contains(kinds, k) {
			kinds = append(kinds, k)
		}
	}
	return kinds, nil
}

// kindFirst turns what -o name prints, "ippool/a ippool/b", into a kind and
// names. Arguments of the usual form come back as they are.
func kindFirst(args []string) ([]string, error) {
	if !slices.ContainsFunc(args, func(s string) bool { return strings.Contains(s, "/") }) {
		return args, nil
	}
	var out []string
	for _, arg := range args {
		kind, name, ok := strings.Cut(arg, "/")
		switch {
		case !ok || kind == "" || name == "" || strings.Contains(name, "/"):
			return nil, usagef("%q: give KIND NAME… or KIND/NAME…, not both", arg)
		case out == nil:
			out = []string{kind}
		case out[0] != kind:
			return nil, usagef("%q: all of one command must be of one kind, %s", arg, out[0])
		}
		out = append(out, name)
	}
	return out, nil
}

func parseKind(s string) (store.Kind, error) {
	kinds, err := parseKinds(s)
	if err != nil {
		return "", err
	}
	if len(kinds) != 1 {
		return "", usagef("%q: name one kind", s)
	}
	return kinds[0], nil
}

// namespaceOf returns the namespace of objects of a kind; given is what -n says, empty
// where it says nothing.
func namespaceOf(kind store.Kind, given string) (string, error) {
	switch {
	case kind.Namespaced():
		return cmp.Or(given, store.DefaultName), nil
	case given != "":
		return "", usagef("--namespace %s: %s have no namespace; leave it out", given, kind.Plural())
	}
	return "", nil
}

// oneKey reads the kind and the name of one object.
func oneKey(kindName, name, namespace string) (store.Key, error) {
	kind, err := parseKind(kindName)
	if err != nil {
		return store.Key{}, err
	}
	if namespace, err = namespaceOf(kind, namespace); err != nil {
		return store.Key{}, err
	}
	return store.Key{Kind: kind, Namespace: namespace, Name: name}, nil
}
