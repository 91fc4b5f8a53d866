package cni

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
)

// Versions returns the versions of the CNI specification that the plugin
// speaks.
func Versions() []string { return []string{"0.3.1", "0.4.0", "1.0.0", "1.1.0"} }

// Main does what the environment (CNI_COMMAND and the others of the CNI
// specification, section 2) and the standard input ask for. Results and errors
// go to the standard output; the log, and what the program is when nothing is
// asked, to stderr. It returns the exit code.
func Main(programVersion string, stdout, stderr io.Writer) int {
	p := &plugin{stdout: stdout, stderr: stderr, version: "1.1.0", program: filepath.Base(os.Args[0])}
	if p.program == LoopbackType {
		if err := loopback(programVersion); err != nil {
			p.printError(err)
			return 1
		}
		return 0
	}
	err := skel.PluginMainFuncsWithError(skel.CNIFuncs{
		Add: p.add, Del: p.del, Check: p.check, Status: p.status, GC: p.gc,
	}, version.PluginSupports(Versions()...), PluginType+" "+programVersion)
	if err == nil {
		return 0
	}
	p.printError(err)
	return 1
}

// plugin carries out one verb.
type plugin struct {
	stdout, stderr io.Writer
	version        string // of the configuration, once it is known
	program        string // the name under which it is executed
}

// printError prints an error as the specification wants it (section 5), which
// the library does without the version.
func (p *plugin) printError(e *types.Error) {
	b, err := json.MarshalIndent(struct {
		Version string `json:"cniVersion"`
		Code    uint   `json:"code"`
		Msg     string `json:"msg"`
		Details string `json:"details,omitempty"`
	}{p.version, e.Code, e.Msg, e.Details}, "", "    ")
	if err != nil {
		b = []byte(`{"code":999,"msg":"encode error"}`)
	}
	_, _ = p.stdout.Write(append(b, '\n'))
}

// call is one verb with its configuration and its connection.
type call struct {
	*Config
	args   *Args
	in     *skel.CmdArgs
	client *client
	log    *slog.Logger
	ipam   bool // another plugin makes the interface, and this is its IPAM plugin
}

// delegates reports whether another plugin gives the addresses.
func (c *call) delegates() bool { return !c.ipam && !c.IPAM.own() }

// context ends with the verb's time.
func (c *call) context() (context.Context, context.CancelFunc) {
	return context.WithDeadline(context.Background(), c.client.deadline)
}

// netns is the path of the container's network namespace for the daemon, which may run
// in a container of its own: a runtime names it below /var/run, and that is a symbolic
// link on the host (Filesystem Hierarchy Standard 3.0, 5.13) which an image lacks. The
// last element stays as it is: it may be gone, and /proc/PID/ns/net is a link by itself.
func (c *call) netns() string {
	if c.in.Netns == "" {
		return ""
	}
	dir, err := filepath.EvalSymlinks(filepath.Dir(c.in.Netns))
	if err != nil {
		return c.in.Netns
	}
	return filepath.Join(dir, filepath.Base(c.in.Netns))
}

func (c *call) attachment() attachment {
	return attachment{Network: c.Name, ContainerID: c.in.ContainerID, Ifname: c.in.IfName}
}

func (c *call) workload() workload {
	// Podman gives its containers' names as pods' without a namespace.
	if c.args.K8S_POD_NAME == "" || c.args.K8S_POD_NAMESPACE == "" {
		return workload{Orchestrator: "cni", Namespace: "default"}
	}
	return workload{
		Orchestrator: "k8s",
		Namespace:    string(c.args.K8S_POD_NAMESPACE),
		Pod:          string(c.args.K8S_POD_NAME),
		UID:          string(c.args.K8S_POD_UID),
	}
}

// statusPause is how long STATUS waits before it asks once more.
const statusPause = 100 * time.Millisecond

