package main

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/routerd/routerd/control/bootid"
	"github.com/routerd/routerd/dataplane/nft"
)

// policyMark is the file that says that what is on disk of the datastore's state is
// at least as new as the rules in the kernel. Like these it does not outlive the boot.
func policyMark(runDir string) string { return filepath.Join(runDir, "policy.remembered") }

// loadsPolicy reports whether the rules may follow the state on disk: where the
// kernel has none of ours, as after a boot, or none that are newer. A daemon that
// was killed may have known more than it had written.
func (d *router) loadsPolicy() bool {
	if d.policy == nil || d.noPolicy != nil {
		return false
	}
	log := d.log.With("component", "policy")
	found, err := d.kernel.DeleteTable(nft.TableName, true)
	if err != nil {
		log.Warn("rules do not follow the state on disk: it is not known whether the kernel has newer ones", "error", err)
		return false
	}
	if !found {
		return true
	}
	boot, err := bootid.Read()
	if err != nil {
		log.Warn("rules do not follow the state on disk", "error", err)
		return false
	}
	mark, err := os.ReadFile(policyMark(d.cfg.RunDir))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		log.Warn("rules do not follow the state on disk", "error", err)
	}
	return err == nil && string(mark) == boot
}

// setPolicyMark says that the disk has all that the kernel's rules follow from.
func (d *router) setPolicyMark() {
	boot, err := bootid.Read()
	if err == nil {
		err = os.WriteFile(policyMark(d.cfg.RunDir), []byte(boot), 0o600)
	}
	if err != nil {
		d.log.Warn("a restart without the datastore will attach no workload until it answers", "component", "policy", "error", err)
	}
}

// clearPolicyMark takes the mark away: the kernel is to have rules that may not be on
// disk yet.
func (d *router) clearPolicyMark() {
	if err := os.Remove(policyMark(d.cfg.RunDir)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		d.log.Error("a restart without the datastore may go back to an older policy; remove the file", "component", "policy", "error", err)
	}
}
