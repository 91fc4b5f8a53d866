package presence

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"

	"github.com/routerd/routerd/control/atomicfile"
	"github.com/routerd/routerd/control/bootid"
	"github.com/routerd/routerd/store"
)

// Identity is what a state directory knows of the machine it belongs to.
type Identity struct {
	Instance string `json:"instance"` // random
	Epoch    int64  `json:"epoch"`    // the last in which the workloads' addresses were verified
}

// Load reads the identity from a file, and makes one if there is no file. A
// file that cannot be understood is an error: a new identity would make this
// another machine.
func Load(path string) (Identity, error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		id := Identity{Instance: rand.Text()}
		return id, id.save(path)
	}
	if err != nil {
		return Identity{}, fmt.Errorf("read this machine's identity: %w", err)
	}
	var id Identity
	if err := json.Unmarshal(b, &id); err != nil || id.Instance == "" {
		return Identity{}, fmt.Errorf("read this machine's identity: %s is damaged (%w): restore it, or delete it and the host counts as another machine", path, errors.Join(err, errNoInstance))
	}
	return id, nil
}

var errNoInstance = errors.New("want an instance")

func (id Identity) save(path string) error {
	b, err := json.Marshal(id)
	if err == nil {
		err = atomicfile.Write(path, b, 0o600)
	}
	if err != nil {
		return fmt.Errorf("write this machine's identity: %w", err)
	}
	return nil
}

// machineIDFile is where systemd says who the machine is: machine-id(5).
const machineIDFile = "/etc/machine-id"

// Self describes this process on this machine.
func Self(id Identity) (store.Incarnation, error) {
	boot, err := bootid.Read()
	if err != nil {
		return store.Incarnation{}, err
	}
	machine, err := machineID(machineIDFile)
	if err != nil {
		return store.Incarnation{}, err
	}
	host, err := os.Hostname()
	if err != nil {
		return store.Incarnation{}, fmt.Errorf("read the host's name: %w", err)
	}
	return store.Incarnation{
		Instance: id.Instance, BootID: boot, MachineID: machine,
		Process: rand.Text(), Epoch: id.Epoch, Host: host, Addresses: hostAddresses(),
	}, nil
}

// machineID reads a machine-id(5). Empty: the machine has none, or a container
// is not shown it, which leaves no file or, where a container runtime found
// nothing to mount, a directory.
func machineID(path string) (string, error) {
	b, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.EISDIR) {
		return "", fmt.Errorf("read the machine id: %w", err)
	}
	if id := strings.TrimSpace(string(b)); id != "uninitialized" { // systemd's word during the first boot
		return id, nil
	}
	return "", nil
}

// maxAddresses are published of a host: enough to find it by.
const maxAddresses = 4

// hostAddresses lists addresses by which people know the host.
func hostAddresses() []string {
	all, err := net.InterfaceAddrs()
	if err != nil {
		return nil // they are for people only
	}
	var out []string
	for _, a := range all {
		p, err := netip.ParsePrefix(a.String())
		if err == nil && p.Addr().IsGlobalUnicast() && !p.IsSingleIP() {
			out = append(out, p.Addr().String())
		}
	}
	slices.Sort(out)
	return out[:min(len(out), maxAddresses)]
}
