package bench

import (
	"fmt"
	"runtime"
	"time"

	"github.com/routerd/routerd/control/policy"
	"github.com/routerd/routerd/control/policy/policytest"
	"github.com/routerd/routerd/store"
)

// MeasurePolicySync returns rows for a host that comes up in a cluster: from
// what the datastore tells until its ruleset is known, and what the calculator
// keeps of it in memory. No program that could be asked for the same is at hand.
func MeasurePolicySync(endpoints, policies int) ([]Row, error) {
	const rounds = 3
	events := policytest.Cluster(endpoints, policies)
	before := heap()
	var calc *policy.Calculator
	var kept uint64
	took, err := best(rounds, func() (time.Duration, error) {
		calc = policy.New(policy.Config{Node: policytest.Node})
		start := time.Now()
		calc.Update(store.Batch{Events: events, Synced: true})
		d, ok := calc.Flush()
		took := time.Since(start)
		if n := len(d.PutPolicies); !ok || n < policies { // namespaces have some, too
			return 0, fmt.Errorf("%d policies are in force, want all of %d", n, policies)
		}
		return took, nil
	})
	if err != nil {
		return nil, err
	}
	if after := heap(); after > before {
		kept = after - before
	}
	runtime.KeepAlive(calc)
	runtime.KeepAlive(events)
	what := fmt.Sprintf("policy sync, %d endpoints, %d policies", endpoints, policies)
	return []Row{
		{What: what, Ours: ms(took), Unit: Milliseconds},
		{What: what + ": heap", Ours: float64(kept) / (1 << 20), Unit: MiB},
	}, nil
}

// heap returns how many bytes are in use after what nobody uses was collected.
func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
