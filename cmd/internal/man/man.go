// Package man has the command by which a program writes its own manual pages.
package man

import (
	"iter"
	"os"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

// Command writes the manual pages of the program that it is a command of; packages are
// made with them. program is its name, for the example.
func Command(program string) *cobra.Command {
	return &cobra.Command{
		Use: "man DIR", Short: "Write the manual pages into a directory", Hidden: true, Args: cobra.ExactArgs(1),
		Example: "  " + program + " man /tmp/man",
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := os.MkdirAll(args[0], 0o755); err != nil {
				return err
			}
			root := cmd.Root()
			for c := range everyCommand(root) {
				c.DisableAutoGenTag = true // no date: two builds are the same bytes
			}
			var epoch time.Time
			return doc.GenManTree(root, &doc.GenManHeader{Section: "1", Source: "routerd", Manual: "routerd", Date: &epoch}, args[0])
		},
	}
}

// everyCommand yields a command and all below it.
func everyCommand(c *cobra.Command) iter.Seq[*cobra.Command] {
	return func(yield func(*cobra.Command) bool) {
		todo := []*cobra.Command{c}
		for len(todo) > 0 && yield(todo[0]) {
			todo = append(todo[1:], todo[0].Commands()...)
		}
	}
}
