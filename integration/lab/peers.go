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
	"github.com/routerd/routerd/store/kube"
)

// Store opens the lab's store through the socket of a host's daemon, which serves
// everything but watches, or the API of Kubernetes. The caller closes it.
func (l *Lab) Store(ctx context.Context, host string) (store.Store, error) {
	if file := l.topology.Kubeconfig; file != "" {
		return kube.Open(kube.Config{Kubeconfig: file, APIGroup: l.topology.APIGroup})
	}
	s, err := etcd.Open(ctx, etcd.Config{Endpoints: []string{"unix://" + Socket(l.name, host)}})
	if err != nil {
		return nil, fmt.Errorf("open the store of lab %s: %w", l.name, err)
	}
	return s, nil
}

// openNetwork makes the profile of the pods' network, which otherwise the first
// pod brings with it: Calico's lets in only pods of the network, and in a lab
// hosts and the spine ask pods too.
func (l *Lab) openNetwork(ctx context.Context) (err error) {
	s, err := l.Store(ctx, l.topology.Nodes[0].Name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	p := v3.NewProfile()
	p.Name = networkName
	p.Spec = v3.ProfileSpec{
		Ingress: []v3.Rule{{Action: v3.Allow}}, Egress: []v3.Rule{{Action: v3.Allow}},
		LabelsToApply: map[string]string{networkName: ""},
	}
	if _, err := store.Create(ctx, s, p); err != nil {
		return fmt.Errorf("open the pods' network: %w", err)
	}
	return nil
}

// spinePeers are the BGPPeers with which a node peers with the spine, one for
// each family of the underlay. The spine hands on what other nodes announced,
// who are of the same AS: hence the one allowed occurrence of the node's own.
func spinePeers(t Topology, n Node) []*v3.BGPPeer {
	rack, _ := t.rack(n.Rack)
	_, gateways := n.prefixes(rack)
	var out []*v3.BGPPeer
	for _, gw := range gateways {
		name := "spine-" + n.Name
		if gw.Is6() {
			name += "-v6"
		}
		out = append(out, &v3.BGPPeer{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: v3.BGPPeerSpec{
				Node:                     n.Name,
				PeerIP:                   gw.String(),
				ASNumber:                 numorstring.ASNumber(t.Spine.ASNumber),
				NumAllowedLocalASNumbers: new(int32(1)),
			},
		})
	}
	return out
}

// addSpinePeers makes every node a BGP neighbour of the spine.
func (l *Lab) addSpinePeers(ctx context.Context) (err error) {
	s, err := l.Store(ctx, l.topology.Nodes[0].Name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	for _, n := range l.topology.Nodes {
		for _, p := range spinePeers(l.topology, n) {
			if _, err := store.Create(ctx, s, p); err != nil {
				return fmt.Errorf("add BGP peer of %s: %w", n.Name, err)
			}
		}
	}
	return nil
}
