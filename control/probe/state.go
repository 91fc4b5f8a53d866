package probe

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"slices"

	"github.com/routerd/routerd/control/atomicfile"
	"github.com/routerd/routerd/dataplane"
)

// file is what is kept over a restart of the daemon. What tunnels need holds for
// a kernel, also after a boot; what the underlay is, until the next boot.
type file struct {
	Kernel   string            `json:"kernel"`
	Paths    map[string]record `json:"paths"` // by what the faults of offloads depend on
	Boot     string            `json:"boot,omitempty"`
	Underlay []underlayRecord  `json:"underlay,omitempty"`
}

// record is what outlives a restart of one tunnel.
type record struct {
	Path    string           `json:"path"`
	Result  dataplane.Answer `json:"result"`
	Need    Setting          `json:"off"`
	MTU     int              `json:"mtu,omitempty"`
	Reason  string           `json:"reason,omitempty"`
	Goodput float64          `json:"bytesPerSecond,omitempty"`
	At      int64            `json:"at"` // Unix seconds of the last answer
	// Left says that the tunnel has been given up since, so that the result says nothing
	// to who may move to it again.
	Left bool `json:"left,omitempty"`
}

// useful reports whether a start would be any different without it.
func (r record) useful() bool { return r.Need != 0 || r.Result == dataplane.Yes }

// underlayRecord is what outlives a restart of the underlay towards a peer.
type underlayRecord struct {
	Node   string           `json:"node"`
	Family dataplane.Family `json:"family"`
	Near   dataplane.Answer `json:"near,omitempty"`
	Addr   netip.Addr       `json:"addr,omitzero"`
	Port   uint16           `json:"port,omitempty"`
	MTU    int              `json:"mtu,omitempty"`
	Pin    netip.AddrPort   `json:"pin,omitzero"`
	From   []netip.Addr     `json:"from,omitempty"` // whence its packets come
}

func (r underlayRecord) valid() bool {
	return r.Node != "" && (r.Family == dataplane.IPv4 || r.Family == dataplane.IPv6) && r.Near <= dataplane.No && r.MTU >= 0 && r.MTU <= 65535 &&
		(!r.Addr.IsValid() || dataplane.FamilyOf(r.Addr) == r.Family) &&
		!slices.ContainsFunc(r.From, func(a netip.Addr) bool { return !a.IsValid() || dataplane.FamilyOf(a) != r.Family })
}

// load reads what was kept. What cannot be used is no error: it is measured anew.
// former is where earlier versions kept what the underlay is.
func (p *Prober) load() (tunnels map[string]record, underlay map[peerKey]saved) {
	tunnels, underlay = map[string]record{}, map[peerKey]saved{}
	var f file
	err := readJSON(p.cfg.File, &f)
	records := f.Underlay
	if f.Boot == "" {
		err = errors.Join(err, readJSON(p.cfg.Former, &records))
	}
	if err != nil {
		p.cfg.Log.Warn("what was measured before cannot be read; measuring anew", "error", err)
	}
	if f.Kernel == p.kernel && f.Paths != nil {
		tunnels = f.Paths
	}
	for _, r := range records {
		if r.valid() && (f.Boot == "" || f.Boot == p.boot) {
			k := known{Reach: dataplane.Reach{Near: r.Near, Addr: r.Addr, Port: r.Port, MTU: r.MTU}, Pin: r.Pin}
			underlay[peerKey{r.Node, r.Family}] = saved{k, r.From}
		}
	}
	return tunnels, underlay
}

// readJSON reads a file into v. One that is not there changes nothing, and one
// that is damaged leaves nothing of itself.
func readJSON[T any](path string, v *T) error {
	if path == "" {
		return nil
	}
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var read T
	if err == nil {
		err = json.Unmarshal(b, &read)
	}
	if err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	*v = read
	return nil
}

// save writes what is known, in one step.
func (l *loop) save() {
	p := l.p
	if p.cfg.File == "" {
		return
	}
	f := file{Kernel: p.kernel, Paths: l.saved, Boot: p.boot}
	if l.tunnels != nil {
		f.Paths = l.tunnels.records()
	}
	for k, v := range l.eng.known() {
		f.Underlay = append(f.Underlay, underlayRecord{Node: k.node, Family: k.fam, Near: v.Reach.Near, Addr: v.Reach.Addr, Port: v.Reach.Port, MTU: v.Reach.MTU, Pin: v.Pin, From: v.sources})
	}
	slices.SortFunc(f.Underlay, func(a, b underlayRecord) int {
		return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.Family, b.Family))
	})
	b, err := json.MarshalIndent(f, "", "\t")
	if err == nil {
		err = atomicfile.Write(p.cfg.File, append(b, '\n'), 0o600)
	}
	if err == nil && p.cfg.Former != "" {
		if err = os.Remove(p.cfg.Former); errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
	}
	if err != nil {
		p.cfg.Log.Warn("what was measured is not kept for the next start", "file", p.cfg.File, "error", err)
	}
}

// maxRecords bounds the file: nodes come and go for years.
const maxRecords = 20000

// trim drops those that answered least lately.
func trim(records map[string]record) {
	for len(records) > maxRecords {
		oldest := ""
		for k, r := range records {
			if oldest == "" || r.At < records[oldest].At {
				oldest = k
			}
		}
		delete(records, oldest)
	}
}
