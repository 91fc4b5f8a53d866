package ui

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"net/netip"
	"slices"
	"strconv"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/store"
)

// Pod is a workload of the cluster that a packet can be followed from or to.
type Pod struct {
	Name  string   `json:"name"` // as routerctl trace takes it
	Node  string   `json:"node"`
	Addrs []string `json:"addresses"`
}

// Pods are those that the page offers.
type Pods struct {
	Pods []Pod `json:"pods"`
	All  int   `json:"all"` // how many there are
}

// shownPods bounds how many are offered; of any other one its name can be written.
const shownPods = 500

// pods lists the workloads that the datastore has.
func pods(ctx context.Context, from store.Store) (Pods, error) {
	list, _, err := from.List(ctx, store.KindWorkloadEndpoint, "")
	if err != nil && !errors.Is(err, store.ErrDecode) {
		return Pods{}, err
	}
	out := Pods{Pods: []Pod{}}
	for _, o := range list {
		w, ok := o.Value.(*store.WorkloadEndpoint)
		if !ok || len(w.Spec.IPNetworks) == 0 {
			continue
		}
		p := Pod{Name: w.Namespace + "/" + cmp.Or(w.Spec.Pod, w.Name), Node: w.Spec.Node}
		for _, n := range w.Spec.IPNetworks {
			if a, err := netip.ParsePrefix(n); err == nil {
				p.Addrs = append(p.Addrs, a.Addr().String())
			}
		}
		out.Pods = append(out.Pods, p)
	}
	slices.SortFunc(out.Pods, func(a, b Pod) int { return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.Name, b.Name)) })
	out.All = len(out.Pods)
	out.Pods = out.Pods[:min(out.All, shownPods)]
	return out, nil
}

func (s *Server) pods(w http.ResponseWriter, r *http.Request) {
	p, err := s.cfg.Pods(r.Context())
	if err != nil {
		writeError(w, status.Errorf(codes.Unavailable, "list the pods: %v", err))
		return
	}
	writeJSON(w, p)
}

// trace follows a packet. It sends none: a page only reads.
func (s *Server) trace(r *http.Request) (proto.Message, error) {
	q := r.URL.Query()
	req := &apiv1.TraceRequest{From: q.Get("from"), To: q.Get("to"), Protocol: q.Get("protocol")}
	var err error
	if req.Port, err = portOf(q.Get("port")); err != nil {
		return nil, err
	}
	if req.GetFrom() == "" || req.GetTo() == "" {
		return nil, status.Error(codes.InvalidArgument, "from and to are required: a workload, a node, host, or an address")
	}
	return s.alone(r, func(ctx context.Context) (proto.Message, error) { return s.cfg.Trace(ctx, req) })
}

// portOf reads a port; 0: there is none.
func portOf(text string) (uint32, error) {
	if text == "" {
		return 0, nil
	}
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		return 0, status.Errorf(codes.InvalidArgument, "port %q: want a number, 0 to 65535", text)
	}
	return uint32(port), nil
}
