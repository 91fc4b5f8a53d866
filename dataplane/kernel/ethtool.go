package kernel

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/internal/nl"
	"github.com/routerd/routerd/dataplane/reconcile"
)

// genlHeader is the size of struct genlmsghdr (linux/genetlink.h).
const genlHeader = 4

// ethtool reads and writes the offloads of devices through the kernel's
// generic netlink family "ethtool" (Linux 5.7), which also notifies of changes.
type ethtool struct {
	*nl.Conn
	family  uint16    // message type
	monitor uint32    // multicast group of changes
	changes *listener // nil before listen
}

// dialEthtool opens a connection in the calling thread's network namespace. It
// returns nil where the kernel has no such family: offloads are then refused
// when they are wanted.
func dialEthtool() (*ethtool, error) {
	c, err := nl.Dial(unix.NETLINK_GENERIC, 0, 0)
	if err != nil {
		return nil, err
	}
	e := &ethtool{Conn: c}
	var b nl.Batch
	b.Begin(unix.GENL_ID_CTRL, 0, unix.CTRL_CMD_GETFAMILY, 1, 0, 0)
	b.Text(unix.CTRL_ATTR_FAMILY_NAME, unix.ETHTOOL_GENL_NAME)
	err = e.Do(&b, func(_ int, m nl.Message) { e.family, e.monitor = parseFamily(m.Body, unix.ETHTOOL_MCGRP_MONITOR_NAME) })
	if err == nil && e.family == 0 {
		err = unix.ENOENT
	}
	if err != nil {
		c.Close()
		if errors.Is(err, unix.ENOENT) {
			return nil, nil
		}
		return nil, fmt.Errorf("find the ethtool netlink family: %w", err)
	}
	return e, nil
}

// openEthtool is dialEthtool with a listener to changes.
func openEthtool() (*ethtool, error) {
	e, err := dialEthtool()
	if e == nil {
		return nil, err
	}
	if e.changes, err = listenTo(unix.NETLINK_GENERIC, 1<<20, e.monitor); err != nil {
		return nil, errors.Join(err, e.Close())
	}
	return e, nil
}

// parseFamily reads CTRL_CMD_NEWFAMILY: the message type of a generic netlink
// family and the number of the multicast group of that name, 0 if absent.
func parseFamily(b []byte, group string) (family uint16, number uint32) {
	if len(b) < genlHeader {
		return 0, 0
	}
	for t, v := range nl.Attributes(b[genlHeader:]) {
		switch t {
		case unix.CTRL_ATTR_FAMILY_ID:
			family = v.Uint16()
		case unix.CTRL_ATTR_MCAST_GROUPS:
			for _, g := range nl.Attributes(v) {
				var id uint32
				var name string
				for t, v := range nl.Attributes(g) {
					switch t {
					case unix.CTRL_ATTR_MCAST_GRP_ID:
						id = v.Uint32()
					case unix.CTRL_ATTR_MCAST_GRP_NAME:
						name = v.Text()
					}
				}
				if name == group {
					number = id
				}
			}
		}
	}
	return family, number
}

// features is what a message about a device's offloads says: the names of all
// that the device knows, and which are on.
type features struct {
	link int
	on   map[string]bool
}

// parseFeatures reads ETHTOOL_MSG_FEATURES_GET_REPLY and, of
// ETHTOOL_MSG_FEATURES_NTF, the device: notifications name no features.
func parseFeatures(b []byte) (f features, ok bool) {
	if len(b) < genlHeader || b[0] != unix.ETHTOOL_MSG_FEATURES_GET_REPLY && b[0] != unix.ETHTOOL_MSG_FEATURES_NTF {
		return f, false
	}
	f.on = make(map[string]bool)
	for t, v := range nl.Attributes(b[genlHeader:]) {
		switch t {
		case unix.ETHTOOL_A_FEATURES_HEADER:
			for t, v := range nl.Attributes(v) {
				if t == unix.ETHTOOL_A_HEADER_DEV_INDEX {
					f.link = int(v.Uint32())
				}
			}
		case unix.ETHTOOL_A_FEATURES_HW:
			eachBit(v, func(name string, _ bool) {
				if !f.on[name] {
					f.on[name] = false // known, whichever comes first
				}
			})
		case unix.ETHTOOL_A_FEATURES_ACTIVE:
			eachBit(v, func(name string, _ bool) { f.on[name] = true })
		}
	}
	return f, f.link > 0
}

