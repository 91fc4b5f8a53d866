package main

import (
	"slices"
	"strings"

	"github.com/spf13/cobra"

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

func completeKind(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return strings.Split(kindList(), ", "), cobra.ShellCompDirectiveNoFileComp
}
