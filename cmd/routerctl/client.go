package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"path/filepath"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/etcd"
	"github.com/routerd/routerd/store/kube"
)

// socketPath returns the socket that flags and environment name.
func (a *daemon) socketPath() (string, error) {
	switch {
	case a.lab == "" && a.host == "":
	case a.lab == "" || a.host == "":
		return "", usagef("--lab and --host go together: name the lab and one of its hosts")
	case a.socket != "":
		return "", usagef("--socket and --lab exclude each other")
	case a.resolveLab == nil:
		return "", usagef("--lab: this routerctl is built without labs; name the host's socket with --socket")
	default:
		return a.resolveLab(a.lab, a.host)
	}
	if a.socket != "" {
		return a.socket, nil
	}
	if s := a.getenv("ROUTERD_SOCKET"); s != "" {
		return s, nil
	}
	return defaultSocket, nil
}

// openStore opens the datastore: Kubernetes' API or an external etcd when the
// environment names one and no flag asks for a certain daemon, else through the
// daemon.
func (a *daemon) openStore(ctx context.Context) (store.Store, error) {
	direct, err := a.direct()
	if err != nil {
		return nil, err
	}
	if direct.kube != nil {
		return opened(kube.Open(*direct.kube))
	}
	return opened(a.openEtcd(ctx))
}

// opened keeps a nil pointer out of the interface.
func opened[S store.Store](s S, err error) (store.Store, error) {
	if err != nil {
		return nil, err
	}
	return s, nil
}

// openEtcd opens an external etcd, or that which the daemon serves.
func (a *daemon) openEtcd(ctx context.Context) (*etcd.Store, error) {
	direct, err := a.direct()
	switch {
	case err != nil:
		return nil, err
	case direct.kube != nil:
		return nil, usagef("DATASTORE_TYPE=kubernetes: the command is for etcd only: save and restore the etcd of the API server")
	case direct.etcd != nil:
		return etcd.Open(ctx, *direct.etcd)
	}
	socket, err := a.reachSocket(ctx)
	if err != nil {
		return nil, err
	}
	return etcd.Open(ctx, etcd.Config{Endpoints: []string{"unix://" + socket}})
}

// direct is the datastore that is used without a daemon; neither: there is none.
type direct struct {
	kube *kube.Config
	etcd *etcd.Config
}

func (d direct) isSet() bool { return d.kube != nil || d.etcd != nil }

// direct returns the datastore that --config or the environment names, unless a flag asks
// for a certain daemon.
func (a *daemon) direct() (d direct, err error) {
	if a.socket != "" || a.lab != "" || a.host != "" {
		if a.kubeconfig != "" {
			return d, usagef("--kubeconfig names a cluster, and --socket and --lab a daemon: give one of them")
		}
		if a.config != "" {
			return d, usagef("--config names a datastore, and --socket and --lab a daemon: give one of them")
		}
		return d, nil
	}
	getenv, err := a.settings()
	if err != nil {
		return d, err
	}
	k, ok, err := kube.ConfigFromEnv(getenv)
	if err != nil {
		return d, err
	}
	if ok {
		k.UserAgent = "routerctl/" + version
		d.kube = &k
		return d, nil
	}
	e, ok, err := etcd.ConfigFromEnv(getenv)
	if err == nil && ok {
		d.etcd = &e
	}
	return d, err
}

// reachSocket returns the daemon's socket after a try to connect, for gRPC's
// own errors say little of why a socket cannot be used.
func (a *daemon) reachSocket(ctx context.Context) (string, error) {
	socket, err := a.socketPath()
	if err != nil {
		return "", err
	}
	if socket, err = filepath.Abs(socket); err != nil {
		return "", fmt.Errorf("socket %s: %w", socket, err)
	}
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", socket)
	if err != nil {
		return "", a.socketError(socket, err)
	}
	return socket, c.Close()
}

