package cni

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"
	"golang.org/x/sys/unix"
)

// LoopbackType is the name under which the same program is the plugin that sets a
// container's loopback interface up: containerd calls it for every pod and starts none without
// it (from 2.0 on unless use_internal_loopback is set).
const LoopbackType = "loopback"

// loopback carries out the verbs of that plugin. It needs no daemon.
func loopback(programVersion string) *types.Error {
	return skel.PluginMainFuncsWithError(skel.CNIFuncs{
		Add: loopbackAdd,
		Del: func(in *skel.CmdArgs) error {
			if in.Netns == "" {
				return nil // the container is gone, and its loopback with it
			}
			err := setLoopback(in.Netns, in.IfName, false)
			if errors.Is(err, os.ErrNotExist) {
				return nil
			}
			return err
		},
		Check: func(in *skel.CmdArgs) error { return checkLoopback(in.Netns, in.IfName) },
	}, version.PluginSupports(Versions()...), LoopbackType+" of "+PluginType+" "+programVersion)
}

func loopbackAdd(in *skel.CmdArgs) error {
	conf, err := parsePlain(in.StdinData)
	if err != nil {
		return err
	}
	if err := setLoopback(in.Netns, in.IfName, true); err != nil {
		return err
	}
	if conf.PrevResult != nil {
		return types.PrintResult(conf.PrevResult, conf.CNIVersion)
	}
	return types.PrintResult(&current.Result{
		CNIVersion: current.ImplementedSpecVersion,
		Interfaces: []*current.Interface{{Name: in.IfName, Mac: "00:00:00:00:00:00", Sandbox: in.Netns}},
		IPs: []*current.IPConfig{
			{Interface: current.Int(0), Address: net.IPNet{IP: net.IPv4(127, 0, 0, 1).To4(), Mask: net.CIDRMask(8, 32)}},
			{Interface: current.Int(0), Address: net.IPNet{IP: net.IPv6loopback, Mask: net.CIDRMask(128, 128)}},
		},
	}, conf.CNIVersion)
}

// parsePlain reads what every plugin's configuration has, with the result of the plugin
// before it in the chain, if there is one.
func parsePlain(stdin []byte) (*types.PluginConf, error) {
	conf := &types.PluginConf{}
	if err := json.Unmarshal(stdin, conf); err != nil {
		return nil, types.NewError(types.ErrDecodingFailure, "network configuration: "+err.Error(), "")
	}
	if err := version.ParsePrevResult(conf); err != nil {
		return nil, invalidPrevious(err)
	}
	return conf, nil
}

// setLoopback sets an interface of a network namespace up or down.
func setLoopback(path, name string, up bool) error {
	return inNamespace(path, func() error {
		flags, err := interfaceFlags(name)
		if err != nil {
			return err
		}
		want := flags &^ unix.IFF_UP
		if up {
			want = flags | unix.IFF_UP
		}
		if want == flags {
			return nil
		}
		return interfaceControl(name, func(fd int, r *unix.Ifreq) error {
			r.SetUint16(want)
			return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, r)
		})
	})
}

func checkLoopback(path, name string) error {
	return inNamespace(path, func() error {
		flags, err := interfaceFlags(name)
		if err == nil && flags&unix.IFF_UP == 0 {
			err = fmt.Errorf("interface %s is down in the container; make the container anew", name)
		}
		return err
	})
}

func interfaceFlags(name string) (flags uint16, err error) {
	err = interfaceControl(name, func(fd int, r *unix.Ifreq) error {
		err := unix.IoctlIfreq(fd, unix.SIOCGIFFLAGS, r)
		flags = r.Uint16()
		return err
	})
	return flags, err
}

// interfaceControl makes a request of netdevice(7).
func interfaceControl(name string, do func(fd int, r *unix.Ifreq) error) error {
	r, err := unix.NewIfreq(name)
	if err != nil {
		return fmt.Errorf("interface %q: %w", name, err)
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("interface %s: %w", name, err)
	}
	defer unix.Close(fd)
	if err := do(fd, r); err != nil {
		return fmt.Errorf("interface %s: %w", name, err)
	}
	return nil
}

// inNamespace runs f in a network namespace, on a thread that ends with it.
func inNamespace(path string, f func() error) error {
	ns, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("network namespace: %w", err)
	}
	defer ns.Close()
	done := make(chan error, 1)
	go func() {
		// Never unlocked: the thread is in another namespace, and goes with this
		// goroutine.
		runtime.LockOSThread()
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			done <- fmt.Errorf("enter network namespace %s: %w", path, err)
			return
		}
		done <- f()
	}()
	return <-done
}
