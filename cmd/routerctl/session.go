package main

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	apiv1 "github.com/routerd/routerd/control/api/v1"
)

// sshConnection is the variable in which sshd(8) says between which addresses and ports a session is.
const sshConnection = "SSH_CONNECTION"

// environment is [os.Getenv]. sudo(8) and su(1) take the variable of the session from what they run; where it is not
// set, the processes that this one was started by have it.
func environment(name string) string {
	v, set := os.LookupEnv(name)
	if set || name != sshConnection {
		return v
	}
	for pid := os.Getppid(); pid > 1; {
		dir := filepath.Join("/proc", strconv.Itoa(pid))
		if env, err := os.ReadFile(filepath.Join(dir, "environ")); err == nil {
			for e := range bytes.SplitSeq(env, []byte{0}) {
				if v, ok := strings.CutPrefix(string(e), sshConnection+"="); ok {
					return v
				}
			}
		}
		// Its parent is the second field behind its name, which is in parentheses (proc_pid_stat(5)).
		stat, err := os.ReadFile(filepath.Join(dir, "stat"))
		if err != nil {
			return ""
		}
		f := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
		if len(f) < 2 {
			return ""
		}
		if pid, err = strconv.Atoi(string(f[1])); err != nil {
			return ""
		}
	}
	return ""
}

// session returns the two ends of the operator's SSH session; ok is false where there is none.
func session(getenv func(string) string) (client, host netip.AddrPort, ok bool) {
	f := strings.Fields(getenv(sshConnection)) // client, its port, server, its port
	if len(f) != 4 {
		return client, host, false
	}
	client, err := parseEnd(f[0], f[1])
	if err != nil {
		return client, host, false
	}
	host, err = parseEnd(f[2], f[3])
	return client, host, err == nil
}

func parseEnd(addr, port string) (netip.AddrPort, error) {
	a, err := netip.ParseAddr(addr)
	if err != nil {
		return netip.AddrPort{}, err
	}
	p, err := strconv.ParseUint(port, 10, 16)
	return netip.AddrPortFrom(a.Unmap(), uint16(p)), err
}

// checkSession refuses to write what would end the session in which this command was given. Where etcd is used directly,
// and while the daemon cannot say, nothing is refused.
func (a *app) checkSession(ctx context.Context, changes []*apiv1.BGPChange) error {
	client, host, ok := session(a.getenv)
	if !ok || len(changes) == 0 {
		return nil
	}
	direct, err := a.direct()
	if err != nil || direct.isSet() {
		return err
	}
	var r *apiv1.SessionResponse
	err = ask(ctx, a.daemon, apiv1.NewOperatorClient, func(o apiv1.OperatorClient) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		stream, err := o.Session(ctx)
		if err != nil {
			return err
		}
		for part := range parts(changes) {
			if err := stream.Send(&apiv1.SessionRequest{Changes: part, Client: client.String(), Host: host.String()}); err != nil {
				break // the answer says why
			}
		}
		r, err = stream.CloseAndRecv()
		return err
	})
	if err != nil && status.Code(err) != codes.InvalidArgument {
		fmt.Fprintf(a.stderr, "note: this SSH session is not checked: %v\n", err)
		return nil
	}
	if err != nil || r.GetEnds() == "" {
		return err
	}
	return fmt.Errorf("this SSH session, from %s to %s, would end: %s: nothing was written; allow it first, or in the same command, or use --force", client, host, r.GetEnds())
}
