// Package soak lets a small cluster live through a long time of changes and faults,
// chosen at random from a seed that can be given again, and holds all the time what
// was promised: who reaches whom and who does not, no address with two owners, no
// lost packet where no link was cut, and nothing that grows.
package soak

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/traffic"
	"github.com/routerd/routerd/store"
)

// Options say what is run. Lab is up, has no pods, and is the caller's to take
// down; its first host runs the datastore.
type Options struct {
	Lab     *lab.Lab
	BinDir  string // where the programs are
	Seed    uint64
	For     time.Duration         // at least: the group of changes under way ends
	Modes   []store.Encapsulation // of the pool, of those without ipip; the first is the lab's
	Members int                   // of the datastore, the lab's hosts from the first on: 1 or 3
	Log     *slog.Logger          // each change, as it is made
}

// Report says what a run went through.
type Report struct {
	Seed    uint64
	Took    time.Duration
	Moves   map[string]int // how often each was made
	Refused map[string]int // of these, by a fault that was there at the time
	Settled int            // how often the cluster came to rest and was checked
	Pairs   int            // pairs of pods that were asked, all told
	Denied  int            // of these, those that must not answer
	Packets int            // of the running traffic
	Lost    int            // of these, while a link was cut or just back
	Base    map[string]Usage
	End     map[string]Usage

	// Aged is, of each host, the daemon that was compared with itself over the longest time.
	Aged map[string]Aged

	// How many records of IPAM and endpoints the datastore has, by kind.
	BaseRecords, EndRecords map[store.Kind]int
}

// Aged says what a daemon used when the cluster was as in the beginning, for the first
// time in the daemon's life and once more later.
type Aged struct {
	For         time.Duration // between the two
	First, Last Usage
}

// String is the report as lines of text.
func (r Report) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "seed %d: %.0f s, %d changes, settled %d times\n", r.Seed, r.Took.Seconds(), sum(r.Moves), r.Settled)
	for _, name := range slices.Sorted(maps.Keys(r.Moves)) {
		fmt.Fprintf(&b, "  %-12s %5d, refused %d\n", name, r.Moves[name], r.Refused[name])
	}
	fmt.Fprintf(&b, "pairs asked: %d, of which %d must not answer\n", r.Pairs, r.Denied)
	fmt.Fprintf(&b, "packets: %d, lost while a link was cut: %d, else: 0\n", r.Packets, r.Lost)
	for _, h := range slices.Sorted(maps.Keys(r.End)) {
		fmt.Fprintf(&b, "%s: before %s; after %s\n", h, r.Base[h], r.End[h])
	}
	for _, h := range slices.Sorted(maps.Keys(r.Aged)) {
		fmt.Fprintf(&b, "%s, one daemon over %.0f s: before %s; after %s\n", h, r.Aged[h].For.Seconds(), r.Aged[h].First, r.Aged[h].Last)
	}
	for _, k := range recordKinds() {
		fmt.Fprintf(&b, "%s: before %d, after %d\n", k, r.BaseRecords[k], r.EndRecords[k])
	}
	return b.String()
}

func sum(m map[string]int) (n int) {
	for _, v := range m {
		n += v
	}
	return n
}

// profileAddr is where each host's daemon serves its profiles.
const profileAddr = "127.0.0.1:9099"

const (
	groupSize   = 5                // changes between two rests: so many faults may overlap
	podsPerHost = 6                // at most, beside the one that stays
	settleTime  = 90 * time.Second // for all that was promised to be true again
	rate        = 100              // packets a second of each flow
	historySize = 3 * groupSize    // changes that an error shows
	compareEach = 8                // rests from one comparison with the beginning to the next
)

// run is a run under way.
type run struct {
	o       Options
	l       *lab.Lab
	rng     *rand.Rand
	world   *world
	load    *traffic.Load
	report  Report
	history []string
	cut     bool // a link was cut in this group
	isKept  bool // the policy that denies was seen in force

	// What each daemon used when it was first measured, and when that was.
	first   map[string]Usage
	firstAt map[string]time.Time
}

// Run makes changes until the time is over. The error is the first promise that
// was broken, with the seed and the changes before it.
func Run(ctx context.Context, o Options) (Report, error) {
	r := &run{
		o: o, l: o.Lab, rng: rand.New(rand.NewPCG(o.Seed, 0)), world: newWorld(o.Lab.Hosts(), o.Members, elder(o.Lab.Hosts(), o.Seed), o.Modes),
		first: map[string]Usage{}, firstAt: map[string]time.Time{},
		report: Report{Seed: o.Seed, Moves: map[string]int{}, Refused: map[string]int{}, Base: map[string]Usage{}, End: map[string]Usage{}, Aged: map[string]Aged{}},
	}
	start := time.Now()
	err := r.live(ctx, start.Add(o.For))
	r.report.Took = time.Since(start)
	if err != nil {
		err = fmt.Errorf("seed %d, after %v and\n  %s\n%w", o.Seed, r.report.Took.Round(time.Second), strings.Join(r.history, "\n  "), err)
	}
	return r.report, err
}

