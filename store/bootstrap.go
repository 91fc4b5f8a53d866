package store

import (
	"context"
	crand "crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Bootstrap makes what every cluster has and this one lacks, as calico/node
// does at its start: the ClusterInformation with a fresh GUID, the three
// built-in tiers, and the default BGP and Felix configurations. A cluster that
// begins with it has a key for BGP, too ([BGPSecret]). What exists is never touched,
// and any number of hosts may do it at once. Address pools are not its business.
//
// What the cluster had, and lacks because somebody deleted it, is made as it was.
func Bootstrap(ctx context.Context, s Store, had ...Object) error {
	// Each round makes in one transaction all that is missing. It is repeated
	// only when another host made some of it meanwhile.
	for {
		var ops []Op
		begins := false // it has no ClusterInformation
		for _, o := range builtins() {
			if o.Key.Kind == KindSecret && !begins {
				continue
			}
			if _, err := s.Get(ctx, o.Key); err == nil || errors.Is(err, ErrDecode) {
				continue // what is there and cannot be read is not ours to replace
			} else if !errors.Is(err, ErrNotFound) {
				return fmt.Errorf("bootstrap the datastore: %w", err)
			}
			if i := slices.IndexFunc(had, func(h Object) bool { return h.Key == o.Key }); i >= 0 {
				o = had[i]
				o.Revision = 0
			} else if o.Key.Kind == KindClusterInformation {
				begins = true
			}
			ops = append(ops, Op{If: IfAbsent(), Action: Put, Role: Prepares, Object: o}) // each stands for itself
		}
		// Where one object is written at a time the ClusterInformation is the last one, so that whoever
		// finds it finds the key too.
		slices.Reverse(ops)
		if len(ops) == 0 {
			return nil
		}
		_, err := s.Txn(ctx, ops...)
		if errors.Is(err, ErrExists) {
			continue
		}
		if err != nil {
			return fmt.Errorf("bootstrap the datastore: %w", err)
		}
		return nil
	}
}

// builtins returns the objects that [Bootstrap] makes.
func builtins() []Object {
	ready := true
	info := New(KindClusterInformation).(*v3.ClusterInformation)
	info.Name = DefaultName
	// CalicoVersion stays empty: calicoctl refuses a store whose version is
	// not its own, and an empty one is not compared.
	info.Spec = v3.ClusterInformationSpec{ClusterGUID: newGUID(), DatastoreReady: &ready}

	aggregate := v3.ServiceLoadBalancerAggregationEnabled
	bgp := New(KindBGPConfiguration).(*v3.BGPConfiguration)
	bgp.Name = DefaultName
	bgp.Spec = v3.BGPConfigurationSpec{LogSeverityScreen: "Info", ServiceLoadBalancerAggregation: &aggregate}

	objects := []Object{newObject(info), {Key: SecretKey(BGPSecret), Value: &Secret{Key: freshKey()}}, newObject(bgp)}
	for _, t := range []struct {
		name   string
		order  float64
		action v3.Action
	}{
		// Calico's validation fixes these orders and actions.
		{DefaultName, 1_000_000, v3.Deny},
		{TierKubeAdmin, 1_000, v3.Pass},
		{TierKubeBaseline, 10_000_000, v3.Pass},
	} {
		tier := New(KindTier).(*v3.Tier)
		tier.Name = t.name
		tier.Spec = v3.TierSpec{Order: &t.order, DefaultAction: &t.action}
		objects = append(objects, newObject(tier))
	}

	felix := newObject(defaultFelix())
	// The API module is older than this field, which Calico's client sets on
	// every write; it goes the way of all members that the type does not know.
	felix.Raw = []byte(`{"spec":{"nftablesFlowTableOffload":"Disabled"}}`)
	return append(objects, felix)
}

func defaultFelix() *v3.FelixConfiguration {
	nftables := v3.NFTablesMode("Auto")
	connect := v3.BPFConnectTimeLBType("TCP")
	hostNAT := v3.BPFHostNetworkedNATType("Enabled")
	floating := v3.FloatingIPType("Disabled")

	felix := New(KindFelixConfiguration).(*v3.FelixConfiguration)
	spec := &felix.Spec
	felix.Name = DefaultName
	spec.ReportingInterval = &metav1.Duration{} // off
	spec.LogSeverityScreen = "Info"
	spec.NFTablesMode = &nftables
	spec.BPFConnectTimeLoadBalancing = &connect
	spec.BPFHostNetworkedNATWithoutCTLB = &hostNAT
	spec.FloatingIPs = &floating
	return felix
}

// newObject returns a v3 value as an object that was never stored, with a new
// identity.
func newObject(value any) Object {
	kind, _ := KindOf(value)
	return Object{Key: ResourceKey(kind, Meta(value).Name), Value: newborn(value)}
}

// newGUID returns a cluster's random name: 32 hexadecimal digits.
func newGUID() string {
	var b [16]byte
	crand.Read(b[:]) //nolint:errcheck // crypto/rand.Read never fails: it ends the program rather
	return hex.EncodeToString(b[:])
}