// eachBit calls fn for each named bit of a bitset in its long form (the
// kernel's Documentation/networking/ethtool-netlink.rst, "Bit sets").
func eachBit(b []byte, fn func(name string, on bool)) {
	for t, bits := range nl.Attributes(b) {
		if t != unix.ETHTOOL_A_BITSET_BITS {
			continue
		}
		for _, bit := range nl.Attributes(bits) {
			var name string
			on := false
			for t, v := range nl.Attributes(bit) {
				switch t {
				case unix.ETHTOOL_A_BITSET_BIT_NAME:
					name = v.Text()
				case unix.ETHTOOL_A_BITSET_BIT_VALUE:
					on = true
				}
			}
			if name != "" {
				fn(name, on)
			}
		}
	}
}

// header starts a request about a device.
func (e *ethtool) header(b *nl.Batch, command byte, link int) {
	b.Begin(e.family, 0, command, 1, 0, 0)
	b.Nest(unix.ETHTOOL_A_FEATURES_HEADER, func() { b.Uint32(unix.ETHTOOL_A_HEADER_DEV_INDEX, uint32(link)) })
}

// get reads the offloads of a device.
func (e *ethtool) get(link int) (features, error) {
	var b nl.Batch
	var out features
	e.header(&b, unix.ETHTOOL_MSG_FEATURES_GET, link)
	err := e.Do(&b, func(_ int, m nl.Message) {
		if f, ok := parseFeatures(m.Body); ok {
			out = f
		}
	})
	return out, err
}

// set switches one offload of a device.
func (e *ethtool) set(link int, name string, on bool) error {
	var b nl.Batch
	e.header(&b, unix.ETHTOOL_MSG_FEATURES_SET, link)
	b.Nest(unix.ETHTOOL_A_FEATURES_WANTED, func() {
		b.Nest(unix.ETHTOOL_A_BITSET_BITS, func() {
			b.Nest(unix.ETHTOOL_A_BITSET_BITS_BIT, func() {
				b.Text(unix.ETHTOOL_A_BITSET_BIT_NAME, name)
				if on {
					b.Bytes(unix.ETHTOOL_A_BITSET_BIT_VALUE)
				}
			})
		})
	})
	return e.Do(&b, nil)
}

// putFeature makes an offload be as wanted; one that is already is not
// written.
func (wr *writer) putFeature(o op) result {
	w := o.Want.other.(dataplane.Feature)
	if err := validate(w); err != nil {
		return result{Op: o, Outcome: reconcile.Refused, Err: err}
	}
	l := wr.mirror.link(w.Link)
	if l == nil {
		r := wr.waitForLink(o, w.Link)
		r.Op = o
		return *r
	}
	written, err := wr.offloads.make(w, l.index)
	if written {
		wr.writes.Add(1)
	}
	if errors.Is(err, unix.ENODEV) && wr.doubted.first(o.Key) {
		return result{Op: o, Outcome: reconcile.Postponed} // it went after we looked
	}
	if err != nil {
		return result{Op: o, Outcome: reconcile.Refused, Err: err}
	}
	if written {
		wr.wrote(dataplane.KindFeature, false, 1)
	}
	return result{Op: o}
}

// make switches an offload of a device if it is not as wanted, and reports
// whether it had to try.
func (e *ethtool) make(w dataplane.Feature, link int) (written bool, err error) {
	if e == nil {
		return false, errors.New("this kernel has no ethtool netlink: Linux 5.7 or later, built with CONFIG_ETHTOOL_NETLINK, is needed")
	}
	now, err := e.get(link)
	if err != nil {
		return false, fmt.Errorf("read the offloads of %s: %w", w.Link, err)
	}
	on, known := now.on[w.Name]
	switch {
	case known && on == w.On:
		return false, nil
	case !known && !w.On:
		return false, nil // what there is not is off
	case !known:
		return false, fmt.Errorf("this kernel knows no offload named %s: ethtool -k %s lists those that there are", w.Name, w.Link)
	}
	if err := e.set(link, w.Name, w.On); err != nil {
		return true, err
	}
	if now, err = e.get(link); err != nil {
		return true, fmt.Errorf("read the offloads of %s: %w", w.Link, err)
	}
	if now.on[w.Name] != w.On {
		return true, errors.New("the device's driver leaves it as it is: it is fixed, or depends on another offload")
	}
	return true, nil
}

// haveFeatures calls put for each offload of a device that we look after.
func (ac *actual) haveFeatures(name string, put func(dataplane.Object)) {
	var keys []dataplane.FeatureKey
	for key := range ac.onLink[name] {
		if f, ok := key.(dataplane.FeatureKey); ok {
			keys = append(keys, f)
		}
	}
	l := ac.mirror.link(name)
	if len(keys) == 0 || l == nil || ac.offloads == nil {
		return
	}
	f, err := ac.offloads.get(l.index)
	if err != nil {
		ac.log.Debug("offloads cannot be read", "link", name, "error", err)
		return // it may just be going; its notification says
	}
	for _, key := range keys {
		put(dataplane.Feature{Link: name, Name: key.Name, On: f.on[key.Name]})
	}
}
