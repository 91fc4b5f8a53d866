package labcmd

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/traffic"
	"github.com/routerd/routerd/store"
)

const (
	// How long the pods may take to reach each other after they are attached,
	// and the BGP sessions to come up. Both are long: under an emulated CPU
	// everything is.
	reachWithin   = 60 * time.Second
	sessionWithin = 20 * time.Second

	removeWithin = 30 * time.Second
)

// modeResult is what came of one encapsulation.
type modeResult struct {
	Encapsulation store.Encapsulation `json:"encapsulation"`
	Where         string              `json:"where"` // "here", or "VM"
	Asked         int                 `json:"pairsAsked"`
	Answered      int                 `json:"pairsAnswered"`
	Failures      []string            `json:"failures,omitempty"`
	Up            float64             `json:"upSeconds"`
	Total         float64             `json:"totalSeconds"`
	Error         string              `json:"error,omitempty"`
}

func (r modeResult) ok() bool { return r.Error == "" && r.Asked > 0 && r.Asked == r.Answered }

type demo struct {
	out, errOut io.Writer
	flags       topologyFlags
	modes       []string
	binDir      string
	vmRunner    string
	asJSON      bool
	inVM        bool // be brief, and end with the results for the demo outside of the machine
	parallel    bool
	prefix      string
	progress    *progress
}

