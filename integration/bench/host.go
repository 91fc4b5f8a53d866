package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/routerd/routerd/cni"
	"github.com/routerd/routerd/control/config"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/ns"
)

// referenceDirs are where distributions put the reference plugins.
func referenceDirs() []string { return []string{"/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni"} }

// CNICounts says how many containers the CNI series attach.
type CNICounts struct {
	OneByOne int
	AtOnce   int // in all, with Callers at a time
	Callers  int
	Bursts   []int // this many, all at the same moment

	// Delays are what is added to every answer of the datastore in turn, while
	// Delayed containers are attached one by one.
	Delays  []time.Duration
	Delayed int
}

// roundSize is how many containers one plugin attaches before the other has its
// turn.
const roundSize = 10

// MeasureCNIHost brings one host up, attaches containers to it by routerd's
// plugin, and as many to a namespace beside it by ptp with host-local. The host's
// datastore is etcd in this process, behind a connection that can be made slow.
func MeasureCNIHost(ctx context.Context, binDir string, counts CNICounts, progress func(string)) (rows []Row, err error) {
	reference, err := referencePlugin(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, reference.close()) }()
	slow, err := startSlowStore(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, slow.close()) }()
	name := fmt.Sprintf("bench%d", os.Getpid())
	topology := lab.DefaultTopology(1)
	topology.Nodes[0].Config = map[string]any{"datastore": map[string]any{"endpoints": []any{slow.endpoint()}, "embedded": nil}}
	l, err := lab.Up(ctx, lab.Options{
		Name: name, Topology: topology, BinDir: binDir, NoPods: true, Replace: true, Progress: progress,
	})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, l.Down(context.WithoutCancel(ctx))) }()
	host := l.Hosts()[0]
	conf, err := pluginConfig(cni.ConflistOptions{Socket: filepath.Join(filepath.Dir(lab.Socket(name, host)), config.CNISocketName)})
	if err != nil {
		return nil, err
	}
	s := cniSeries{
		name: name, slow: slow, progress: progress,
		plugins: []Plugin{{Path: filepath.Join(binDir, cni.PluginType), Dirs: binDir, Config: conf, Space: l.Space(host)}, reference.Plugin},
	}
	// The first few pay for cold caches.
	if _, err := MeasureCNI(ctx, s.plugins, name+"-warm-", 3, 1, 1, nil); err != nil {
		return nil, err
	}
	if err := s.measure(ctx, counts.OneByOne, 1, 0); err != nil {
		return nil, err
	}
	if err := s.measure(ctx, counts.AtOnce, counts.Callers, 0); err != nil {
		return nil, err
	}
	for _, n := range counts.Bursts {
		if err := s.measure(ctx, n, n, 0); err != nil {
			return nil, err
		}
	}
	for _, d := range counts.Delays {
		if err := s.measure(ctx, counts.Delayed, 1, d); err != nil {
			return nil, err
		}
	}
	return s.rows, nil
}

// cniSeries measures on one host.
type cniSeries struct {
	name     string
	slow     *slowStore
	plugins  []Plugin // ours, and the reference
	progress func(string)
	rows     []Row
}

// measure attaches n containers with that much delay in every answer of the
// datastore.
func (s *cniSeries) measure(ctx context.Context, n, callers int, delay time.Duration) error {
	what := fmt.Sprintf("%d at a time", callers)
	if delay > 0 {
		what += fmt.Sprintf(", etcd %v away", delay)
	}
	s.progress(fmt.Sprintf("CNI: %d containers, %s", n, what))
	s.slow.setDelay(delay)
	defer s.slow.setDelay(0)
	var before, written int64 // revisions
	times, err := MeasureCNI(ctx, s.plugins, fmt.Sprintf("%s-%d%d-", s.name, callers, delay.Milliseconds()), n, callers, max(1, n/max(roundSize, callers)),
		func(plugin int, verb string) error {
			// What one plugin leaves for afterwards is nothing that the other waits for.
			if err := s.slow.quiet(ctx); err != nil || plugin != 0 {
				return err
			}
			rev, err := s.slow.revision(ctx)
			if verb == "ADD" {
				before = rev
			} else {
				written += rev - before
			}
			return err
		})
	if err != nil {
		return err
	}
	for _, p := range []float64{50, 99} {
		s.rows = append(s.rows, Row{
			What: fmt.Sprintf("CNI ADD, %s, p%g", what, p), Against: "ptp with host-local", Unit: Milliseconds,
			Ours: ms(Percentile(times[0].Add, p)), Reference: ms(Percentile(times[1].Add, p)),
		}, Row{
			What: fmt.Sprintf("CNI DEL, %s, p%g", what, p), Against: "ptp with host-local", Unit: Milliseconds,
			Ours: ms(Percentile(times[0].Del, p)), Reference: ms(Percentile(times[1].Del, p)),
		})
	}
	s.rows = append(s.rows, Row{
		What: fmt.Sprintf("etcd transactions of an ADD, %s", what), Against: "Calico's IPAM alone, known from before", Unit: Apiece,
		Ours: float64(written) / float64(len(times[0].Add)), Reference: calicoTransactions,
	})
	return nil
}

// calicoTransactions is how many transactions Calico's IPAM writes for an
// address, beside those of the endpoint.
const calicoTransactions = 2

// pluginConfig returns what a runtime hands to the one plugin of a list (CNI
// specification 1.1, section 3, "Deriving request configuration").
func pluginConfig(o cni.ConflistOptions) ([]byte, error) {
	list, err := cni.Conflist(o)
	if err != nil {
		return nil, err
	}
	var l struct {
		CNIVersion string           `json:"cniVersion"`
		Name       string           `json:"name"`
		Plugins    []map[string]any `json:"plugins"`
	}
	if err := json.Unmarshal(list, &l); err != nil {
		return nil, fmt.Errorf("read the network configuration: %w", err)
	}
	if len(l.Plugins) != 1 {
		return nil, fmt.Errorf("the network configuration has %d plugins: want one", len(l.Plugins))
	}
	p := l.Plugins[0]
	delete(p, "capabilities")
	p["cniVersion"], p["name"] = l.CNIVersion, l.Name
	return json.Marshal(p)
}

// reference is ptp with host-local, in a namespace of its own.
type reference struct {
	Plugin
	dir string
}

func referencePlugin(ctx context.Context) (*reference, error) {
	for _, d := range referenceDirs() {
		if _, err := os.Stat(filepath.Join(d, "ptp")); err != nil {
			continue
		}
		data, err := os.MkdirTemp("", "routerd-bench-")
		if err != nil {
			return nil, err
		}
		r := &reference{dir: data, Plugin: Plugin{
			Path: filepath.Join(d, "ptp"), Dirs: d, Space: fmt.Sprintf("rdbench%d-ptp", os.Getpid()),
		}}
		r.Config, err = json.Marshal(map[string]any{
			"cniVersion": "1.0.0", "name": "bench", "type": "ptp", "mtu": 1450,
			"ipam": map[string]any{"type": "host-local", "subnet": "10.250.0.0/16", "dataDir": data},
		})
		if err == nil {
			err = ns.Create(r.Space)
		}
		if err == nil {
			err = ns.Do(r.Space, func() error { return ip(ctx, "link", "set", "lo", "up") })
		}
		if err != nil {
			return nil, errors.Join(err, r.close())
		}
		return r, nil
	}
	return nil, fmt.Errorf("the reference plugin ptp is in none of %v: install containernetworking-plugins", referenceDirs())
}

func (r *reference) close() error {
	return errors.Join(ns.Delete(r.Space), os.RemoveAll(r.dir))
}
