package probe

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/routerd/routerd/dataplane"
)

// Setting says which offloads of a tunnel device are off. The zero value, all
// on, is the fastest. Settings form a set: what two peers need of one device
// is the union.
type Setting uint8

// What can be off.
const (
	// NoChecksum has the kernel compute checksums before it encapsulates; with
	// it the kernel also cuts segments itself. It is what "ethtool -K DEVICE tx
	// off" does.
	NoChecksum Setting = 1 << iota
	// NoTCPSegments has the kernel cut TCP's segments ("tso off").
	NoTCPSegments
	// NoUDPSegments has the kernel cut those of UDP ("tx-udp-segmentation off").
	NoUDPSegments
)

// Offload is one thing that a [Setting] can have off.
type Offload struct {
	Bit      Setting
	Name     string   // for labels of metrics: checksum
	Off      string   // for people: checksum off
	features []string // the kernel's names (net/ethtool/common.c)
}

// Offloads lists what can be off.
func Offloads() []Offload {
	return []Offload{
		{NoChecksum, "checksum", "checksum off", []string{"tx-checksum-ip-generic"}},
		{NoTCPSegments, "tcp-segmentation", "TCP segmentation off", []string{"tx-tcp-segmentation", "tx-tcp6-segmentation"}},
		{NoUDPSegments, "udp-segmentation", "UDP segmentation off", []string{"tx-udp-segmentation"}},
	}
}

func (s Setting) String() string {
	var off []string
	for _, x := range Offloads() {
		if s&x.Bit != 0 {
			off = append(off, x.Off)
		}
	}
	if len(off) == 0 {
		return "all offloads on"
	}
	return strings.Join(off, ", ")
}

// effective is the setting as the kernel has it: without checksum offload there
// is no segmentation offload either.
func (s Setting) effective() Setting {
	if s&NoChecksum != 0 {
		s |= NoTCPSegments | NoUDPSegments
	}
	return s
}

// Cure is the command that does the same by hand.
func (s Setting) Cure(link string) string {
	if s == 0 {
		return ""
	}
	var args []string
	for _, x := range Offloads() {
		if s&x.Bit != 0 {
			for _, f := range x.features {
				args = append(args, f+" off")
			}
		}
	}
	return fmt.Sprintf("ethtool -K %s %s", link, strings.Join(args, " "))
}

// features returns what a device is to have. Features that stay on are named too:
// a previous run may have left them off.
func (s Setting) features(link string) []dataplane.Object {
	// The kernel refuses segmentation where there is no checksum offload.
	off := s.effective()
	var out []dataplane.Object
	for _, x := range Offloads() {
		for _, f := range x.features {
			out = append(out, dataplane.Feature{Link: link, Name: f, On: off&x.Bit == 0})
		}
	}
	return out
}

// MarshalJSON writes the names of what is off.
func (s Setting) MarshalJSON() ([]byte, error) {
	names := []string{}
	for _, x := range Offloads() {
		if s&x.Bit != 0 {
			names = append(names, x.Off)
		}
	}
	return json.Marshal(names)
}

// UnmarshalJSON reads what MarshalJSON wrote. A name that is not known is an
// error: what it stood for cannot be set.
func (s *Setting) UnmarshalJSON(b []byte) error {
	var names []string
	if err := json.Unmarshal(b, &names); err != nil {
		return err
	}
	*s = 0
next:
	for _, n := range names {
		for _, x := range Offloads() {
			if x.Off == n {
				*s |= x.Bit
				continue next
			}
		}
		return fmt.Errorf("offload setting %q is not known", n)
	}
	return nil
}
