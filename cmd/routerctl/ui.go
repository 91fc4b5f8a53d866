package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	apiv1 "github.com/routerd/routerd/control/api/v1"
)

func (a *app) uiCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "ui",
		Short: "Print the address of this host's web page",
		Long: `Print the address at which a browser opens the web page of this host: a picture of the
cluster, pools, routes and policies with their reasons, events, and the findings of
the doctor. The daemon serves the page at ui.listen of its configuration.

The address contains a token that opens the page once, within five minutes; the
browser then stays signed in for twelve hours. Whoever uses the address first is
signed in: keep it to yourself.`,
		Example: "  routerctl ui\n  routerctl ui -o json",
		Args:    noArgs,
	}
	return showing(a, c, apiv1.NewUIClient, func(ctx context.Context, from apiv1.UIClient) (*apiv1.OpenResponse, error) {
		return from.Open(ctx, &apiv1.OpenRequest{})
	}, func(w io.Writer, r *apiv1.OpenResponse) error {
		host, err := os.Hostname()
		if err != nil {
			host = "HOST"
		}
		return printOpen(w, r, host)
	})
}

// tunnelPort is the near end of the ssh -L that is suggested for a socket.
const tunnelPort = "7749"

func printOpen(w io.Writer, r *apiv1.OpenResponse, host string) error {
	path, isSocket := strings.CutPrefix(r.GetListen(), "unix://")
	far, port := path, tunnelPort
	if !isSocket {
		_, p, err := net.SplitHostPort(r.GetListen())
		if err != nil {
			return fmt.Errorf("routerd: listens on %q: %w", r.GetListen(), err)
		}
		far, port = r.GetListen(), p
	}
	open := func(at string) string {
		return (&url.URL{Scheme: "http", Host: at, Path: "/", RawQuery: url.Values{"token": {r.GetToken()}}.Encode()}).String()
	}
	if !isSocket {
		fmt.Fprintf(w, "%s\n\nOn another machine, run this first, and open it at localhost:%s there:\n\n", open(r.GetListen()), port)
	}
	fmt.Fprintf(w, "  ssh -L %s:%s root@%s\n\n", port, far, host)
	if isSocket {
		fmt.Fprintf(w, "%s\n\n", open("localhost:"+port))
	}
	_, err := fmt.Fprintf(w, "The address is good once, until %s.\n", r.GetExpires().AsTime().Local().Format(time.TimeOnly))
	return err
}