// socketError says why the daemon cannot be reached and what to do.
func (a *daemon) socketError(socket string, err error) error {
	switch {
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("connect to routerd at %s: permission denied: the socket is for root; run this command as root, for instance with sudo", socket)
	case errors.Is(err, fs.ErrNotExist) && a.plugin:
		return &notRunningError{fmt.Sprintf("connect to routerd: there is no socket at %s: this command queries the daemon of a node; run it in routerd's pod on that node: kubectl -n kube-system exec POD -- routerctl …", socket)}
	case errors.Is(err, fs.ErrNotExist):
		return &notRunningError{fmt.Sprintf("connect to routerd: there is no socket at %s: routerd is not running on this host, or uses another socket; see `systemctl status routerd`, or name the socket with --socket", socket)}
	case errors.Is(err, syscall.ECONNREFUSED):
		return &notRunningError{fmt.Sprintf("connect to routerd: nothing listens on %s: routerd has stopped; see `systemctl status routerd` and `journalctl -u routerd`", socket)}
	}
	return fmt.Errorf("connect to routerd at %s: %w; see `systemctl status routerd`", socket, err)
}

// notRunningError says that there is no daemon.
type notRunningError struct{ message string }

func (e *notRunningError) Error() string { return e.message }

// withOperator runs f with a connection to the daemon and a deadline.
func (a *daemon) withOperator(cmd *cobra.Command, f func(context.Context, apiv1.OperatorClient) error) error {
	ctx, cancel := a.withDeadline(cmd)
	defer cancel()
	return explain(ctx, a.askOperator(ctx, func(op apiv1.OperatorClient) error { return f(ctx, op) }))
}

// askOperator runs f with a connection to the daemon.
func (a *daemon) askOperator(ctx context.Context, f func(apiv1.OperatorClient) error) error {
	return ask(ctx, a, apiv1.NewOperatorClient, f)
}

// eachPart calls yield with each message of a stream, by its Recv, until the daemon ends it.
func eachPart[A any](recv func() (*A, error), yield func(*A) error) error {
	for {
		a, err := recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := yield(a); err != nil {
			return err
		}
	}
}

// ask runs f with a client of one of the daemon's services.
func ask[C any](ctx context.Context, a *daemon, client func(grpc.ClientConnInterface) C, f func(C) error) error {
	socket, err := a.reachSocket(ctx)
	if err != nil {
		return err
	}
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("connect to routerd at %s: %w", socket, err)
	}
	err = f(client(conn))
	awaitDeadline(ctx, err)
	if closeErr := conn.Close(); err == nil && closeErr != nil {
		err = closeErr
	}
	return err
}

// awaitDeadline waits for the end of a deadline that err says has passed. The daemon keeps it too, and
// may be the first to say so, with its own error or by ending the stream (RFC 9113, section 7: CANCEL).
func awaitDeadline(ctx context.Context, err error) {
	switch status.Code(err) {
	case codes.DeadlineExceeded, codes.Canceled:
		if end, ok := ctx.Deadline(); ok && time.Until(end) < time.Second {
			<-ctx.Done()
		}
	}
}

// showing completes a command that shows an answer of the daemon: get asks for it,
// and table prints it unless -o has it printed as it came. What is wrong with the
// command's arguments its Args have found before.
func showing[C any, M proto.Message](a *app, c *cobra.Command, client func(grpc.ClientConnInterface) C,
	get func(context.Context, C) (M, error), table func(io.Writer, M) error,
) *cobra.Command {
	var output string
	outputFlag(c, &output)
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := checkOutput(output); err != nil {
			return err
		}
		ctx, cancel := a.withDeadline(cmd)
		defer cancel()
		return explain(ctx, ask(ctx, a.daemon, client, func(from C) error {
			r, err := get(ctx, from)
			if err != nil {
				return err
			}
			if output != "table" {
				return printProto(a.stdout, r, output)
			}
			return table(a.stdout, r)
		}))
	}
	return c
}

// explain puts an error into words: what a deadline that has passed means, and
// the message of a gRPC status without its wrapping.
func explain(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(ctx.Err(), context.DeadlineExceeded) && !errors.Is(err, store.ErrInvalid) {
		return context.Cause(ctx)
	}
	if errors.Is(err, context.Canceled) {
		return errors.New("interrupted")
	}
	if s, ok := status.FromError(err); ok && s.Code() != codes.OK {
		if s.Code() == codes.Unimplemented {
			return fmt.Errorf("this routerd does not support the request (%s); its version differs from routerctl's: see `routerctl version`", s.Message())
		}
		return fmt.Errorf("routerd: %s", s.Message())
	}
	return err
}
