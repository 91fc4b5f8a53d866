package soak

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/integration/lab/ns"
	"github.com/routerd/routerd/integration/lab/traffic"
	"github.com/routerd/routerd/store"
)

// checkReach asks from every pod to every other, in each family.
func (r *run) checkReach(ctx context.Context) error {
	places := slices.Sorted(maps.Keys(r.world.pods))
	allowed := slices.DeleteFunc(slices.Clone(places), func(p string) bool { return p == r.world.denied })
	for _, family := range r.families() {
		m, err := r.l.Reachability(ctx, allowed, family)
		if err != nil {
			return err
		}
		if bad := m.Failures(); len(bad) > 0 {
			return fmt.Errorf("%d pairs do not reach each other, the first: %s", len(bad), bad[0])
		}
		asked, _ := m.Pairs()
		r.report.Pairs += asked
	}
	r.world.rested = allowed
	if r.world.denied == "" {
		return nil
	}
	for _, to := range r.world.others(r.world.denied) {
		if err := r.denies(ctx, to); err != nil {
			return err
		}
	}
	r.isKept = true
	return nil
}

// families are the ways to ask whether a pod reaches another.
func (r *run) families() []traffic.Options {
	if r.l.Topology().Pool6 == nil {
		return []traffic.Options{{}}
	}
	return []traffic.Options{{}, {IPv6: true}}
}

// denies asks once, in each family, from the pod that may reach no other.
func (r *run) denies(ctx context.Context, to string) error {
	for _, family := range r.families() {
		reply, err := r.l.Ping(ctx, r.world.denied, to, family)
		if err != nil {
			return err
		}
		if reply.OK {
			return fmt.Errorf("%s reaches %s, which a policy denies", r.world.denied, to)
		}
		r.report.Pairs++
		r.report.Denied++
	}
	return nil
}

// stillReaches asks, in each family, one pair of pods that no fault keeps from each other.
func (r *run) stillReaches(ctx context.Context) error {
	from, to, ok := r.world.pair(sum(r.report.Moves))
	if !ok {
		return nil
	}
	for _, family := range r.families() {
		reply, err := r.l.Ping(ctx, from, to, family)
		if err != nil {
			return err
		}
		if !reply.OK {
			return fmt.Errorf("%s does not reach %s: %s; no fault of theirs is left", from, to, reply)
		}
		r.report.Pairs++
	}
	return nil
}

// stillDenied asks once what a policy that is in force denies: no fault undoes it.
func (r *run) stillDenied(ctx context.Context) error {
	others := r.world.others(r.world.denied)
	if r.world.denied == "" || !r.isKept || len(others) == 0 {
		return nil
	}
	if err := r.denies(ctx, others[r.report.Denied%len(others)]); err != nil {
		return fmt.Errorf("%w since long", err)
	}
	return nil
}

// checkAddresses compares the pods' addresses with the datastore's.
func (r *run) checkAddresses(ctx context.Context) error {
	owners, err := r.allocated(ctx)
	if err != nil {
		return err
	}
	var errs []error
	for where, addrs := range r.world.pods {
		for _, a := range addrs {
			if owners[a] == "" || strings.HasPrefix(owners[a], store.ReserveHandle("")) {
				errs = append(errs, fmt.Errorf("%s of %s is %q's in the datastore", a, where, owners[a]))
			}
			delete(owners, a)
		}
	}
	for a, handle := range owners {
		if !strings.HasPrefix(handle, store.ReserveHandle("")) && !strings.Contains(handle, "tunnel-addr") {
			errs = append(errs, fmt.Errorf("%s is held by %s, which is gone", a, handle))
		}
	}
	return errors.Join(errs...)
}

// allocated returns who holds which address.
func (r *run) allocated(ctx context.Context) (map[netip.Addr]string, error) {
	st, err := r.store(ctx)
	if err != nil {
		return nil, err
	}
	defer st.Close()
	blocks, _, err := st.List(ctx, store.KindIPAMBlock, "")
	if err != nil {
		return nil, err
	}
	out := map[netip.Addr]string{}
	for _, o := range blocks {
		b, ok := o.Value.(*store.Block)
		if !ok {
			return nil, fmt.Errorf("block %s cannot be read", o.Key)
		}
		all, err := ipam.Allocations(o.Key.CIDR(), b)
		if err != nil {
			return nil, err
		}
		for _, a := range all {
			out[a.Addr] = a.Handle
		}
	}
	return out, nil
}

// recordKinds lists what each workload and each host leaves in the datastore.
func recordKinds() []store.Kind {
	return []store.Kind{store.KindWorkloadEndpoint, store.KindIPAMHandle, store.KindIPAMBlock, store.KindIPAMAffinity}
}

