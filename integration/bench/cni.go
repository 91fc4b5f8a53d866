package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"time"

	"github.com/routerd/routerd/integration/lab/ns"
)

// Plugin is a CNI plugin as a runtime executes it (CNI specification 1.1,
// section 2): one process per verb, the configuration on its standard input.
type Plugin struct {
	Path   string // of the binary
	Dirs   string // CNI_PATH: where it finds plugins that it calls itself
	Config []byte // of this one plugin, as the runtime hands it over
	Space  string // named network namespace that the runtime runs in
}

func (p Plugin) call(ctx context.Context, verb, container, netns string) error {
	cmd := exec.CommandContext(ctx, p.Path)
	cmd.Env = []string{
		"CNI_COMMAND=" + verb, "CNI_CONTAINERID=" + container, "CNI_IFNAME=eth0",
		"CNI_NETNS=" + netns, "CNI_PATH=" + p.Dirs, "PATH=/usr/sbin:/usr/bin:/sbin:/bin",
	}
	cmd.Stdin = bytes.NewReader(p.Config)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	// The namespace is inherited by what the thread starts.
	if err := ns.Do(p.Space, cmd.Start); err != nil {
		return fmt.Errorf("start %s: %w", p.Path, err)
	}
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("%s %s: %w: %s", p.Path, verb, err, strings.TrimSpace(out.String()))
	}
	return nil
}

// CNITimes is what a series of ADDs and DELs took.
type CNITimes struct {
	Add, Del []time.Duration
}

// MeasureCNI attaches and detaches n containers by each of the plugins, callers
// at once, in that many rounds: in each round the plugins have their turns one
// after the other, the order of which changes, so that what else the machine
// does meets all of them. Containers have namespaces of their own, made before and
// removed after; names begin with prefix. before, which may be nil, is called
// before each series of one verb.
func MeasureCNI(ctx context.Context, plugins []Plugin, prefix string, n, callers, rounds int, before func(plugin int, verb string) error) (times []CNITimes, err error) {
	each := max(1, n/rounds)
	name := func(p, i int) string { return fmt.Sprintf("%s%d-%d", prefix, p, i) }
	var made []string
	defer func() {
		for _, m := range made {
			err = errors.Join(err, ns.Delete(m))
		}
	}()
	for p := range plugins {
		for i := range each {
			if err := ns.Create(name(p, i)); err != nil {
				return nil, err
			}
			made = append(made, name(p, i))
		}
	}
	times = make([]CNITimes, len(plugins))
	for round := range rounds {
		for turn := range plugins {
			p := (round + turn) % len(plugins)
			verb := func(ctx context.Context, verb string) ([]time.Duration, error) {
				var err error
				if before != nil {
					err = before(p, verb)
				}
				if err != nil && verb == "ADD" {
					return nil, err
				}
				took, callErr := Each(ctx, each, callers, func(ctx context.Context, i int) error {
					return plugins[p].call(ctx, verb, fmt.Sprintf("bench-%s-%d", name(p, i), round), ns.Path(name(p, i)))
				})
				return took, errors.Join(err, callErr)
			}
			add, err := verb(ctx, "ADD")
			// What was attached is detached whatever became of the rest: addresses
			// are left in no store.
			del, delErr := verb(context.WithoutCancel(ctx), "DEL")
			if err := errors.Join(err, delErr); err != nil {
				return nil, err
			}
			times[p].Add = append(times[p].Add, add...)
			times[p].Del = append(times[p].Del, del...)
		}
	}
	return times, nil
}
