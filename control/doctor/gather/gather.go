// Package gather reads what the datastore has of all hosts for the doctor's checks, which are pure.
package gather

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/doctor"
	"github.com/routerd/routerd/control/ipam/audit"
	"github.com/routerd/routerd/store"
)

// Presences says which hosts' daemons are there, as *[etcd.Store] does.
type Presences interface {
	Presences(ctx context.Context, yield func(nodes []string))
}

// Cluster reads what the datastore has of all hosts. Without presences it is not known which are there.
func Cluster(ctx context.Context, s store.Store, p Presences) (doctor.Cluster, error) {
	out, err := Members(ctx, s, p)
	if err != nil {
		return out, err
	}
	out.Records, err = lastingRecords(ctx, s)
	return out, err
}

// Members is [Cluster] without IPAM's records.
func Members(ctx context.Context, s store.Store, p Presences) (doctor.Cluster, error) {
	var out doctor.Cluster
	err := store.Pages(ctx, s, store.KindNode, "", func(page []store.Object) error {
		for _, o := range page {
			if n, ok := o.Value.(*store.Node); ok {
				read, _ := cluster.Decode("", store.Event{Key: o.Key, Object: o}).Value.(*cluster.Node)
				out.Members = append(out.Members, Member(n, read))
			}
		}
		return nil
	})
	if err != nil {
		return out, fmt.Errorf("read the nodes: %w", err)
	}
	if p != nil {
		once, cancel := context.WithCancel(ctx)
		p.Presences(once, func(nodes []string) {
			out.Present = map[string]bool{}
			for _, n := range nodes {
				out.Present[n] = true
			}
			cancel() // who comes and goes later is not asked for
		})
	}
	return out, nil
}

// Add adds to a host's answer what is wrong with the others.
func Add(r *apiv1.ExamineResponse, facts doctor.Cluster) {
	facts.Self = r.GetNode()
	var found []*apiv1.Finding
	for _, f := range doctor.ExamineCluster(facts) {
		found = append(found, f.Proto())
	}
	r.Findings = append(found, r.GetFindings()...) // a host that is not there is the cause of sessions that are down
	slices.SortStableFunc(r.Findings, func(x, y *apiv1.Finding) int {
		return doctor.CompareSeverity(doctor.Severity(x.GetSeverity()), doctor.Severity(y.GetSeverity()))
	})
}

// auditAgain is after how long what an audit finds is looked for again: a host writes
// the record of an address and the endpoint that uses it one after the other.
const auditAgain = time.Second

// lastingRecords returns what is wrong with IPAM's records, and still is a moment later.
func lastingRecords(ctx context.Context, s store.Store) ([]doctor.Record, error) {
	var last map[doctor.Record]bool
	for {
		r, err := audit.Read(ctx, s)
		if err != nil {
			return nil, fmt.Errorf("read IPAM's records: %w", err)
		}
		_, found := r.Check()
		var out []doctor.Record
		now := map[doctor.Record]bool{}
		for _, f := range found {
			rec := doctor.Record{Problem: f.Problem, What: f.What, Why: f.Why, Cure: f.Cure}
			now[rec] = true
			if last[rec] {
				out = append(out, rec)
			}
		}
		if len(found) == 0 || last != nil {
			return out, nil
		}
		last = now
		if err := async.Sleep(ctx, auditAgain); err != nil {
			return nil, err
		}
	}
}

// Member is what a node has published of itself. What could not be read of it is nil.
func Member(n *store.Node, read *cluster.Node) doctor.Member {
	m := doctor.Member{Name: n.Name}
	if read != nil {
		m.Addrs = read.Addrs()
		for _, a := range []netip.Addr{read.VXLANAddr.IPv4, read.VXLANAddr.IPv6, read.IPIPAddr.IPv4, read.IPIPAddr.IPv6} {
			if a.IsValid() {
				m.Tunnels = append(m.Tunnels, a)
			}
		}
	}
	for _, c := range n.Status.Conditions {
		if name, ok := strings.CutPrefix(c.Type, "routerd.io/"); ok {
			m.Conditions = append(m.Conditions, &apiv1.Check{Name: name, Ok: c.Status == metav1.ConditionTrue, Reason: c.Message})
		}
	}
	return m
}
