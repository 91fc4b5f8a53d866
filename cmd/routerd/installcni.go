package main

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/routerd/routerd/cni"
	"github.com/routerd/routerd/control/config"
)

// conflistOptions describe the CNI network of a host.
func conflistOptions(c config.Config) cni.ConflistOptions {
	return cni.ConflistOptions{
		Name: c.CNI.NetworkName, Version: c.CNI.Version, Socket: c.CNISocket(), MTU: c.CNI.MTU, NoIPv4: !c.CNI.AssignIPv4, IPv6: c.CNI.AssignIPv6,
	}
}

// installOptions are what is installed of the plugin, which stands beside this program, and where.
func installOptions(c config.Config) (cni.InstallOptions, error) {
	self, err := os.Executable()
	if err != nil {
		return cni.InstallOptions{}, fmt.Errorf("find the plugin's binary: %w", err)
	}
	return cni.InstallOptions{
		Binary: filepath.Join(filepath.Dir(self), "routerd-cni"), BinDir: c.CNI.BinDir, ConfDir: c.CNI.ConfDir, Conflist: conflistOptions(c),
	}, nil
}

func newInstallCNICommand() *cobra.Command {
	var file, binDir, confDir, source string
	cmd := &cobra.Command{
		Use:   "install-cni",
		Short: "Install the CNI plugin and its network configuration",
		Long: `Install the CNI plugin and its network configuration where container runtimes look for
them. Each file is replaced in one step, the configuration last, so that a runtime
never sees a partial installation. Files that are up to date are left alone.

If there is no loopback plugin, without which containerd starts no pod, the same
program is installed as that too.`,
		Example: `  routerd install-cni
  routerd install-cni --bin-dir /usr/lib/cni --conf-dir /etc/cni/net.d`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := config.Load(file)
			if err != nil {
				return err
			}
			if binDir != "" {
				c.CNI.BinDir = binDir
			}
			if confDir != "" {
				c.CNI.ConfDir = confDir
			}
			of, err := installOptions(c)
			if err != nil {
				return err
			}
			of.Binary = cmp.Or(source, of.Binary)
			changed, err := cni.Install(of)
			for _, path := range changed {
				fmt.Fprintln(cmd.OutOrStdout(), "installed", path)
			}
			if err == nil && len(changed) == 0 {
				fmt.Fprintln(cmd.OutOrStdout(), "everything is up to date")
			}
			return err
		},
	}
	cmd.Flags().StringVarP(&file, "config", "c", "", "configuration file (default "+config.DefaultFile+", if it exists)")
	cmd.Flags().StringVar(&binDir, "bin-dir", "", "directory in which runtimes look for plugins; overrides cni.binDir")
	cmd.Flags().StringVar(&confDir, "conf-dir", "", "directory in which runtimes look for configurations; overrides cni.confDir")
	cmd.Flags().StringVar(&source, "plugin", "", "binary of the plugin (default: routerd-cni beside this one)")
	return cmd
}
