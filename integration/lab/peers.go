package lab

import (
	"context"
	"errors"
	"fmt"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"github.com/projectcalico/api/pkg/lib/numorstring"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/etcd"
)

// Store opens the lab's store through the socket of a host's daemon. It serves
// everything but watches. The caller closes it.
func (l *Lab) Store(ctx context.Context, host string) (store.Store, error) {
	s, err := etcd.Open(ctx, etcd.Config{Endpoints: []string{"unix://" + Socket(l.name, host)}})
	if err != nil {
		return nil, fmt.Errorf("open the store of lab %s: %w", l.name, err)
	}
	return s, nil
}

// spinePeer is the BGPPeer with which a node peers with the spine. The spine
// hands on what other nodes announced, who are of the same AS: hence the one
// allowed occurrence of the node's own.
func spinePeer(t Topology, n Node) *v3.BGPPeer {
	rack, _ := t.rack(n.Rack)
	return &v3.BGPPeer{
		ObjectMeta: metav1.ObjectMeta{Name: "spine-" + n.Name},
		Spec: v3.BGPPeerSpec{
			Node:                     n.Name,
			PeerIP:                   rack.Gateway().String(),
			ASNumber:                 numorstring.ASNumber(t.Spine.ASNumber),
			NumAllowedLocalASNumbers: new(int32(1)),
		},
	}
}

// addSpinePeers makes every node a BGP neighbour of the spine.
func (l *Lab) addSpinePeers(ctx context.Context) (err error) {
	s, err := l.Store(ctx, l.topology.Nodes[0].Name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	for _, n := range l.topology.Nodes {
		if _, err := store.Create(ctx, s, spinePeer(l.topology, n)); err != nil {
			return fmt.Errorf("add BGP peer of %s: %w", n.Name, err)
		}
	}
	return nil
}
