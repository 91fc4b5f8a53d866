package reach

import (
	"cmp"
	"encoding/json"
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/routerd/routerd/cni/atomicfile"
	"github.com/routerd/routerd/dataplane"
)

// saved is an entry of the state file.
type saved struct {
	Node   string           `json:"node"`
	Family dataplane.Family `json:"family"`
	Near   dataplane.Answer `json:"near,omitempty"`
	Addr   netip.Addr       `json:"addr,omitzero"`
	Port   uint16           `json:"port,omitempty"`
	MTU    int              `json:"mtu,omitempty"`
	Pin    netip.AddrPort   `json:"pin,omitzero"`
}

// load reads the state file. One that cannot be used is no error: everything is
// measured anew.
func (p *Prober) load() map[key]Kept {
	out := map[key]Kept{}
	if p.cfg.StateFile == "" {
		return out
	}
	b, err := os.ReadFile(p.cfg.StateFile)
	var entries []saved
	if err == nil {
		err = json.Unmarshal(b, &entries)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		p.cfg.Log.Warn("what was measured before is lost", "file", p.cfg.StateFile, "error", err)
		return out
	}
	for _, e := range entries {
		if e.Node == "" || e.Family != dataplane.IPv4 && e.Family != dataplane.IPv6 || e.Near > dataplane.No || e.MTU < 0 || e.MTU > 65535 ||
			e.Addr.IsValid() && dataplane.FamilyOf(e.Addr) != e.Family {
			continue
		}
		out[key{e.Node, e.Family}] = Kept{Reach: dataplane.Reach{Near: e.Near, Addr: e.Addr, Port: e.Port, MTU: e.MTU}, Pin: e.Pin}
	}
	return out
}

// save writes the state file in one step.
func (l *loop) save() {
	l.saveAt = time.Time{}
	var entries []saved
	for k, v := range l.eng.kept() {
		entries = append(entries, saved{Node: k.node, Family: k.fam, Near: v.Reach.Near, Addr: v.Reach.Addr, Port: v.Reach.Port, MTU: v.Reach.MTU, Pin: v.Pin})
	}
	slices.SortFunc(entries, func(a, b saved) int { return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.Family, b.Family)) })
	if err := writeState(l.p.cfg.StateFile, entries); err != nil {
		l.log.Warn("what was measured is not kept", "error", err)
	}
}

func writeState(path string, entries []saved) error {
	if path == "" {
		return nil
	}
	b, err := json.Marshal(entries)
	if err != nil {
		return err
	}
	return atomicfile.Write(path, b, 0o600)
}