// elder is the host whose daemon lives as long as the run.
func elder(hosts []string, seed uint64) string { return hosts[seed%uint64(len(hosts))] }

func (r *run) live(ctx context.Context, end time.Time) error {
	if err := r.begin(ctx); err != nil {
		return err
	}
	defer r.load.Stop()
	for time.Now().Before(end) {
		for range groupSize {
			if err := r.change(ctx, pick(r.rng, r.world)); err != nil {
				return err
			}
		}
		if err := r.settle(ctx); err != nil {
			return err
		}
		if r.report.Settled%compareEach == 0 {
			if err := r.compare(ctx); err != nil {
				return err
			}
		}
	}
	return r.finish(ctx)
}

// begin makes the members of the datastore and the pods that stay, and measures what
// the hosts use.
func (r *run) begin(ctx context.Context) error {
	for _, h := range r.world.hosts[1:r.world.members] {
		if err := r.routerctl(ctx, "", "cluster", "promote", h); err != nil {
			return err
		}
	}
	for _, h := range r.l.Hosts() {
		if err := r.attach(ctx, h+"/"+stays); err != nil {
			return err
		}
	}
	var pairs [][2]string
	hosts := r.l.Hosts()
	for i, h := range hosts {
		pairs = append(pairs, [2]string{h + "/" + stays, hosts[(i+1)%len(hosts)] + "/" + stays})
	}
	load, err := r.l.StartLoad(traffic.LoadOptions{Rate: rate}, pairs...)
	if err != nil {
		return err
	}
	r.load = load
	err = r.warm(ctx)
	if err == nil {
		r.load.Interval() // the first packets looked for neighbours
		err = r.measure(ctx, r.report.Base)
		r.remember(r.report.Base)
	}
	if err == nil {
		r.report.BaseRecords, err = r.records(ctx)
	}
	if err != nil {
		load.Stop()
	}
	return err
}

// warm lets each daemon come to rest once after a restart and a pod's life, as they
// are at the end too.
func (r *run) warm(ctx context.Context) error {
	for _, h := range r.l.Hosts() {
		if err := r.l.Restart(ctx, h); err != nil {
			return err
		}
		if err := r.attach(ctx, h+"/warm"); err != nil {
			return err
		}
	}
	if err := r.rest(ctx); err != nil {
		return err
	}
	for _, h := range r.l.Hosts() {
		if err := r.l.DetachPod(ctx, h+"/warm"); err != nil {
			return err
		}
		delete(r.world.pods, h+"/warm")
	}
	return r.rest(ctx)
}

// finish compares what the hosts use with the beginning: by daemons as old as they have
// become, and by new ones.
func (r *run) finish(ctx context.Context) error {
	if err := r.compare(ctx); err != nil {
		return err
	}
	for _, m := range r.world.renew() {
		if err := r.change(ctx, m); err != nil {
			return err
		}
	}
	if err := r.settle(ctx); err != nil {
		return err
	}
	return r.within(ctx, "nothing has grown", func(ctx context.Context) error {
		if err := r.measure(ctx, r.report.End); err != nil {
			return err
		}
		return errors.Join(grown(r.report.Base, r.report.End), r.more(ctx, r.report.End))
	})
}

// compare takes away all that was added, and compares each daemon that was compared
// before with what it used then, and its host with what there was in the beginning.
func (r *run) compare(ctx context.Context) error {
	for _, m := range r.world.undo() {
		if err := r.change(ctx, m); err != nil {
			return err
		}
	}
	if err := r.settle(ctx); err != nil {
		return err
	}
	now := map[string]Usage{}
	err := r.within(ctx, "nothing grows", func(ctx context.Context) error {
		if err := r.measure(ctx, now); err != nil {
			return err
		}
		return errors.Join(grown(same(r.first, now), now), r.more(ctx, now))
	})
	if err == nil {
		r.remember(now)
	}
	return err
}

// more says what there is more of than in the beginning, on hosts and in the datastore.
func (r *run) more(ctx context.Context, now map[string]Usage) error {
	records, err := r.records(ctx)
	if err != nil {
		return err
	}
	r.report.EndRecords = records
	return errors.Join(left(r.report.Base, now), multiplied(r.report.BaseRecords, records, len(r.l.Hosts())))
}

