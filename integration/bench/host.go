package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

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
}

// MeasureCNIHost brings one host up, attaches containers to it by routerd's
// plugin, and as many to a namespace beside it by ptp with host-local.
func MeasureCNIHost(ctx context.Context, binDir string, counts CNICounts, progress func(string)) (rows []Row, err error) {
	reference, err := referencePlugin(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, reference.close()) }()
	name := fmt.Sprintf("bench%d", os.Getpid())
	l, err := lab.Up(ctx, lab.Options{
		Name: name, Topology: lab.DefaultTopology(1), BinDir: binDir, NoPods: true, Replace: true, Progress: progress,
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
	ours := Plugin{Path: filepath.Join(binDir, cni.PluginType), Dirs: binDir, Config: conf, Space: l.Space(host)}
	series := []struct{ n, callers int }{{counts.OneByOne, 1}, {counts.AtOnce, counts.Callers}}
	for _, n := range counts.Bursts {
		series = append(series, struct{ n, callers int }{n, n})
	}
	for _, c := range series {
		progress(fmt.Sprintf("CNI: %d containers, %d at a time", c.n, c.callers))
		var times [2]CNITimes
		for i, p := range []Plugin{ours, reference.Plugin} {
			prefix := fmt.Sprintf("%s-%d%d-", name, c.callers, i)
			// The first few pay for cold caches.
			if _, err := MeasureCNI(ctx, p, prefix, 3, 1); err != nil {
				return nil, err
			}
			if times[i], err = MeasureCNI(ctx, p, prefix, c.n, c.callers); err != nil {
				return nil, err
			}
		}
		for _, p := range []float64{50, 95} {
			rows = append(rows, Row{
				What: fmt.Sprintf("CNI ADD, %d at a time, p%g", c.callers, p), Against: "ptp with host-local", Unit: Milliseconds,
				Ours: ms(Percentile(times[0].Add, p)), Reference: ms(Percentile(times[1].Add, p)),
			})
		}
		rows = append(rows, Row{
			What: fmt.Sprintf("CNI DEL, %d at a time, p50", c.callers), Against: "ptp with host-local", Unit: Milliseconds,
			Ours: ms(Percentile(times[0].Del, 50)), Reference: ms(Percentile(times[1].Del, 50)),
		})
	}
	return rows, nil
}

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