// records counts the datastore's records.
func (r *run) records(ctx context.Context) (map[store.Kind]int, error) {
	st, err := r.store(ctx)
	if err != nil {
		return nil, err
	}
	defer st.Close()
	out := map[store.Kind]int{}
	for _, k := range recordKinds() {
		list, _, err := st.List(ctx, k, "")
		if err != nil {
			return nil, err
		}
		out[k] = len(list)
	}
	return out, nil
}

// multiplied says of which records there are more than before. A host may have kept a
// block more for its next workloads.
func multiplied(base, end map[store.Kind]int, hosts int) error {
	var errs []error
	for _, k := range recordKinds() {
		may := base[k]
		if k == store.KindIPAMBlock || k == store.KindIPAMAffinity {
			may += hosts
		}
		if end[k] > may {
			errs = append(errs, fmt.Errorf("the datastore has %d of %s, and had %d", end[k], k, base[k]))
		}
	}
	return errors.Join(errs...)
}

// Usage is what a host's daemon uses, and what there is of it on the host.
type Usage struct {
	Memory      int // resident, in KiB, without pages of files
	Heap        int // what Go's collector has found in use, in KiB
	Goroutines  int
	Descriptors int
	Threads     int
	Devices     int
	Routes      int
	Rules       int // lines of the rule set, without what packets put into it
	Files       int

	process ns.Process        // of the daemon
	lists   map[string]string // of devices, routes and rules, by what the error calls them
}

// String is the usage as a line.
func (u Usage) String() string {
	return fmt.Sprintf("%d MiB, %d of them in use, %d goroutines, %d descriptors, %d threads, %d devices, %d routes, %d lines of rules, %d files",
		u.Memory>>10, u.Heap>>10, u.Goroutines, u.Descriptors, u.Threads, u.Devices, u.Routes, u.Rules, u.Files)
}

// measure looks at all hosts.
func (r *run) measure(ctx context.Context, into map[string]Usage) error {
	for _, h := range r.l.Hosts() {
		u, err := r.usage(ctx, h)
		if err != nil {
			return fmt.Errorf("measure %s: %w", h, err)
		}
		into[h] = u
	}
	return nil
}

func (r *run) usage(ctx context.Context, h string) (u Usage, err error) {
	p, err := r.l.Daemon(h)
	if err != nil {
		return u, err
	}
	u.process = p
	if err := r.profile(ctx, h, &u); err != nil {
		return u, err
	}
	proc := filepath.Join("/proc", strconv.Itoa(p.PID))
	status, err := os.ReadFile(filepath.Join(proc, "status"))
	if err != nil {
		return u, err
	}
	if u.Memory, err = anonymousKiB(string(status)); err != nil {
		return u, err
	}
	for name, n := range map[string]*int{"fd": &u.Descriptors, "task": &u.Threads} {
		entries, err := os.ReadDir(filepath.Join(proc, name))
		if err != nil {
			return u, err
		}
		*n = len(entries)
	}
	u.lists = map[string]string{}
	for _, list := range []struct {
		what, command string
		n             *int
	}{
		{devices, "ip -o link", &u.Devices},
		{routes, "ip -o route show table all proto 77", &u.Routes},
		{rules, "nft -s list ruleset", &u.Rules},
	} {
		out, err := r.l.Output(ctx, h, strings.Fields(list.command)...)
		if err != nil {
			return u, err
		}
		if list.what == rules {
			out = lasting(out)
		}
		u.lists[list.what], *list.n = out, strings.Count(out, "\n")
	}
	err = filepath.WalkDir(r.stateDir(h), func(_ string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			u.Files++
		}
		return err
	})
	return u, err
}

// profile asks a daemon for its heap, once garbage has been collected, and its goroutines.
func (r *run) profile(ctx context.Context, h string, u *Usage) error {
	for _, p := range []struct {
		path, before string // what stands before the number
		unit         int
		n            *int
	}{
		{"heap?gc=1&debug=1", "# HeapAlloc = ", 1 << 10, &u.Heap},
		{"goroutine?debug=1", "goroutine profile: total ", 1, &u.Goroutines},
	} {
		body, err := ns.Get(ctx, r.l.Space(h), "http://"+profileAddr+"/debug/pprof/"+p.path)
		if err != nil {
			return err
		}
		_, rest, _ := strings.Cut(string(body), p.before)
		digits, _, _ := strings.Cut(rest, "\n")
		n, err := strconv.Atoi(digits)
		if err != nil {
			return fmt.Errorf("%s: no number after %q: %w", p.path, p.before, err)
		}
		*p.n = n / p.unit
	}
	return nil
}