// do reads the input, connects, and calls fn within the verb's time. STATUS does so
// until the daemon serves: one that is started again is not to cost the node its
// readiness, by which Kubernetes takes all its pods out of their Services at once.
func (p *plugin) do(verb string, in *skel.CmdArgs, timeout func(*Config) time.Duration, fn func(*call) error) error {
	start := time.Now()
	conf, err := ParseConfig(in.StdinData)
	if err != nil {
		return err
	}
	p.version = conf.CNIVersion
	args, err := ParseArgs(in.Args)
	if err != nil {
		return err
	}
	level, err := conf.level()
	if err != nil {
		return err
	}
	log, closeLog := p.logger(conf, level)
	defer closeLog()
	for _, w := range conf.warnings() {
		log.Warn("configuration", "warning", w)
	}
	limit := timeout(conf)
	deadline := time.Now().Add(limit)
	for {
		err = ask(conf.Socket, deadline, limit, func(cl *client) error {
			return fn(&call{Config: conf, args: args, in: in, client: cl, log: log, ipam: conf.asIPAM(p.program)})
		})
		if verb != "STATUS" || !later(err) || time.Until(deadline) < 2*statusPause {
			break
		}
		time.Sleep(statusPause)
	}
	log.Debug("called routerd", "verb", verb, "container", in.ContainerID, "interface", in.IfName,
		"duration", time.Since(start), "error", err)
	return err
}

// ask connects to the daemon and calls fn with that.
func ask(socket string, deadline time.Time, limit time.Duration, fn func(*client) error) error {
	cl, err := dial(socket, deadline, limit)
	if err != nil {
		return err
	}
	defer cl.close()
	return cl.explain(fn(cl))
}

// later reports whether a failure may pass by itself.
func later(err error) bool {
	var e *types.Error
	return errors.As(err, &e) && e.Code == types.ErrTryAgainLater
}

func (p *plugin) add(in *skel.CmdArgs) error {
	return p.do("ADD", in, (*Config).addTimeout, func(c *call) error {
		if c.ipam {
			return p.allocate(c)
		}
		if !c.delegates() {
			return p.attach(c, delegated{})
		}
		ctx, cancel := c.context()
		defer cancel()
		got, err := c.delegateAdd(ctx)
		if err != nil {
			return err
		}
		if err = p.attach(c, got); err != nil {
			// The time may have run out: what the other plugin gave goes all the
			// same.
			undo, cancel := context.WithTimeout(context.Background(), c.delTimeout())
			defer cancel()
			_, undoErr := c.delegate(undo, "DEL")
			err = alsoFailed(c.client.explain(err), "undo: ", undoErr)
		}
		return err
	})
}

// alsoFailed adds to an error that something else failed too. The code stays.
func alsoFailed(err error, what string, other error) error {
	var e *types.Error
	if other == nil || !errors.As(err, &e) {
		return errors.Join(err, other)
	}
	return types.NewError(e.Code, e.Msg+"; and "+what+other.Error(), e.Details)
}

// attach has the daemon make the interface.
func (p *plugin) attach(c *call, from delegated) error {
	w, err := requestedOf(c.Config, c.args)
	if err != nil {
		return err
	}
	w.Given = append(w.Given, from.addresses...)
	var resp addResponse
	_, err = c.client.call("Add", addRequest{
		Attachment: c.attachment(), Workload: c.workload(), Netns: c.netns(), MTU: int32(c.MTU),
		IPv4Pools: w.IPv4Pools, IPv6Pools: w.IPv6Pools, AssignIPv4: w.IPv4, AssignIPv6: w.IPv6,
		RequestedIPs:      w.Addresses,
		AllowIPForwarding: c.ContainerSettings.AllowIPForwarding,
		Node:              c.Nodename,
		NamespaceLabels:   w.NamespaceLabels,
		MAC:               w.MAC,
		Given:             w.Given,
		FloatingIPs:       w.Floating,
		SourcePrefixes:    w.Sources,
		PodCIDR:           c.IPAM.podCIDR(),
	}, &resp)
	var s *callError
	if errors.As(err, &s) && s.code == codeFailedPrecondition {
		return types.NewError(types.ErrInvalidNetNS, s.message, "")
	}
	if err != nil {
		return err
	}
	result, err := resultOf(resp, c.in, c.CNIVersion, from.dns)
	if err != nil {
		return err
	}
	return result.PrintTo(p.stdout)
}

