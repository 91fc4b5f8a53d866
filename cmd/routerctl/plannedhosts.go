package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/store"
)

// planHosts says what becomes of each host's kernel, by its own daemon.
func (a resourceCommands) planHosts(ctx context.Context, changes []change, all bool) error {
	send, err := plannedChanges(changes, func(store.Kind) bool { return true })
	if err != nil || len(send) == 0 {
		return err
	}
	fmt.Fprintln(a.stdout, "\nHosts:")
	direct, err := a.direct()
	if err != nil {
		return err
	}
	if direct.isSet() {
		fmt.Fprintln(a.stdout, "  not queried: the datastore is used without a daemon; on a host with routerd, unset the datastore's variables")
		return nil
	}
	var hosts []*apiv1.HostPlan
	err = ask(ctx, a.daemon, apiv1.NewOperatorClient, func(o apiv1.OperatorClient) error {
		stream, err := o.Plan(ctx)
		if err != nil {
			return err
		}
		return exchange(stream, send, func(part []*apiv1.BGPChange) *apiv1.PlanRequest { return &apiv1.PlanRequest{Changes: part} },
			func(p *apiv1.HostPlan) { hosts = append(hosts, p) })
	})
	if status.Code(err) == codes.Unimplemented {
		fmt.Fprintln(a.stdout, "  not queried: this host's routerd is an older version")
		return nil
	}
	slices.SortFunc(hosts, func(a, b *apiv1.HostPlan) int { return cmp.Compare(a.GetNode(), b.GetNode()) })
	same := 0
	for _, p := range hosts {
		if nothing(p) {
			same++
			continue
		}
		showHostPlan(a.stdout, p, all)
	}
	if same > 0 {
		fmt.Fprintf(a.stdout, "  nothing changes on %d of %d hosts\n", same, len(hosts))
	}
	return err
}

// exchange sends changes in parts and hands on each answer.
func exchange[Q, A any](stream grpc.BidiStreamingClient[Q, A], changes []*apiv1.BGPChange, question func([]*apiv1.BGPChange) *Q, answer func(*A)) error {
	for part := range parts(changes) {
		if err := stream.Send(question(part)); err != nil {
			break // the answer says why
		}
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	return eachPart(stream.Recv, func(a *A) error { answer(a); return nil })
}

// plannedChanges lists the changes of some kinds as the daemon takes them.
func plannedChanges(changes []change, concern func(store.Kind) bool) ([]*apiv1.BGPChange, error) {
	var send []*apiv1.BGPChange
	for _, c := range changes {
		if c.same || !concern(c.key.Kind) {
			continue
		}
		raw, err := store.Encode(c.key, c.op.Object.Value, c.op.Object.Raw)
		if err != nil {
			return nil, err
		}
		send = append(send, &apiv1.BGPChange{Key: c.key.Path(), Value: raw})
	}
	return send, nil
}

func nothing(p *apiv1.HostPlan) bool {
	return p.GetError() == "" && len(p.GetObjects())+len(p.GetRules())+len(p.GetAnnotations())+len(p.GetUnknown())+len(p.GetTunnels()) == 0
}

// showHostPlan prints what becomes of a host.
func showHostPlan(w io.Writer, p *apiv1.HostPlan, all bool) {
	fmt.Fprintf(w, "  %s\n", p.GetNode())
	if p.GetError() != "" {
		fmt.Fprintf(w, "    not known: %s\n", p.GetError())
		return
	}
	for _, u := range p.GetUnknown() {
		fmt.Fprintf(w, "    not known: %s\n", u)
	}
	for _, t := range p.GetTunnels() {
		fmt.Fprintf(w, "    %s\n", t)
	}
	for _, in := range p.GetAddresses() {
		list, more := in.GetAddresses(), ""
		if n := len(list) - shownSessions; !all && n > 0 {
			list, more = list[:shownSessions], fmt.Sprintf(" and %d more; --all shows them", n)
		}
		fmt.Fprintf(w, "    addresses of IPPool(%s) in use here: %s%s\n", in.GetPool(), strings.Join(list, " "), more)
	}
	shown, more := map[string]int{}, map[string]int{}
	var kinds []string
	for _, o := range slices.Concat(p.GetObjects(), p.GetRules(), p.GetAnnotations()) {
		k := o.GetKind()
		if !slices.Contains(kinds, k) {
			kinds = append(kinds, k)
		}
		if !all && shown[k] == mostShown(k) {
			more[k]++
			continue
		}
		shown[k]++
		fmt.Fprintf(w, "    %s\n", showPlanned(o))
	}
	for _, k := range kinds {
		if more[k] > 0 {
			fmt.Fprintf(w, "    %d more of kind %s; --all shows them\n", more[k], k)
		}
	}
	if n := p.GetLeftOut(); n > 0 {
		fmt.Fprintf(w, "    and %d more, beyond the limit of the answer\n", n)
	}
}

// mostShown is how many changes of a kind are shown of a host unless all are asked for. What
// belongs to tunnels is of use to few.
func mostShown(kind string) int {
	switch kind {
	case "fdb", "neighbour", "sysctl":
		return 0
	}
	return shownSessions
}

func showPlanned(o *apiv1.PlannedObject) string {
	switch {
	case o.GetWas() == "":
		return fmt.Sprintf("+ %s %s", o.GetKind(), o.GetWill())
	case o.GetWill() == "":
		return fmt.Sprintf("- %s %s", o.GetKind(), o.GetWas())
	}
	return fmt.Sprintf("~ %s %s → %s", o.GetKind(), o.GetWas(), o.GetWill())
}
