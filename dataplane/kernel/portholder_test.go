package kernel

import (
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/dataplane"
)

// TestPortTaken: a VXLAN device does not take a UDP port that a program of this host
// has, over IPv4 or IPv6; who has it is named, and when he has gone the device is there.
func TestPortTaken(t *testing.T) {
	t.Parallel()
	me := fmt.Sprintf("(pid %d)", os.Getpid())
	six := dataplane.Link{
		Name: "vxlan-v6.calico", Type: dataplane.LinkVXLAN, MTU: 1430, MAC: mac("66:00:00:00:00:06"), VNI: 4096, Port: 4789, Local: addr("fd00::1"), Parent: "up0",
	}
	four := host()[0].(dataplane.Link)
	for _, tt := range []struct {
		name, network, at string
		link              dataplane.Link
		taken             bool
	}{
		{"all of IPv4", "udp4", "0.0.0.0:4789", four, true},
		{"one address", "udp4", "127.0.0.1:4789", four, true},
		{"both families", "udp", "[::]:4789", four, true},
		{"another port", "udp4", "0.0.0.0:4790", four, false},
		{"IPv6 alone", "udp6", "[::1]:4789", four, false},
		{"all of IPv6", "udp6", "[::]:4789", six, true},
		{"one address of IPv6", "udp6", "[::1]:4789", six, true},
		{"IPv4 alone", "udp4", "0.0.0.0:4789", six, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t)
			l.wire("up0", "up1", "10.0.0.1/24")
			l.run("ip addr add fd00::1/64 dev up0 nodad")
			var c net.PacketConn
			var err error
			l.do(func() { c, err = net.ListenPacket(tt.network, tt.at) })
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			k := l.start(everyCheck(100 * time.Millisecond))
			k.synced()
			k.Update(dataplane.SourceCore, []dataplane.Object{tt.link}, nil)
			if tt.taken {
				err := k.failed(tt.link).Error()
				if !strings.Contains(err, "UDP port 4789 is in use by ") || !strings.Contains(err, me) {
					t.Errorf("%s, want %s", err, me)
				}
				if err := c.Close(); err != nil {
					t.Fatal(err)
				}
			}
			k.settled()
			l.run("ip link show up " + tt.link.Name)
		})
	}
}

// TestPortOfAnotherDevice: a device shares its port with another program's device, as long
// as the kernel has one socket for both; else that one is named. A restart finds its own.
func TestPortOfAnotherDevice(t *testing.T) {
	t.Parallel()
	four := host()[0].(dataplane.Link)
	for name, tt := range map[string]struct {
		device string
		taken  bool
	}{
		"flannel.1": {"id 1 dstport 4789 nolearning", false},
		"gbp0":      {"id 2 dstport 4789 gbp", true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t)
			l.wire("up0", "up1", "10.0.0.1/24")
			l.run("ip link add "+name+" type vxlan local 10.0.0.1 "+tt.device, "ip link set "+name+" up")
			k := l.start(everyCheck(100 * time.Millisecond))
			k.synced()
			k.Update(dataplane.SourceCore, []dataplane.Object{four}, nil)
			if tt.taken {
				if err := k.failed(four).Error(); !strings.Contains(err, "in use by the VXLAN device "+name) {
					t.Error(err)
				}
				l.run("ip link del " + name)
			}
			k.settled()
			k.stop()
			index := strings.Fields(l.run("ip -o link show " + four.Name))[0]
			k = l.start(everyCheck(100 * time.Millisecond))
			k.synced()
			k.put(four)
			k.settled()
			if now := strings.Fields(l.run("ip -o link show " + four.Name))[0]; now != index {
				t.Errorf("the device was made anew: %s, before %s", now, index)
			}
		})
	}
}
