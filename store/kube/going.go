package kube

import (
	"context"
	"strings"
)

// Going says whether a node is about to go, as its Node has it.
type Going struct {
	Cordoned     bool // no pod is to start there: kubectl cordon and drain
	ShuttingDown bool // its kubelet ends all pods, because the machine goes down
}

// shutdownMessage is in what a kubelet says in its condition Ready once its machine is
// going down (graceful node shutdown; pkg/kubelet/nodeshutdown, v1.21 and later).
const shutdownMessage = "node is shutting down"

// Going asks the API whether a node is about to go.
func (s *Store) Going(ctx context.Context, node string) (Going, error) {
	var n struct {
		Spec struct {
			Unschedulable bool `json:"unschedulable"`
		} `json:"spec"`
		Status struct {
			Conditions []networkCondition `json:"conditions"`
		} `json:"status"`
	}
	if err := s.readNode(ctx, node, &n); err != nil {
		return Going{}, err
	}
	g := Going{Cordoned: n.Spec.Unschedulable}
	for _, c := range n.Status.Conditions {
		if c.Type == "Ready" && c.Status == "False" && strings.Contains(c.Message, shutdownMessage) {
			g.ShuttingDown = true
		}
	}
	return g, nil
}
