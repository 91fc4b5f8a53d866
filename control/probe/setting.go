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

// settings names each member of a [Setting] and the kernel's features behind
// it (linux/netdev_features.h, net/ethtool/common.c).
var settings = []struct {
	bit      Setting
	name     string
	features []string
}{
	{NoChecksum, "checksum off", []string{"tx-checksum-ip-generic"}},
	{NoTCPSegments, "TCP segmentation off", []string{"tx-tcp-segmentation", "tx-tcp6-segmentation"}},
	{NoUDPSegments, "UDP segmentation off", []string{"tx-udp-segmentation"}},
}

func (s Setting) String() string {
	var off []string
	for _, x := range settings {
		if s&x.bit != 0 {
			off = append(off, x.name)
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
	for _, x := range settings {
		if s&x.bit != 0 {
			for _, f := range x.features {
				args = append(args, f+" off")
			}
		}
	}
	return fmt.Sprintf("ethtool -K %s %s", link, strings.Join(args, " "))
}

// features returns the wish for a device. Features that stay on are named too:
// an earlier life may have left them off.
func (s Setting) features(link string) []dataplane.Object {
	// The kernel refuses segmentation where there is no checksum offload.
	off := s.effective()
	var out []dataplane.Object
	for _, x := range settings {
		for _, f := range x.features {
			out = append(out, dataplane.Feature{Link: link, Name: f, On: off&x.bit == 0})
		}
	}
	return out
}

// MarshalJSON writes the names of what is off.
func (s Setting) MarshalJSON() ([]byte, error) {
	names := []string{}
	for _, x := range settings {
		if s&x.bit != 0 {
			names = append(names, x.name)
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
		for _, x := range settings {
			if x.name == n {
				*s |= x.bit
				continue next
			}
		}
		return fmt.Errorf("offload setting %q is not known", n)
	}
	return nil
}
