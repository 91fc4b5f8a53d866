package store

import (
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"
)

func TestKindByName(t *testing.T) {
	t.Parallel()
	tests := map[string]Kind{
		"ippool": KindIPPool, "ippools": KindIPPool, "IPPool": KindIPPool, "pool": KindIPPool, "POOLS": KindIPPool,
		"node": KindNode, "nodes": KindNode, "Node": KindNode,
		"bgppeer": KindBGPPeer, "bgpPeers": KindBGPPeer,
		"bgpconfig": KindBGPConfiguration, "felixConfiguration": KindFelixConfiguration,
		"wep": KindWorkloadEndpoint, "workloadEndpoints": KindWorkloadEndpoint,
		"clusterinfo": KindClusterInformation, "profile": KindProfile, "tier": KindTier,
		"": "", "ipamblock": "", "IPAMHandle": "", "nonsense": "",
	}
	for name, want := range tests {
		if got, ok := KindByName(name); got != want || ok != (want != "") {
			t.Errorf("KindByName(%q) = %q, %v, want %q", name, got, ok, want)
		}
	}
	seen := make(map[string]Kind)
	for _, info := range kindTable {
		for _, name := range append(info.aliases, info.plural) {
			if other, ok := seen[name]; ok && name != "" {
				t.Errorf("%q names %s and %s", name, other, info.kind)
			}
			seen[name] = info.kind
		}
	}
}

// Every name by which calicoctl takes a kind (the lists in calicoctl/resourcemgr of its source, v3.33) is one here.
func TestCalicoctlsNames(t *testing.T) {
	t.Parallel()
	for kind, names := range map[Kind]string{
		KindBGPConfiguration:              "bgpconfig bgpconfigurations bgpconfigs",
		KindBGPFilter:                     "bgpfilter bgpfilters bgpf bgpfs bf bfs",
		KindBGPPeer:                       "bgppeer bgppeers bgpp bgpps bp bps",
		KindBlockAffinity:                 "blockaffinity blockaffinities affinity affinities",
		KindCalicoNodeStatus:              "caliconodestatus caliconodestatuses nodestatus nodestatuses",
		KindClusterInformation:            "clusterinformation clusterinformations clusterinfo clusterinfos",
		KindFelixConfiguration:            "felixconfiguration felixconfigurations felixconfig felixconfigs",
		KindGlobalNetworkPolicy:           "globalnetworkpolicy globalnetworkpolicies gnp gnps",
		KindGlobalNetworkSet:              "globalnetworkset globalnetworksets gnetsets",
		KindHostEndpoint:                  "hostendpoint hostendpoints hep heps",
		KindIPAMConfiguration:             "ipamconfiguration ipamconfigurations ipamconfig ipamconfigs",
		KindIPPool:                        "ippool ippools ipp ipps pool pools",
		KindIPReservation:                 "ipreservation ipreservations reservation reservations",
		KindKubeControllersConfiguration:  "kubecontrollersconfiguration kubecontrollersconfigurations kubecontrollersconfig kubecontrollersconfigs",
		KindNetworkPolicy:                 "networkpolicy networkpolicies policy np policies pol pols",
		KindNetworkSet:                    "networkset networksets netsets",
		KindNode:                          "node nodes no nos",
		KindProfile:                       "profile profiles pro pros",
		KindStagedGlobalNetworkPolicy:     "stagedglobalnetworkpolicy stagedglobalnetworkpolicies sgnp sgnps",
		KindStagedKubernetesNetworkPolicy: "stagedkubernetesnetworkpolicy stagedkubernetesnetworkpolicies stagedkubernetespolicy sknp stagedkubernetespolicies skpol skpols",
		KindStagedNetworkPolicy:           "stagednetworkpolicy stagednetworkpolicies stagedpolicy snp stagedpolicies spol spols",
		KindTier:                          "tier tiers",
		KindWorkloadEndpoint:              "workloadendpoint workloadendpoints wep weps",
	} {
		for name := range strings.FieldsSeq(names) {
			if got, _ := KindByName(name); got != kind {
				t.Errorf("%q is %q, want %s", name, got, kind)
			}
		}
	}
}

func TestEveryKindHasAValue(t *testing.T) {
	t.Parallel()
	for _, info := range kindTable {
		v := New(info.kind)
		if got, ok := KindOf(v); !ok || got != info.kind {
			t.Errorf("KindOf(New(%s)) = %s", info.kind, got)
		}
		if (Meta(v) == nil) != info.record {
			t.Errorf("Meta(New(%s)) is %v", info.kind, Meta(v))
		}
	}
	if New("Nonsense") != nil {
		t.Error("New made something of an unknown kind")
	}
}

// fill sets v and all in it to something, so that a copy that shares memory
// shows.
func fill(t *rapid.T, v reflect.Value, depth int) {
	switch v.Kind() {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(t, v.Elem(), depth+1)
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				fill(t, v.Field(i), depth+1)
			}
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		for i := range 2 {
			fill(t, v.Index(i), depth+1)
		}
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fill(t, key, depth+1)
		fill(t, value, depth+1)
		v.SetMapIndex(key, value)
	case reflect.String:
		v.SetString(rapid.StringN(1, 8, -1).Draw(t, "s"))
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		v.SetInt(1)
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		v.SetUint(1)
	case reflect.Float64:
		v.SetFloat(1)
	case reflect.Bool:
		v.SetBool(true)
	}
}

// shared reports where a and b, which are equal, hold the same memory.
func shared(a, b reflect.Value, path string) []string {
	switch a.Kind() {
	case reflect.Pointer, reflect.Map:
		if a.IsNil() {
			return nil
		}
		if a.Pointer() == b.Pointer() {
			return []string{path}
		}
		if a.Kind() == reflect.Pointer {
			return shared(a.Elem(), b.Elem(), path)
		}
	case reflect.Slice:
		if a.Len() == 0 {
			return nil
		}
		if a.Pointer() == b.Pointer() {
			return []string{path}
		}
		return shared(a.Index(0), b.Index(0), path+"[0]")
	case reflect.Struct:
		if a.Type().PkgPath() == "time" {
			return nil // a *time.Location is meant to be shared
		}
		var all []string
		for i := range a.NumField() {
			all = append(all, shared(a.Field(i), b.Field(i), path+"."+a.Type().Field(i).Name)...)
		}
		return all
	}
	return nil
}

func TestCloneIsDeep(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		kind := rapid.SampledFrom(kindTable[:]).Draw(t, "kind").kind
		v := New(kind)
		if rapid.Bool().Draw(t, "filled") {
			fill(t, reflect.ValueOf(v).Elem(), 0)
		}
		c := Clone(v)
		if diff := cmp.Diff(v, c, cmpopts.EquateComparable(netip.Addr{})); diff != "" {
			t.Fatalf("%s differs from its clone (-value +clone):\n%s", kind, diff)
		}
		if s := shared(reflect.ValueOf(v), reflect.ValueOf(c), string(kind)); len(s) > 0 {
			t.Fatalf("shared with the clone: %v", s)
		}
	})
}
