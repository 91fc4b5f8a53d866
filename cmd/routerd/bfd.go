package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"

	"github.com/spf13/cobra"

	"github.com/routerd/routerd/control/bfd"
)

// bfdCommand is what the daemon starts for its BFD sessions: this program once more, as [newBFDCommand].
func bfdCommand() *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", "bfd")
	cmd.Stderr = os.Stderr
	return cmd
}

func newBFDCommand() *cobra.Command {
	return &cobra.Command{
		Use:    "bfd",
		Short:  "Serve the daemon's BFD sessions (started by the daemon)",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := net.FileConn(os.NewFile(bfd.Descriptor, "daemon"))
			if err != nil {
				return fmt.Errorf("descriptor %d is no connection to a daemon, which starts this command by itself: %w", bfd.Descriptor, err)
			}
			// It ends with the daemon, not by the signal that goes to both: sessions are to go when the daemon has stopped.
			return bfd.Serve(context.WithoutCancel(cmd.Context()), c)
		},
	}
}
