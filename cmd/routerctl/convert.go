package main

import (
	"encoding/json"
	"io"
	"slices"

	"github.com/spf13/cobra"

	"github.com/routerd/routerd/store/manifest"
	"github.com/routerd/routerd/store/manifest/oldapi"
)

func (a resourceCommands) convertCommand() *cobra.Command {
	var in input
	var output string
	var unchecked bool
	c := &cobra.Command{
		Use:   "convert -f FILE|DIR|-",
		Short: "Convert Calico v1 manifests or Kubernetes NetworkPolicies to projectcalico.org/v3",
		Long: `Convert manifests of Calico's API before version 3 (apiVersion v1: ipPool, bgpPeer,
node, policy, profile, hostEndpoint, workloadEndpoint) and NetworkPolicies of
Kubernetes to projectcalico.org/v3 and print them, as calicoctl convert does. Names
that version 3 does not accept are changed by Calico's rules, tags become labels, and
a policy becomes a GlobalNetworkPolicy. No datastore is read or written.

An unknown field is an error, because what it asks for would be lost. After any error
nothing is printed. Several objects are printed as one list, which apply -f accepts.`,
		Example: "  routerctl convert -f policy-v1.yaml > policy.yaml\n  routerctl convert -f - -o json < pool-v1.yaml",
		Args:    func(_ *cobra.Command, args []string) error { return in.none("convert", args) },
		RunE: func(*cobra.Command, []string) error {
			if !slices.Contains([]string{"yaml", "yml", "json"}, output) {
				return usagef("convert: --output %q: must be yaml or json", output)
			}
			in.parse = func(name string, r io.Reader) ([]manifest.Document, error) {
				return manifest.ReadForeign(name, r, oldapi.Kinds(), unchecked)
			}
			docs, err := in.read(a.stdin)
			if err != nil {
				return err
			}
			return a.printConverted(docs, output)
		},
	}
	f := c.Flags()
	in.fileFlags(f)
	f.StringVarP(&output, "output", "o", "yaml", "yaml or json")
	f.BoolVar(&unchecked, "ignore-validation", false, "also print resources that could not be written")
	return c
}

// printConverted prints one resource, or a list of several.
func (a resourceCommands) printConverted(docs []manifest.Document, output string) error {
	var list []json.RawMessage
	for _, d := range docs {
		raw, err := manifest.JSON(d.Object)
		if err != nil {
			return err
		}
		list = append(list, raw)
	}
	all := list[0]
	if len(list) > 1 {
		var err error
		if all, err = manifest.Plain(list); err != nil {
			return err
		}
	}
	text, err := manifest.Indent(all)
	if output != "json" {
		text, err = manifest.YAML(all)
	}
	if err != nil {
		return err
	}
	_, err = a.stdout.Write(text)
	return err
}