func (c *commands) demo() *cobra.Command {
	d := &demo{out: c.stdout, errOut: c.stderr}
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Demonstrate every encapsulation in labs",
		Long: `For each encapsulation, bring up a lab, attach pods, show hosts, BGP sessions, blocks,
routes and which pods reach each other, and remove everything. The command succeeds
only if every pair of pods answered.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := untilSignal(cmd)
			defer stop()
			return d.run(ctx)
		},
	}
	fl := cmd.Flags()
	fl.StringArrayVar(&d.modes, "encapsulation", nil, "one of "+encapsulations()+"; repeatable (default: all)")
	fl.IntVar(&d.flags.nodes, "nodes", lab.DefaultNodes, "number of hosts")
	fl.IntVar(&d.flags.pods, "pods", lab.DefaultPods, "number of pods on each host")
	fl.StringVar(&d.vmRunner, "vm-runner", "", "`command` that runs what follows it in a virtual machine, for encapsulations whose device this kernel lacks")
	fl.BoolVar(&d.asJSON, "json", false, "print only the results, as JSON")
	fl.BoolVar(&d.parallel, "parallel", false, "run the labs in parallel")
	fl.BoolVar(&d.inVM, "in-vm", false, "show no progress, and end with a line that holds the results as JSON")
	if err := fl.MarkHidden("in-vm"); err != nil {
		panic(err) // the flag is defined one line above
	}
	fl.StringVar(&d.prefix, "name", "demo", "prefix of the names of the labs")
	binDirFlag(cmd, &d.binDir)
	return cmd
}

func (d *demo) run(ctx context.Context) error {
	dir, err := binDir(d.binDir)
	if err != nil {
		return err
	}
	d.binDir = dir
	here, elsewhere, err := d.split()
	if err != nil {
		return err
	}
	start := time.Now()
	told := d.errOut
	if d.inVM {
		told = io.Discard
	}
	d.progress = newProgress(told)
	defer d.progress.done()

	// The machine takes a while to boot: it does so from the beginning, beside
	// the labs here. The end of this function ends it, whatever happens.
	vmCtx, stopVM := context.WithCancel(ctx)
	defer stopVM()
	vm := d.startVM(vmCtx, elsewhere)
	results, err := d.showAll(ctx, here)
	if err != nil {
		return err
	}
	if len(elsewhere) > 0 {
		d.progress.step("waiting for the virtual machine: " + joinModes(elsewhere))
		results = append(results, d.showVM(<-vm, elsewhere)...)
	}
	if err := d.summary(results, time.Since(start)); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("demo: interrupted: %w", err)
	}
	if slices.ContainsFunc(results, func(r modeResult) bool { return !r.ok() }) {
		return errors.New("demo: not every pair answered")
	}
	return nil
}

// split tells the modes that this kernel can show from those that it cannot.
func (d *demo) split() (here, elsewhere []store.Encapsulation, err error) {
	modes := store.Encapsulations()
	if len(d.modes) > 0 {
		modes = nil
		for _, m := range d.modes {
			e, err := store.ParseEncapsulation(m)
			if err != nil {
				return nil, nil, fmt.Errorf("--encapsulation: %w", err)
			}
			modes = append(modes, e)
		}
	}
	for _, m := range modes {
		ok, err := lab.Supported(m)
		if err != nil {
			return nil, nil, err
		}
		if ok {
			here = append(here, m)
		} else {
			elsewhere = append(elsewhere, m)
		}
	}
	return here, elsewhere, nil
}

func joinModes(modes []store.Encapsulation) string {
	var s []string
	for _, m := range modes {
		s = append(s, string(m))
	}
	return strings.Join(s, ", ")
}

// vmOutcome is what came of the virtual machine.
type vmOutcome struct {
	output []byte
	took   time.Duration
	err    error
}

// startVM runs this same demo in a virtual machine. The channel gets one value
// once the machine is gone.
func (d *demo) startVM(ctx context.Context, modes []store.Encapsulation) <-chan vmOutcome {
	done := make(chan vmOutcome, 1)
	if len(modes) == 0 {
		return done
	}
	runner := strings.Fields(d.vmRunner)
	if len(runner) == 0 {
		done <- vmOutcome{err: fmt.Errorf("this kernel has no device for %s: load its module (modprobe ipip), or give --vm-runner", joinModes(modes))}
		return done
	}
	args := append(runner[1:], "routerctl", "lab", "demo", "--in-vm", "--parallel", "--nodes", fmt.Sprint(d.flags.nodes), "--pods", fmt.Sprint(d.flags.pods))
	for _, m := range modes {
		args = append(args, "--encapsulation", string(m))
	}
	go func() {
		start := time.Now()
		var out bytes.Buffer
		cmd := exec.CommandContext(ctx, runner[0], args...)
		cmd.Stdout, cmd.Stderr = &out, &out
		// A group of its own: the terminal's Ctrl-C must not end it before it is
		// told, by a signal that it may act on.
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
		cmd.WaitDelay = removeWithin
		err := cmd.Run()
		done <- vmOutcome{out.Bytes(), time.Since(start), err}
	}()
	return done
}

// trailerMark begins the line with the results in the output of the demo in the
// machine.
const trailerMark = "demo-results: "

// showVM prints what the machine printed and takes the results from it.
func (d *demo) showVM(o vmOutcome, modes []store.Encapsulation) []modeResult {
	output, trailer, _ := strings.Cut(string(o.output), trailerMark)
	if !d.asJSON {
		fmt.Fprintf(d.out, "\n######  %s, in a virtual machine whose kernel has the device  ######\n\n%s", joinModes(modes), output)
	}
	return vmResults(trailer, o, modes)
}

// vmResults reads the results of the demo in the machine. What it does not
// tell of a mode is a failure.
func vmResults(trailer string, o vmOutcome, modes []store.Encapsulation) []modeResult {
	var told []modeResult
	err := o.err
	if line, _, _ := strings.Cut(trailer, "\n"); err == nil || line != "" {
		if jerr := json.Unmarshal([]byte(strings.TrimSpace(line)), &told); jerr != nil && err == nil {
			err = fmt.Errorf("read the results of the machine: %w", jerr)
		}
	}
	var results []modeResult
	for _, m := range modes {
		r := modeResult{Encapsulation: m, Total: o.took.Seconds()}
		if i := slices.IndexFunc(told, func(r modeResult) bool { return r.Encapsulation == m }); i >= 0 {
			r = told[i]
		} else if err == nil {
			r.Error = "the machine says nothing of it"
		}
		if err != nil && r.Error == "" && !r.ok() {
			r.Error = err.Error()
		}
		r.Where = "VM"
		results = append(results, r)
	}
	return results
}

// showAll shows the modes in their order: one after the other, or as much at
// once as there is.
func (d *demo) showAll(ctx context.Context, modes []store.Encapsulation) ([]modeResult, error) {
	results := make([]modeResult, len(modes))
	outputs := make([]bytes.Buffer, len(modes))
	var g errgroup.Group
	if !d.parallel {
		g.SetLimit(1)
	}
	printed := make(chan struct{}) // closed once all before have been printed
	close(printed)
	for i, e := range modes {
		before, done := printed, make(chan struct{})
		printed = done
		g.Go(func() error {
			defer close(done)
			if ctx.Err() != nil {
				results[i] = modeResult{Encapsulation: e, Where: "here", Error: "interrupted"}
				return nil
			}
			results[i] = d.show(ctx, e, &outputs[i])
			<-before
			_, err := outputs[i].WriteTo(d.out)
			return err
		})
	}
	return results, g.Wait()
}

// show brings one lab up, prints what is to be seen and takes it down.
func (d *demo) show(ctx context.Context, e store.Encapsulation, out io.Writer) modeResult {
	r := modeResult{Encapsulation: e, Where: "here"}
	start := time.Now()
	if d.asJSON {
		out = io.Discard
	}
	fmt.Fprintf(out, "\n######  %s: %s  ######\n\n", e, explain(e))
	if err := d.visit(ctx, e, &r, out); err != nil {
		r.Error = err.Error()
	}
	r.Total = time.Since(start).Seconds()
	return r
}

func explain(e store.Encapsulation) string {
	switch e {
	case store.Direct:
		return "packets travel as they are; the spine learns the pods' blocks by BGP"
	case store.IPIP:
		return "IP in IP between all hosts"
	case store.VXLAN:
		return "VXLAN between all hosts"
	case store.IPIPCrossSubnet:
		return "as they are within a rack, IP in IP between racks"
	case store.VXLANCrossSubnet:
		return "as they are within a rack, VXLAN between racks"
	}
	return string(e)
}

func (d *demo) visit(ctx context.Context, e store.Encapsulation, r *modeResult, out io.Writer) (err error) {
	step := func(what string) { d.progress.step(string(e) + ": " + what) }
	t := lab.DefaultTopology(d.flags.nodes)
	t.Pods, t.Pool.Encapsulation = &d.flags.pods, e
	start := time.Now()
	name := d.prefix + "-" + strings.ToLower(string(e))
	l, err := lab.Up(ctx, lab.Options{Name: name, Topology: t, BinDir: d.binDir, Replace: true, Progress: step})
	if err != nil {
		return err
	}
	defer func() {
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeWithin)
		defer cancel()
		step("removing lab " + name)
		err = errors.Join(err, l.Down(undo))
	}()
	r.Up = time.Since(start).Seconds()

	step("asking from every pod and host to every other")
	reach, cancel := context.WithTimeout(ctx, reachWithin)
	defer cancel()
	m, err := l.ReachabilityMatrix(reach, traffic.Options{})
	if err != nil {
		return err
	}
	if m.OK() {
		// The first packets also had to find their neighbours: these are for the
		// times.
		if m, err = l.ReachabilityMatrix(reach, traffic.Options{}); err != nil {
			return err
		}
	}
	r.Asked, r.Answered = m.Pairs()
	r.Failures = m.Failures()
	step("waiting for the BGP sessions")
	nodes, err := waitSessions(ctx, l)
	if err != nil {
		return err
	}
	return printLab(ctx, out, l, nodes, m)
}

// waitSessions asks every host about itself until all BGP sessions are up, or
// have had their time.
func waitSessions(ctx context.Context, l *lab.Lab) ([]*apiv1.NodeResponse, error) {
	deadline := time.Now().Add(sessionWithin)
	for {
		nodes, err := askAll(ctx, l)
		if err != nil {
			return nil, err
		}
		if sessionsUp(nodes) || time.Now().After(deadline) {
			return nodes, nil
		}
		if err := async.Sleep(ctx, 100*time.Millisecond); err != nil {
			return nil, err
		}
	}
}

func askAll(ctx context.Context, l *lab.Lab) ([]*apiv1.NodeResponse, error) {
	hosts := l.Hosts()
	nodes := make([]*apiv1.NodeResponse, len(hosts))
	g, ctx := errgroup.WithContext(ctx)
	for i, h := range hosts {
		g.Go(func() (err error) {
			nodes[i], err = l.Node(ctx, h)
			return err
		})
	}
	return nodes, g.Wait()
}

// sessionsUp reports whether every host has its sessions, as many as there are
// other hosts at least, and each is up.
func sessionsUp(nodes []*apiv1.NodeResponse) bool {
	for _, n := range nodes {
		if len(n.GetPeers()) < len(nodes)-1 {
			return false
		}
		for _, p := range n.GetPeers() {
			if p.GetState() != "up" {
				return false
			}
		}
	}
	return true
}