// lasting returns a listing of nft(8) without the elements of sets that packets fill,
// which go by themselves, and with each other element on a line of its own.
func lasting(listing string) string {
	var b strings.Builder
	filled, within := false, false // the set is filled by packets; the line is of its elements
	for line := range strings.Lines(listing) {
		text := strings.TrimSpace(line)
		elements, begins := strings.CutPrefix(text, "elements = {")
		switch {
		case strings.HasPrefix(text, "set ") || strings.HasPrefix(text, "map "):
			filled = false
		case strings.HasPrefix(text, "flags "):
			filled = strings.Contains(text, "dynamic")
		}
		if within = within || begins; !within {
			b.WriteString(line)
			continue
		}
		elements, ends := strings.CutSuffix(elements, "}")
		within = !ends
		for e := range strings.SplitSeq(elements, ",") {
			if e = strings.TrimSpace(e); e != "" && !filled {
				b.WriteString(e + "\n")
			}
		}
	}
	return b.String()
}

// anonymousKiB reads RssAnon of proc_pid_status(5). The program's own pages are left out: more of
// them are there the more of the program has run, and the kernel takes them back as it likes.
func anonymousKiB(status string) (int, error) {
	for line := range strings.Lines(status) {
		if rest, ok := strings.CutPrefix(line, "RssAnon:"); ok {
			return strconv.Atoi(strings.Fields(rest)[0])
		}
	}
	return 0, errors.New("no RssAnon")
}

// What is listed line by line.
const (
	devices = "devices"
	routes  = "routes"
	rules   = "lines of rules"
)

// What may come and go by itself.
const (
	moreDescriptors = 12       // connections being made anew
	moreThreads     = 8        // of Go's runtime
	moreGoroutines  = 20       // requests and connections under way
	moreFiles       = 6        // etcd's log segments and snapshots
	moreMemory      = 16 << 10 // KiB that the runtime keeps of a burst
	heapFactor      = 1.5
)

// bound is how much of something there may be.
type bound struct {
	what         string
	was, is, may int
}

func exceeded(h string, b, e Usage, bounds []bound) error {
	var errs []error
	for _, c := range bounds {
		if c.is > c.may {
			errs = append(errs, fmt.Errorf("%s has %d %s, and had %d%s", h, c.is, c.what, c.was, added(b.lists[c.what], e.lists[c.what])))
		}
	}
	return errors.Join(errs...)
}

// left says of what there is more on the hosts than before, whatever became of the daemons.
func left(base, end map[string]Usage) error {
	var errs []error
	for _, h := range slices.Sorted(maps.Keys(base)) {
		b, e := base[h], end[h]
		errs = append(errs, exceeded(h, b, e, []bound{
			{devices, b.Devices, e.Devices, b.Devices},
			{routes, b.Routes, e.Routes, b.Routes + len(base)}, // a block more of each host
			{rules, b.Rules, e.Rules, b.Rules},
			{"files", b.Files, e.Files, b.Files + moreFiles},
		}))
	}
	return errors.Join(errs...)
}

// grown says what the daemons have more of than before.
func grown(base, end map[string]Usage) error {
	var errs []error
	for _, h := range slices.Sorted(maps.Keys(base)) {
		b, e := base[h], end[h]
		errs = append(errs, exceeded(h, b, e, []bound{
			{"KiB of memory", b.Memory, e.Memory, b.Memory + moreMemory},
			{"KiB of heap", b.Heap, e.Heap, int(float64(b.Heap) * heapFactor)},
			{"goroutines", b.Goroutines, e.Goroutines, b.Goroutines + moreGoroutines},
			{"descriptors", b.Descriptors, e.Descriptors, b.Descriptors + moreDescriptors},
			{"threads", b.Threads, e.Threads, b.Threads + moreThreads},
		}))
	}
	return errors.Join(errs...)
}

// same returns of the first measurements of daemons those of daemons that still run.
func same(first, now map[string]Usage) map[string]Usage {
	out := map[string]Usage{}
	for h, u := range first {
		if u.process == now[h].process {
			out[h] = u
		}
	}
	return out
}

// added shows the lines of a list that were not in it before.
func added(before, after string) string {
	had := map[string]int{}
	for line := range strings.Lines(before) {
		had[line]++
	}
	var b strings.Builder
	for line := range strings.Lines(after) {
		if had[line]--; had[line] < 0 {
			b.WriteString("\n  + " + strings.TrimSpace(line))
		}
	}
	return b.String()
}
