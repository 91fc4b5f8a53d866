package attach

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/routerd/routerd/control/atomicfile"
)

// datastoreFile is where is kept in which datastore the attachments are.
const datastoreFile = "datastore"

// kindOf names a kind of datastore, as datastore.kind does.
func (x *endpoints) kindOf() string {
	if x.kubernetes {
		return "kubernetes"
	}
	return "etcd"
}

// compareKind has everything written to the datastore again that an earlier process had in one of
// another kind: the cluster was moved. It is written down when that is done.
func (x *reclaimer) compareKind(dir string) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.kindFile = filepath.Join(dir, datastoreFile)
	b, err := os.ReadFile(x.kindFile)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return x.noteKind() // no process has said it yet
	case err != nil:
		return fmt.Errorf("read in which datastore the attachments are: %w", err)
	}
	was := strings.TrimSpace(string(b))
	if was == x.endpoints.kindOf() {
		return nil
	}
	if x.moved = x.ledger.has(state.attached); !x.moved {
		return x.noteKind()
	}
	x.log.Info("the datastore is another one; the attachments are written to it", "datastore", x.endpoints.kindOf(), "before", was)
	x.arm()
	return nil
}

// noteKind writes down in which datastore the attachments are. The caller has the lock.
func (x *reclaimer) noteKind() error {
	if err := atomicfile.Write(x.kindFile, []byte(x.endpoints.kindOf()+"\n"), 0o600); err != nil {
		return fmt.Errorf("note in which datastore the attachments are: %w", err)
	}
	x.moved = false
	return nil
}

// written notes that all that is attached is in the datastore.
func (x *reclaimer) written() {
	x.mu.Lock()
	defer x.mu.Unlock()
	if !x.moved {
		return
	}
	if err := x.noteKind(); err != nil {
		x.log.Warn("what is attached is in the datastore, and will be written again by the next start", "error", err)
	}
}
