// Package netdev reads what network devices have counted since they were made.
package netdev

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// File is where the kernel shows the counters of the devices in the namespace of who reads it (proc_pid_net(5)).
const File = "/proc/net/dev"

// Counters are those of a device. The host's end of a workload's interface sends what the workload receives.
type Counters struct {
	ReceivedBytes, ReceivedPackets uint64
	SentBytes, SentPackets         uint64
	Dropped, Errors                uint64 // packets, both ways
}

// Add adds another device's counters.
func (d *Counters) Add(o Counters) {
	d.ReceivedBytes += o.ReceivedBytes
	d.ReceivedPackets += o.ReceivedPackets
	d.SentBytes += o.SentBytes
	d.SentPackets += o.SentPackets
	d.Dropped += o.Dropped
	d.Errors += o.Errors
}

// Read returns the counters of all devices, by their names.
func Read() (map[string]Counters, error) {
	b, err := os.ReadFile(File)
	if err != nil {
		return nil, fmt.Errorf("read the devices' counters: %w", err)
	}
	return Parse(string(b))
}

// columns is how many a line has behind the name: bytes, packets, errs, drop, fifo, frame, compressed and multicast of
// what was received, and bytes, packets, errs, drop, fifo, colls, carrier and compressed of what was sent.
const columns = 16

// Parse reads the text of [File]. The error says which lines could not be read; the others are in the answer.
func Parse(text string) (map[string]Counters, error) {
	out := map[string]Counters{}
	var errs []error
	for line := range strings.Lines(text) {
		name, rest, ok := strings.Cut(line, ":")
		if !ok {
			continue // the two lines of headings have none
		}
		d, err := parse(strings.Fields(rest))
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: line %q: %w", File, strings.TrimSpace(line), err))
			continue
		}
		out[strings.TrimSpace(name)] = d
	}
	return out, errors.Join(errs...)
}

func parse(fields []string) (Counters, error) {
	if len(fields) < columns {
		return Counters{}, fmt.Errorf("%d columns, want %d", len(fields), columns)
	}
	var n [columns]uint64
	for i := range n {
		var err error
		if n[i], err = strconv.ParseUint(fields[i], 10, 64); err != nil {
			return Counters{}, err
		}
	}
	return Counters{
		ReceivedBytes: n[0], ReceivedPackets: n[1], SentBytes: n[8], SentPackets: n[9],
		Errors: n[2] + n[10], Dropped: n[3] + n[11],
	}, nil
}