// logger logs to the standard error and to the configured file. A file that
// cannot be written is no reason to leave a container without network.
func (p *plugin) logger(conf *Config, level slog.Level) (*slog.Logger, func()) {
	out, done := p.stderr, func() {}
	var fileErr error
	if conf.LogFilePath != "" {
		var f *os.File
		if f, fileErr = os.OpenFile(conf.LogFilePath, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o640); fileErr == nil {
			out, done = io.MultiWriter(p.stderr, f), func() { _ = f.Close() }
		}
	}
	log := slog.New(slog.NewTextHandler(out, &slog.HandlerOptions{Level: level}))
	if fileErr != nil {
		log.Warn("log file cannot be written", "error", fileErr)
	}
	return log, done
}

func (p *plugin) del(in *skel.CmdArgs) error {
	return p.do("DEL", in, (*Config).delTimeout, func(c *call) error {
		_, err := c.client.call("Del", delRequest{
			Attachment: c.attachment(), Workload: c.workload(), Netns: c.netns(), AddressesOnly: c.ipam,
		}, &nothing{})
		if err != nil || !c.delegates() {
			return err
		}
		// Only now does nothing of the host use the address any more.
		ctx, cancel := c.context()
		defer cancel()
		_, err = c.delegate(ctx, "DEL")
		return err
	})
}

func (p *plugin) check(in *skel.CmdArgs) error {
	return p.do("CHECK", in, (*Config).addTimeout, func(c *call) error {
		if c.ipam {
			return c.checkAllocation()
		}
		if c.delegates() {
			ctx, cancel := c.context()
			defer cancel()
			if _, err := c.delegate(ctx, "CHECK"); err != nil {
				return err
			}
		}
		req := checkRequest{Attachment: c.attachment(), Workload: c.workload(), Netns: c.netns()}
		if err := remember(&req, in); err != nil {
			return err
		}
		_, err := c.client.call("Check", req, &nothing{})
		return err
	})
}

func (p *plugin) status(in *skel.CmdArgs) error {
	err := p.do("STATUS", in, (*Config).statusTimeout, func(c *call) error {
		_, err := c.client.call("Status", nothing{}, &nothing{})
		if err != nil || !c.delegates() {
			return err
		}
		ctx, cancel := c.context()
		defer cancel()
		_, err = c.delegate(ctx, "STATUS")
		return err
	})
	// What other verbs may try again later is the answer here (section STATUS:
	// code 50, the plugin cannot serve ADD).
	var e *types.Error
	if later(err) && errors.As(err, &e) {
		return types.NewError(types.ErrPluginNotAvailable, e.Msg, e.Details)
	}
	return err
}

// gc removes as much as it can, and has the other plugin do so, whatever else
// fails (section GC: plugins should continue on errors, and report them).
func (p *plugin) gc(in *skel.CmdArgs) error {
	return p.do("GC", in, (*Config).addTimeout, func(c *call) error {
		req := gcRequest{Network: c.Name}
		for _, v := range c.ValidAttachments {
			req.Valid = append(req.Valid, attachment{Network: c.Name, ContainerID: v.ContainerID, Ifname: v.IfName})
		}
		var resp gcResponse
		answered, failed := c.client.call("GC", req, &resp)
		if !answered {
			return failed // and nobody says what is still there
		}
		for _, r := range resp.Removed {
			c.log.Info("stale attachment removed", "container", r.ContainerID, "interface", r.Ifname)
		}
		if !c.delegates() || resp.Unlisted {
			return failed
		}
		conf, err := c.sparing(resp.Left)
		if err != nil {
			return errors.Join(failed, err)
		}
		ctx, cancel := c.context()
		defer cancel()
		_, err = c.delegateWith(ctx, "GC", conf)
		return alsoFailed(c.client.explain(failed), "", err)
	})
}
