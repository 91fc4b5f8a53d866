package main

import (
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
)

const (
	// pluginName is what routerctl is called where kubectl finds it as "kubectl routerd".
	pluginName = "kubectl-routerd"
	// pluginCall is what its users type.
	pluginCall = "kubectl routerd"
)

// asPlugin makes the commands those of "kubectl routerd": they say so of themselves, and go to the
// cluster that kubectl goes to, with the same user's rights.
func (a *app) asPlugin(root *cobra.Command) {
	root.Annotations = map[string]string{cobra.CommandDisplayNameAnnotation: pluginCall}
	root.PersistentFlags().StringVar(&a.kubeconfig, "kubeconfig", "", "kubeconfig file (default $KUBECONFIG, else ~/.kube/config)")
	var rename func(c *cobra.Command)
	rename = func(c *cobra.Command) {
		c.Short, c.Long, c.Example = a.called(c.Short), a.called(c.Long), a.called(c.Example)
		for _, sub := range c.Commands() {
			rename(sub)
		}
	}
	rename(root)
	root.Long = `kubectl routerd reads and writes routerd's resources in the cluster that kubectl
goes to, by KUBECONFIG, ~/.kube/config, --kubeconfig and --context, with the rights
of that user. It is routerctl under another name: what concerns one host (node
status, routes, bgp) is asked of the daemon there, whose socket only that host has.`
}

// called returns a text for people with the name by which they call the program.
func (a *app) called(text string) string {
	if !a.plugin {
		return text
	}
	return strings.ReplaceAll(text, "routerctl", pluginCall)
}

// kubectlSettings are those by which a plugin of kubectl finds the cluster: where kubectl finds it, and
// not where variables of Calico's programs say.
func (a *daemon) kubectlSettings() func(string) string {
	file := a.kubeconfig
	if file == "" {
		file = a.getenv("KUBECONFIG")
	}
	if home := a.getenv("HOME"); file == "" {
		file = usualKubeconfig(home)
	}
	return func(name string) string {
		switch {
		case name == "DATASTORE_TYPE":
			return "kubernetes"
		case name == "KUBECONFIG":
			return file
		case strings.HasPrefix(name, "K8S_"), strings.HasPrefix(name, "ETCD_"):
			return ""
		}
		return a.getenv(name)
	}
}

// usualKubeconfig is where kubectl looks last; empty: there is no such file.
func usualKubeconfig(home string) string {
	file := filepath.Join(home, ".kube", "config")
	if _, err := os.Stat(file); home == "" || err != nil {
		return ""
	}
	return file
}
