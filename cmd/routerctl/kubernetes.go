package main

import (
	"slices"

	"github.com/spf13/cobra"

	"github.com/routerd/routerd/store/kube/convert"
	"github.com/routerd/routerd/store/kube/crd"
)

func (a kubernetesCommands) kubernetesCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "kubernetes",
		Short:   "Print what a Kubernetes cluster needs for routerd",
		Example: "  routerctl kubernetes crds",
	}
	cmd.AddCommand(a.crdsCommand())
	return cmd
}

func (a kubernetesCommands) crdsCommand() *cobra.Command {
	var group string
	cmd := &cobra.Command{
		Use:   "crds",
		Short: "Print the custom resource definitions",
		Long: `Print the custom resource definitions for kubectl with which a cluster's API holds
routerd's resources. A new cluster uses projectcalico.org/v3, which kubectl shows as
they are. A cluster with Calico's crd.projectcalico.org/v1 keeps these, and routerd
uses them as Calico does.`,
		Example: `  routerctl kubernetes crds | kubectl apply --server-side -f -
  routerctl kubernetes crds --group crd.projectcalico.org/v1 | kubectl diff -f -`,
		Args: noArgs,
		RunE: func(*cobra.Command, []string) error {
			known := []string{convert.V1.APIVersion(), convert.V3.APIVersion()}
			if !slices.Contains(known, group) {
				return usagef("--group %q: want %s or %s", group, known[0], known[1])
			}
			text, err := crd.Manifest(convert.Choose(group, false, false))
			if err != nil {
				return err
			}
			_, err = a.stdout.Write(text)
			return err
		},
	}
	cmd.Flags().StringVar(&group, "group", convert.V3.APIVersion(), "API group: crd.projectcalico.org/v1 or projectcalico.org/v3")
	return cmd
}
