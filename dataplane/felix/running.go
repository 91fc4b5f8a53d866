package felix

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Running returns the programs of calico-node that run in the network namespace of the
// calling thread, for people: Felix, and what is started beside it, among the processes that
// there are here, and BIRD by its control sockets. A daemon in a PID namespace of its own
// sees no other processes; sockets belong to the network namespace, so it sees these.
func Running() ([]string, error) {
	processes, err := processes()
	b, err2 := os.ReadFile("/proc/thread-self/net/unix")
	if err2 != nil {
		err2 = fmt.Errorf("look for Calico's BIRD: %w", err2)
	}
	return append(processes, birds(string(b))...), errors.Join(err, err2)
}

// processes looks for them in /proc (proc_pid_comm(5), network_namespaces(7)).
func processes() ([]string, error) {
	here, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		return nil, fmt.Errorf("look for Calico's processes: %w", err)
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("look for Calico's processes: %w", err)
	}
	var out []string
	for _, e := range entries {
		dir := filepath.Join("/proc", e.Name())
		if _, err := strconv.Atoi(e.Name()); err != nil {
			continue
		}
		comm, err := os.ReadFile(filepath.Join(dir, "comm"))
		if err != nil || !strings.HasPrefix(string(comm), "calico") {
			continue // it has ended, or is another's
		}
		there, err := os.Readlink(filepath.Join(dir, "ns/net"))
		if err != nil || there != here {
			continue
		}
		line, err := os.ReadFile(filepath.Join(dir, "cmdline"))
		if err != nil {
			continue
		}
		args := strings.Split(strings.TrimRight(string(line), "\x00"), "\x00")
		if ofNode(strings.TrimSpace(string(comm)), args) {
			out = append(out, fmt.Sprintf("%s (process %s)", strings.Join(args, " "), e.Name()))
		}
	}
	return out, nil
}

// ofNode reports whether a process is one of those that calico-node starts on a host: `calico-node
// -felix`, a calico-felix of its own package, or, where Calico is one program, `calico component node
// felix`.
func ofNode(comm string, args []string) bool {
	i := slices.Index(args, "component")
	return comm == "calico-node" || comm == "calico-felix" || comm == "calico" && i > 0 && slices.Contains(args[i:], "node")
}

// birds finds the control sockets of Calico's BIRD in the text of /proc/net/unix (proc_pid_net(5)),
// which has a socket only as long as a process has.
func birds(text string) []string {
	var out []string
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) == 0 {
			continue
		}
		path := f[len(f)-1]
		if dir, name := filepath.Split(path); strings.HasSuffix(dir, "/calico/") && (name == "bird.ctl" || name == "bird6.ctl") && !slices.Contains(out, "BIRD at "+path) {
			out = append(out, "BIRD at "+path) // once, with however many clients
		}
	}
	return out
}
