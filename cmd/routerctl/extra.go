package main

import (
	"github.com/spf13/cobra"

	"github.com/routerd/routerd/cmd/routerctl/labcmd"
)

// extraCommands returns the commands that live in packages of their own.
func (a *app) extraCommands() []*cobra.Command {
	return []*cobra.Command{labcmd.New(a.rawOut, a.rawErr)}
}
