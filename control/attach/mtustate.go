package attach

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/routerd/routerd/control/atomicfile"
)

// mtuFile is the file, beside the records, that says to which MTU all
// workloads were brought: a change concerns hundreds of them, and to rewrite
// every record would take longer than the change.
const mtuFile = "mtu"

// mtuState is what mtuFile holds.
type mtuState struct {
	// Reached is what the workloads that follow were brought to; zero: each has
	// what its record says.
	Reached MTU `json:"reached"`
	// Tried is what was set out for since, the last one still wanted. Any of
	// them may be there.
	Tried []MTU `json:"tried,omitempty"`
}

// apply returns a record of disk as the state says that it is by now.
func (s mtuState) apply(r record) record {
	if r.FixedMTU {
		return r
	}
	v4, v6 := r.families()
	reached := s.Reached.of(v4, v6)
	switch {
	case reached == 0:
	case len(r.TriedMTUs) == 0:
		r.MTU = reached
	default:
		// Written while it could not be changed; it may have been since.
		r.TriedMTUs = append(r.TriedMTUs, reached)
	}
	for _, m := range s.Tried {
		if mtu := m.of(v4, v6); mtu != 0 {
			r.TriedMTUs = append(r.TriedMTUs, mtu)
		}
	}
	return r
}

// setOut notes on disk that workloads are about to be brought to m, unless they
// are there already.
func (x *mtus) setOut(m MTU) error {
	s := x.file
	if s.Reached == m && len(s.Tried) == 0 {
		return nil
	}
	s.Tried = append(slices.DeleteFunc(slices.Clone(s.Tried), func(t MTU) bool { return t == m }), m)
	return x.save(s)
}

// save writes the state. The caller holds pass.
func (x *mtus) save(s mtuState) error {
	b, err := json.Marshal(s)
	if err == nil {
		err = atomicfile.Write(filepath.Join(x.dir, mtuFile), append(b, '\n'), 0o600)
	}
	if err != nil {
		return fmt.Errorf("write the MTU of workloads: %w", err)
	}
	x.file = s
	return nil
}

// load reads the state and gives the records what it says. Without a file
// each record speaks for itself. With one that cannot be read nothing is
// known, and every workload is looked at.
func (x *mtus) load(records map[ID]record) error {
	b, err := os.ReadFile(filepath.Join(x.dir, mtuFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the MTU of workloads: %w", err)
	}
	var s mtuState
	if err := json.Unmarshal(b, &s); err != nil {
		x.log.Error("the MTU of workloads is not known: all are checked", "file", mtuFile, "error", err)
		for id, r := range records {
			if !r.FixedMTU {
				r.TriedMTUs = append(r.TriedMTUs, r.MTU)
				records[id] = r
			}
		}
		return nil
	}
	x.file = s
	x.mu.Lock()
	if x.want == (MTU{}) {
		x.want = s.Reached // until [Attacher.SetMTU] says otherwise: the datastore may be away
	}
	x.mu.Unlock()
	if most := s.Reached; most != (MTU{}) {
		for _, m := range s.Tried {
			most = most.Max(m)
		}
		x.mu.Lock()
		x.reached = x.reached.Max(most)
		x.mu.Unlock()
	}
	for id, r := range records {
		records[id] = s.apply(r)
	}
	return nil
}
