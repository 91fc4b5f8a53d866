package main

import (
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	apiv1 "github.com/routerd/routerd/control/api/v1"
)

func (a bgpCommands) bgpDumpCommand() *cobra.Command {
	var format, table, output string
	c := &cobra.Command{
		Use: "dump", Short: "Write the BGP table to an MRT file",
		Long: `Write the accepted paths and the routes that this host originates, in the MRT format
TABLE_DUMP_V2 (RFC 6396), which bgpdump and the tools of route collectors read. With
--table received, write what all peers sent, before import filters.`,
		Example: "  routerctl bgp dump -o table.mrt\n  routerctl bgp dump --table received | bgpdump -m -",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if format != "mrt" {
				return usagef("--format %q: must be mrt", format)
			}
			req := &apiv1.BGPDumpRequest{}
			switch table {
			case "routes":
			case "received":
				req.Table = apiv1.BGPTable_BGP_TABLE_RECEIVED
			default:
				return usagef("--table %q: must be routes or received", table)
			}
			ctx := cmd.Context()
			err := ask(ctx, a.daemon, apiv1.NewBGPClient, func(b apiv1.BGPClient) error {
				stream, err := b.Dump(ctx, req)
				if err != nil {
					return err
				}
				part, err := stream.Recv() // before the file: most errors come with the first part
				if err != nil && !errors.Is(err, io.EOF) {
					return err
				}
				return a.writeFile(output, func(w io.Writer) error {
					for ; err == nil; part, err = stream.Recv() {
						if _, err := w.Write(part.GetData()); err != nil {
							return fmt.Errorf("write the dump: %w", err)
						}
					}
					if errors.Is(err, io.EOF) {
						return nil
					}
					return err
				})
			})
			return explain(ctx, err)
		},
	}
	f := c.Flags()
	f.StringVar(&format, "format", "mrt", "output format: mrt")
	f.StringVar(&table, "table", "routes", "table to write: routes (accepted paths and what this host originates) or received (what peers sent)")
	f.StringVarP(&output, "output", "o", "", "file to write, whole or not at all (default or -: standard output)")
	return c
}