// remember keeps what the daemons use: of a new one to compare it later.
func (r *run) remember(now map[string]Usage) {
	known := same(r.first, now)
	for h, u := range now {
		first, is := known[h]
		if !is {
			r.first[h], r.firstAt[h] = u, time.Now()
			continue
		}
		a := Aged{For: time.Since(r.firstAt[h]), First: first, Last: u}
		if a.For > r.report.Aged[h].For {
			r.report.Aged[h] = a
		}
		r.o.Log.Info("compared", "host", h, "for", a.For.Round(time.Second), "first", first, "now", u)
	}
}

// change makes one change.
func (r *run) change(ctx context.Context, m move) error {
	r.o.Log.Info("change", "name", m.name, "what", m.what)
	r.history = append(r.history, time.Now().Format("15:04:05.000 ")+m.name+" "+m.what)
	r.history = r.history[max(0, len(r.history)-historySize):]
	r.report.Moves[m.name]++
	r.cut = r.cut || m.name == "cut"
	err := m.do(ctx, r)
	var broken *brokenError
	switch {
	case errors.As(err, &broken):
		return err
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil && !r.world.faulty():
		return fmt.Errorf("%s %s: %w", m.name, m.what, err)
	case err != nil:
		r.report.Refused[m.name]++
		r.o.Log.Info("refused", "name", m.name, "what", m.what, "error", err)
	}
	if err := r.stillDenied(ctx); err != nil {
		return err
	}
	return r.stillReaches(ctx)
}

// settle ends the faults, and waits until all is as promised.
func (r *run) settle(ctx context.Context) error {
	for _, m := range r.world.mend() {
		r.history = append(r.history, "mend: "+m.name+" "+m.what)
		if err := m.do(ctx, r); err != nil {
			return fmt.Errorf("mend: %s %s: %w", m.name, m.what, err)
		}
	}
	if err := r.rest(ctx); err != nil {
		return err
	}
	r.report.Settled++
	got := r.load.Interval()
	sum := got.Sum()
	r.report.Packets += sum.Sent
	if len(got.Silent()) > 0 {
		return fmt.Errorf("flows that sent nothing: %v", got.Silent())
	}
	if r.cut {
		r.report.Lost += sum.Lost()
	} else if bad := got.Bad(); len(bad) > 0 {
		return fmt.Errorf("packets were lost though no link was cut: %v", bad)
	}
	r.cut = false
	return nil
}

// rest waits until the cluster is as promised.
func (r *run) rest(ctx context.Context) error {
	for _, h := range r.l.Hosts() {
		if err := r.l.WaitReady(ctx, h); err != nil {
			return err
		}
	}
	if err := r.within(ctx, "what was left open is done", r.catchUp); err != nil {
		return err
	}
	if err := r.within(ctx, "each pod has the address that is stored, and nobody else", r.checkAddresses); err != nil {
		return err
	}
	if err := r.within(ctx, "BGP has its sessions", r.checkSessions); err != nil {
		return err
	}
	return r.within(ctx, "who reaches whom", r.checkReach)
}

// within polls for a state with a deadline.
func (r *run) within(ctx context.Context, what string, look func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, settleTime)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	var last error
	for {
		err := look(ctx)
		if err == nil {
			return nil
		}
		if ctx.Err() == nil {
			last = err // else it says no more than that the time is over
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: not within %v: %w", what, settleTime, errors.Join(last, ctx.Err()))
		case <-tick.C:
		}
	}
}

// store is the datastore as the first host's daemon shows it. It is asked when all
// faults have ended.
func (r *run) store(ctx context.Context) (store.Store, error) { return r.l.Store(ctx, r.l.Hosts()[0]) }

// Modes are those that a run changes between by default.
func Modes() []store.Encapsulation {
	return []store.Encapsulation{store.VXLANCrossSubnet, store.VXLAN, store.Direct}
}

// Topology is the cluster that a run wants: hosts in two racks, a spine that learns
// their routes and so carries all modes, and no pods. Beside the members of the
// datastore there is at least one host that is none.
// With dual pods have an address of each family, and hosts reach each other by both.
func Topology(first store.Encapsulation, members int, dual bool) lab.Topology {
	top := lab.DefaultTopology(max(lab.DefaultNodes, members+1))
	none, bgp := 0, true
	top.Pods, top.Spine.BGP, top.Pool.Encapsulation, top.Join = &none, &bgp, first, members > 1
	for i := range top.Nodes {
		top.Nodes[i].Config = map[string]any{"health": map[string]any{"listen": profileAddr, "profiles": true}}
	}
	if dual {
		top.Underlay, top.Pool6 = lab.UnderlayDual, &lab.Pool{}
	}
	return top
}
