package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/store"
)

// node deletes a Node and what belongs to it. Each step leaves a state from
// which the deletion can be taken up again, and the Node itself goes last.
func (d *deletion) node(ctx context.Context, name string) error {
	for try := 1; ; try++ {
		have, unreadable := d.stateOf(ctx, name)
		if unreadable != nil && !errors.Is(unreadable, store.ErrDecode) {
			return fmt.Errorf("delete Node(%s): %w", name, unreadable)
		}
		err := commit(ctx, d.store, d.out, nodeDeletion(name, have, time.Now()))
		if err == nil {
			if unreadable != nil {
				return fmt.Errorf("Node(%s) is deleted, but some of its records cannot be read and were left; see `routerctl ipam check`: %w", name, unreadable) //nolint:revive,staticcheck // the name of a kind
			}
			return nil
		}
		if !errors.Is(err, store.ErrConflict) || try == writeTries {
			return fmt.Errorf("delete Node(%s): %w", name, err)
		}
	}
}

// stateOf reads what the deletion of a node depends on. With an error that
// matches [store.ErrDecode] it returns what can be read.
func (d *deletion) stateOf(ctx context.Context, node string) ([]store.Object, error) {
	var have []store.Object
	var unreadable error
	for _, q := range []struct {
		kind      store.Kind
		namespace string
	}{
		{store.KindNode, ""},
		{store.KindWorkloadEndpoint, ""},
		{store.KindBGPPeer, ""},
		{store.KindBGPConfiguration, ""},
		{store.KindFelixConfiguration, ""},
		{store.KindIPAMBlock, ""},
		{store.KindIPAMAffinity, node},
		{store.KindIPAMHandle, ""},
		{store.KindIPAMConfig, ""},
		{store.KindIncarnation, ""},
	} {
		objects, _, err := d.store.List(ctx, q.kind, q.namespace)
		if err != nil && (!errors.Is(err, store.ErrDecode) || !spared(q.kind)) {
			return nil, err
		}
		unreadable = errors.Join(unreadable, err)
		have = append(have, objects...)
	}
	return have, unreadable
}

// spared reports whether records of a kind that cannot be decoded are left
// alone when a node is deleted: they keep what they hold until they are
// repaired. Of others it must be known whether they refer to the node.
func spared(kind store.Kind) bool { return kind.IPAM() || kind == store.KindIncarnation }

// nodeDeletion returns the operations that delete a node, as Calico's client
// does it: the addresses of its endpoints and tunnels are released and its
// claims on blocks given up, what refers to it by name goes, then the Node.
// Addresses that nothing explains stay, in blocks without an owner.
func nodeDeletion(name string, have []store.Object, now time.Time) []store.Op {
	var addrs []netip.Addr
	var ops []store.Op
	var last store.Op
	cooldown := time.Duration(0)
	for _, o := range have {
		gone := false
		switch v := o.Value.(type) {
		case *store.Node:
			if v.Name == name {
				addrs = append(addrs, v.DeviceAddresses()...)
				last = store.RemoveOp(o)
			}
		case *store.WorkloadEndpoint:
			if gone = v.Spec.Node == name; gone {
				addrs = append(addrs, v.Addresses()...)
			}
		case *v3.BGPPeer:
			gone = v.Spec.Node == name
		case *v3.BGPConfiguration, *v3.FelixConfiguration:
			gone = o.Key.Name == "node."+name
		case *store.Affinity:
			gone = o.Key.Namespace == name
		case *store.Incarnation:
			// The host, should it come back, learns by that what was done.
			gone = o.Key.Name == name
		case *store.IPAMConfig:
			cooldown = v.Cooldown()
		}
		if gone {
			ops = append(ops, store.RemoveOp(o))
		}
	}
	ops = append(ops, releases(name, addrs, have, now, cooldown)...)
	if last.Action == store.Remove {
		ops = append(ops, last)
	}
	return ops
}

// releases returns the operations that release addrs and node's blocks. A block
// that cannot be read is left alone; [deletion.stateOf] has named it.
func releases(node string, addrs []netip.Addr, have []store.Object, now time.Time, cooldown time.Duration) []store.Op {
	mine := map[netip.Addr]bool{}
	for _, a := range addrs {
		mine[a] = true
	}
	var edits []ipam.BlockEdit
	handles := map[string]store.Object{}
	for _, o := range have {
		if o.Key.Kind == store.KindIPAMHandle {
			handles[o.Key.Name] = o
		}
		b, ok := o.Value.(*store.Block)
		if !ok {
			continue
		}
		edit, ok, err := ipam.EditBlock(o, func(a ipam.Allocation) bool {
			// What another node was given stays, whoever claims it.
			to := a.Attributes[store.AttrNode]
			return mine[a.Addr] && (to == "" || to == node) || a.Node == node && ownHandle(a.Handle, node)
		}, b.Holder() == node, now, cooldown)
		if err == nil && ok && (len(edit.Freed) > 0 || b.Holder() == node) {
			edits = append(edits, edit)
		}
	}
	ops, _ := ipam.EditOps(handles, edits...)
	return ops
}

// ownHandle reports whether a handle holds what a node itself uses.
func ownHandle(handle, node string) bool {
	return handle == store.ReserveHandle(node) || strings.HasPrefix(handle, "routerd-gateway-"+node+".")
}
