package nft

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/dataplane/nflog"
	"github.com/routerd/routerd/integration/await"
)

// A flood of denied packets is judged and counted, and logged up to the bound;
// the counters say how much was not. Rules that meet first packets only are
// logged in full.
func TestLogRate(t *testing.T) {
	t.Parallel()
	const group, logGroup, rate, sent = 9, 10, 2, 200
	l := newLab(t)
	table := openTable(t, l.host, Config{FlowGroup: group, LogGroup: logGroup, LogRate: rate})
	defer table.Close()
	id := filter.PolicyID{Kind: "NetworkPolicy", Namespace: "ns1", Name: "web"}
	d := openWorkloads(filter.NAT{})
	d.PutPolicies = []filter.Policy{{ID: id, Ingress: []filter.Rule{
		{Action: filter.Allow, Protocol: 17, Destination: filter.Side{Ports: []filter.PortRange{{Low: 53, High: 53}}}},
		{Action: filter.Log, Protocol: 99},
		{Action: filter.Deny, Protocol: 99},
	}}}
	d.PutEndpoints[1].Ingress = filter.Path{Tiers: []filter.Tier{{Name: "default", End: filter.Deny, Policies: []filter.PolicyRef{{ID: id}}}}}
	if err := table.Apply(d); err != nil {
		t.Fatal(err)
	}
	var listener *nflog.Listener
	if err := l.host.Do(func() (err error) { listener, err = nflog.Open(group, logGroup); return err }); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	packets, ended := make(chan nflog.Packet, 10*sent), make(chan error, 1)
	go func() { ended <- listener.Run(ctx, 0, func(p nflog.Packet) { packets <- p }) }()
	defer func() {
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("listener: %v", err)
		}
	}()
	src, dst := netip.MustParseAddr("10.1.0.1"), netip.MustParseAddr("10.1.0.2")
	type sum struct{ packets, logged uint64 }
	judged := map[string]sum{}
	logged := func() (n uint64, err error) {
		list, err := table.Counters()
		for _, c := range list {
			if c.Reason != filter.ByRule && c.Reason != filter.ByTierEnd && c.Reason != filter.ByPathEnd {
				continue
			}
			n += c.Packets - c.Unlogged
			if c.Policy == id {
				judged[c.Action.String()] = sum{c.Packets, c.Packets - c.Unlogged}
			}
		}
		return n, err
	}
	// Few at a time, so that no queue on the way overflows.
	for i := range sent {
		l.send(t, filter.Flow{In: "cali1", Out: "cali2", Packet: filter.Packet{Src: src, Dst: dst, Protocol: 99}})
		l.send(t, filter.Flow{In: "cali1", Out: "cali2", Packet: filter.Packet{Src: src, Dst: dst, Protocol: 17, SrcPort: uint16(5000 + i), DstPort: 53}})
		if n := i + 1; n%20 == 0 {
			await.Until(t, "the counters", func() error {
				_, err := logged()
				if err == nil && (judged["Allow"].packets < uint64(n) || judged["Deny"].packets < uint64(n)) {
					err = fmt.Errorf("of %d packets each there are %+v", n, judged)
				}
				return err
			})
		}
	}
	// The listener has what was logged when nothing is missing of it.
	await.Until(t, "what was logged", func() error {
		want, err := logged()
		if got := uint64(len(packets)); err == nil && got < want {
			err = fmt.Errorf("%d of %d packets have come", got, want)
		}
		return err
	})
	if s := judged["Allow"]; s.logged != s.packets {
		t.Errorf("allowed: %+v, want all first packets logged", s)
	}
	// The bucket fills while a slow machine sends.
	for _, action := range []string{"Deny", "Log"} {
		s := judged[action]
		if s.logged < rate*burstSeconds || s.logged >= s.packets {
			t.Errorf("%s: %+v, want some logged", action, s)
		}
	}
}
