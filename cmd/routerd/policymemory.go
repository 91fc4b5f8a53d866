package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/routerd/routerd/control/config"
	"github.com/routerd/routerd/control/enforce"
	"github.com/routerd/routerd/control/journal"
	"github.com/routerd/routerd/dataplane/nft"
)

// policyMemory opens what is remembered of policy, for a start at which the
// datastore does not answer. One that was damaged is not used, for what it lacks
// may have denied something: it is begun anew.
func (d *router) policyMemory(p *policies) enforce.Memory {
	log := d.log.With("component", "policy")
	path := policyJournal(d.cfg)
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
		// What cannot be kept up to date is not to be gone by later.
		err = errors.Join(err, forgetPolicy(d.cfg))
		log.Warn("policy is not remembered: after a reboot without the datastore no workload is attached", "error", err)
		p.unremembered = err
		return nil
	}
	p.memory = j
	return j
}

func policyJournal(c config.Config) string { return filepath.Join(c.StateDir, "policy.journal") }

// policyMark is the file that says that what is remembered of policy is at least
// as new as the rules in the kernel. Like these it does not outlive the boot.
func policyMark(runDir string) string { return filepath.Join(runDir, "policy.remembered") }

// forgetPolicy removes what is remembered of policy, and its mark.
func forgetPolicy(c config.Config) error {
	var errs []error
	for _, path := range []string{policyMark(c.RunDir), policyJournal(c)} {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("forget the policy of before: %w", err))
		}
	}
	return errors.Join(errs...)
}

// recallsPolicy reports whether the rules may follow what is remembered: where the
// kernel has none of ours, as after a boot, or none that are newer. A daemon that
// was killed may have known more than it had written.
func (d *router) recallsPolicy() bool {
	log := d.log.With("component", "policy")
	found, err := d.kernel.DeleteTable(nft.TableName, true)
	if err != nil {
		log.Warn("policy of before is not recalled: it is not known whether the kernel has newer rules", "error", err)
		return false
	}
	if !found {
		return true
	}
	boot, err := bootID()
	if err != nil {
		log.Warn("policy of before is not recalled", "error", err)
		return false
	}
	mark, err := os.ReadFile(policyMark(d.cfg.RunDir))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		log.Warn("policy of before is not recalled", "error", err)
	}
	return err == nil && string(mark) == boot
}

// policyRemembered sets the mark.
func (d *router) policyRemembered() {
	boot, err := bootID()
	if err == nil {
		err = os.WriteFile(policyMark(d.cfg.RunDir), []byte(boot), 0o600)
	}
	if err != nil {
		d.log.Warn("a restart without the datastore will attach no workload until it answers", "component", "policy", "error", err)
	}
}

// policyHeard takes the mark away: the kernel is to have rules that may not be
// remembered yet.
func (d *router) policyHeard() {
	if err := os.Remove(policyMark(d.cfg.RunDir)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		d.log.Error("a restart without the datastore may go back to an older policy; remove the file", "component", "policy", "error", err)
	}
}

// bootID tells boots apart: random(4).
func bootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the boot id: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}
