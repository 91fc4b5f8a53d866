package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"time"

	"github.com/routerd/routerd/store/kube/convert"
)

// DaemonGone is the reason of a [Network] by which another host says that a node's daemon is gone.
const DaemonGone = convert.DaemonGone

const strategicPatchType = "application/strategic-merge-patch+json"

// Network is what the condition NetworkUnavailable of a Node says, which keeps pods
// off the node while it is true.
type Network struct {
	Unavailable     bool
	Reason, Message string
}

// networkCondition is the condition in a Node's status.
type networkCondition struct {
	Type    string    `json:"type"`
	Status  string    `json:"status"`
	Reason  string    `json:"reason"`
	Message string    `json:"message"`
	Since   time.Time `json:"lastTransitionTime"`
	Heard   time.Time `json:"lastHeartbeatTime"`
}

const networkUnavailable = "NetworkUnavailable"

// network returns what a Node says of its network; false: nothing.
func (n *named) network() (Network, bool) {
	for _, c := range n.Status.Conditions {
		if c.Type == networkUnavailable {
			return Network{c.Status == "True", c.Reason, c.Message}, true
		}
	}
	return Network{}, false
}

// Network returns what the Node says of its network, as it was read last; false:
// nothing.
func (c *Names) Network() (Network, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.net, c.hasNet
}

// Network reads what a Node says of its network; false: nothing.
func (s *Store) Network(ctx context.Context, node string) (Network, bool, error) {
	var n named
	if err := s.readNode(ctx, node, &n); err != nil {
		return Network{}, false, err
	}
	is, ok := n.network()
	return is, ok, nil
}

// SetNetwork writes what a Node says of its network, whatever else changes in the
// Node.
func (s *Store) SetNetwork(ctx context.Context, node string, n Network) error {
	status := "False"
	if n.Unavailable {
		status = "True"
	}
	now := time.Now().UTC().Truncate(time.Second)
	patch, err := json.Marshal(map[string]any{"status": map[string]any{"conditions": []networkCondition{
		{networkUnavailable, status, n.Reason, n.Message, now, now},
	}}})
	if err != nil {
		return err
	}
	_, err = s.patchStatus(ctx, false, nodePath(node), strategicPatchType, patch)
	if err != nil {
		return fmt.Errorf("write the condition %s of Node %s: %w", networkUnavailable, node, s.explain(ctx, err))
	}
	return nil
}

// ForgetNetwork has a Node say nothing of its network any more. Kubernetes takes the taint away
// then, if there was one.
func (s *Store) ForgetNetwork(ctx context.Context, node string) error {
	patch := []byte(`{"status":{"conditions":[{"type":"` + networkUnavailable + `","$patch":"delete"}]}}`)
	if _, err := s.patchStatus(ctx, false, nodePath(node), strategicPatchType, patch); err != nil {
		return fmt.Errorf("take the condition %s from Node %s: %w", networkUnavailable, node, s.explain(ctx, err))
	}
	return nil
}

// DaemonPods reports, for each node that has a pod of routerd's DaemonSet, whether
// it is ready.
func (s *Store) DaemonPods(ctx context.Context) (map[string]bool, error) {
	query := url.Values{"labelSelector": {"app.kubernetes.io/name=routerd"}, "resourceVersion": {"0"}}
	raw, err := s.call(ctx, request{method: http.MethodGet, path: "/api/v1/namespaces/" + s.namespace + "/pods", query: query})
	if err != nil {
		return nil, fmt.Errorf("list the pods of routerd: %w", s.explain(ctx, err))
	}
	var list struct {
		Items []struct {
			Spec struct {
				NodeName string `json:"nodeName"`
			} `json:"spec"`
			Status struct {
				Conditions []networkCondition `json:"conditions"`
			} `json:"status"`
		} `json:"items"`
	}
	if err := json.Unmarshal(raw, &list); err != nil {
		return nil, fmt.Errorf("list the pods of routerd: %w", err)
	}
	out := make(map[string]bool, len(list.Items))
	for _, p := range list.Items {
		for _, c := range p.Status.Conditions {
			if c.Type == "Ready" {
				out[p.Spec.NodeName] = out[p.Spec.NodeName] || c.Status == "True"
			}
		}
	}
	return out, nil
}
