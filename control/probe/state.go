package probe

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/routerd/routerd/cni/atomicfile"
	"github.com/routerd/routerd/dataplane"
)

// record is what outlives a restart of one path.
type record struct {
	Path    string           `json:"path"`
	Result  dataplane.Answer `json:"result"`
	Need    Setting          `json:"off"`
	MTU     int              `json:"mtu,omitempty"`
	Reason  string           `json:"reason,omitempty"`
	Goodput float64          `json:"bytesPerSecond,omitempty"`
	At      int64            `json:"at"` // Unix seconds of the last answer
}

// file is the form of the file: records by what the faults of offloads depend
// on, all of one kernel.
type file struct {
	Kernel string            `json:"kernel"`
	Paths  map[string]record `json:"paths"`
}

// load reads the records that hold for this kernel. A file that is not there
// has none.
func load(path, kernel string) (map[string]record, error) {
	if path == "" {
		return map[string]record{}, nil
	}
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return map[string]record{}, nil
	}
	if err != nil {
		return map[string]record{}, fmt.Errorf("read findings: %w", err)
	}
	var f file
	if err := json.Unmarshal(b, &f); err != nil {
		return map[string]record{}, fmt.Errorf("read findings: %w", err)
	}
	if f.Kernel != kernel || f.Paths == nil {
		return map[string]record{}, nil
	}
	return f.Paths, nil
}

// saveGap is how often the file is written at most: at a start with many peers
// each finding would else write the whole of it.
const saveGap = 2 * time.Second

// save writes the records if they changed, and not too soon after the last
// time unless it is the end. What was known of peers that are not targets at
// present stays: they may be back.
func (p *Prober) save(known map[string]record, now time.Time, end bool) {
	p.mu.Lock()
	if p.cfg.File == "" || !p.dirty || !end && now.Before(p.saved.Add(saveGap)) {
		p.mu.Unlock()
		return
	}
	p.dirty, p.saved = false, now
	for _, t := range p.tracks {
		if t.Settled {
			known[t.Target.carrier()] = record{
				Path: t.settledPath, Result: t.Result, Need: t.Need, MTU: t.MTU, Reason: t.Reason, Goodput: t.Goodput, At: t.At,
			}
		}
	}
	p.mu.Unlock()
	trim(known)
	b, err := json.MarshalIndent(file{p.cfg.Kernel, known}, "", "\t")
	if err == nil {
		err = atomicfile.Write(p.cfg.File, append(b, '\n'), 0o600)
	}
	if err != nil {
		p.cfg.Log.Warn("findings cannot be kept for the next start", "file", p.cfg.File, "error", err)
	}
}

// maxRecords bounds the file: nodes come and go for years.
const maxRecords = 20000

// trim drops those that answered least lately.
func trim(known map[string]record) {
	for len(known) > maxRecords {
		oldest := ""
		for k, r := range known {
			if oldest == "" || r.At < known[oldest].At {
				oldest = k
			}
		}
		delete(known, oldest)
	}
}
