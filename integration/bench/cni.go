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

// MeasureCNI attaches and detaches n containers by p, callers at once. Each
// has a namespace of its own, made before and removed after; names begin with
// prefix.
func MeasureCNI(ctx context.Context, p Plugin, prefix string, n, callers int) (times CNITimes, err error) {
	name := func(i int) string { return fmt.Sprintf("%s%d", prefix, i) }
	made := 0
	defer func() {
		for i := range made {
			err = errors.Join(err, ns.Delete(name(i)))
		}
	}()
	for ; made < n; made++ {
		if err := ns.Create(name(made)); err != nil {
			return CNITimes{}, err
		}
	}
	verb := func(ctx context.Context, verb string) ([]time.Duration, error) {
		return Each(ctx, n, callers, func(ctx context.Context, i int) error {
			return p.call(ctx, verb, "bench-"+name(i), ns.Path(name(i)))
		})
	}
	times.Add, err = verb(ctx, "ADD")
	// What was attached is detached whatever became of the rest: addresses
	// are left in no store.
	var delErr error
	times.Del, delErr = verb(context.WithoutCancel(ctx), "DEL")
	return times, errors.Join(err, delErr)
}
