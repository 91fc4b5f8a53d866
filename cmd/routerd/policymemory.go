package main

import (
	"os"
	"path/filepath"

	"github.com/routerd/routerd/control/enforce"
	"github.com/routerd/routerd/control/journal"
)

// policyMemory opens what is remembered of policy, for a start at which the
// datastore does not answer. One that was damaged is not used, for what it lacks
// may have denied something: it is begun anew.
func (d *router) policyMemory(p *policies) enforce.Memory {
	log := d.log.With("component", "policy")
	path := filepath.Join(d.cfg.StateDir, "policy.journal")
	err := os.MkdirAll(d.cfg.StateDir, 0o700)
	var j *journal.Journal
	if err == nil {
		j, err = journal.Open(path, log)
	}
	if err == nil && j.Damage().Lines > 0 {
		log.Warn("what is remembered of policy was damaged and is not used", "copy", j.Damage().Copy)
		if err = j.Close(); err == nil {
			err = os.Remove(path)
		}
		if err == nil {
			j, err = journal.Open(path, log)
		}
	}
	if err != nil {
		log.Warn("policy is not remembered: after a reboot without the datastore no workload is attached", "error", err)
		return nil
	}
	p.memory = j
	return j
}
