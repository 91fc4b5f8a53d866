package cni

import (
	"encoding/json"
	"errors"
	"io"
	"log/slog"
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
	p := &plugin{stdout: stdout, stderr: stderr, version: "1.1.0"}
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
}

func (c *call) attachment() attachment {
	return attachment{Network: c.Name, ContainerID: c.in.ContainerID, Ifname: c.in.IfName}
}

func (c *call) workload() workload {
	if c.args.K8S_POD_NAME == "" {
		return workload{Orchestrator: "cni", Namespace: "default"}
	}
	return workload{
		Orchestrator: "k8s",
		Namespace:    string(c.args.K8S_POD_NAMESPACE),
		Pod:          string(c.args.K8S_POD_NAME),
	}
}

// do reads the input, connects, and calls fn within the verb's time.
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
	log := slog.New(slog.NewTextHandler(p.stderr, &slog.HandlerOptions{Level: level}))
	cl, err := dial(conf.Socket, timeout(conf))
	if err != nil {
		return err
	}
	defer cl.close()
	err = cl.explain(fn(&call{Config: conf, args: args, in: in, client: cl, log: log}))
	log.Debug("called routerd", "verb", verb, "container", in.ContainerID, "interface", in.IfName,
		"duration", time.Since(start), "error", err)
	return err
}

func (p *plugin) add(in *skel.CmdArgs) error {
	return p.do("ADD", in, (*Config).addTimeout, func(c *call) error {
		ips, err := requestedIPs(c.Config, c.args)
		if err != nil {
			return err
		}
		b, err := c.client.call("Add", addRequest{
			Attachment: c.attachment(), Workload: c.workload(), Netns: in.Netns, MTU: int32(c.MTU),
			IPv4Pools: c.IPAM.IPv4Pools, IPv6Pools: c.IPAM.IPv6Pools,
			AssignIPv4: c.IPAM.AssignIPv4.On(true), AssignIPv6: c.IPAM.AssignIPv6.On(false),
			RequestedIPs:      ips,
			AllowIPForwarding: c.ContainerSettings.AllowIPForwarding,
		}.encode())
		var s *rpcError
		if errors.As(err, &s) && s.code == codeFailedPrecondition {
			return types.NewError(types.ErrInvalidNetNS, s.message, "")
		}
		if err != nil {
			return err
		}
		var resp addResponse
		if err := resp.decode(b); err != nil {
			return err
		}
		result, err := resultOf(resp, in, c.CNIVersion)
		if err != nil {
			return err
		}
		return result.PrintTo(p.stdout)
	})
}

func (p *plugin) del(in *skel.CmdArgs) error {
	return p.do("DEL", in, (*Config).delTimeout, func(c *call) error {
		_, err := c.client.call("Del", delRequest{Attachment: c.attachment(), Workload: c.workload(), Netns: in.Netns}.encode())
		return err
	})
}

func (p *plugin) check(in *skel.CmdArgs) error {
	return p.do("CHECK", in, (*Config).addTimeout, func(c *call) error {
		req := checkRequest{Attachment: c.attachment(), Workload: c.workload(), Netns: in.Netns}
		if err := remember(&req, in); err != nil {
			return err
		}
		_, err := c.client.call("Check", req.encode())
		return err
	})
}

func (p *plugin) status(in *skel.CmdArgs) error {
	err := p.do("STATUS", in, func(*Config) time.Duration { return statusTimeout }, func(c *call) error {
		_, err := c.client.call("Status", nil)
		return err
	})
	// What other verbs may try again later is the answer here (section STATUS:
	// code 50, the plugin cannot serve ADD).
	var e *types.Error
	if errors.As(err, &e) && e.Code == types.ErrTryAgainLater {
		return types.NewError(types.ErrPluginNotAvailable, e.Msg, e.Details)
	}
	return err
}

func (p *plugin) gc(in *skel.CmdArgs) error {
	return p.do("GC", in, (*Config).addTimeout, func(c *call) error {
		req := gcRequest{Network: c.Name}
		for _, v := range c.ValidAttachments {
			req.Valid = append(req.Valid, attachment{Network: c.Name, ContainerID: v.ContainerID, Ifname: v.IfName})
		}
		b, err := c.client.call("GC", req.encode())
		if err != nil {
			return err
		}
		var resp gcResponse
		if err := resp.decode(b); err != nil {
			return err
		}
		for _, r := range resp.Removed {
			c.log.Info("stale attachment removed", "container", r.ContainerID, "interface", r.Ifname)
		}
		return nil
	})
}
