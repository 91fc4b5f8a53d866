package store

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// quickly are values that [unmarshal] reads by itself.
func quickly() map[Kind][]string {
	out := map[Kind][]string{
		KindNode: {
			envelope(KindNode, `"name":"a",`+born+`,"labels":{"rack":"r1","é":"\u00e9"},"annotations":{"projectcalico.org/kube-labels":"{\"a\":\"b\"}"}`,
				`"spec":{"bgp":{"asNumber":64512,"ipv4Address":"10.1.0.1/24"},"wireguard":{"interfaceIPv4Address":"10.0.0.1"},"ipv4VXLANTunnelAddr":"10.0.0.2",`+
					`"addresses":[{"address":"10.1.0.1","type":"InternalIP"},{"address":"x"}],"orchRefs":[{"nodeName":"a","orchestrator":"k8s"}],"interfaces":[{"name":"eth0","addresses":["10.1.0.1"]}]},`+
					`"status":{"podCIDRs":["10.2.0.0/24"],"conditions":[{"type":"Ready","status":"True","lastTransitionTime":"2026-11-21T17:31:37Z","reason":"r","message":"m,{\"}"}]}`),
			envelope(KindNode, `"name":"a","labels":{},"annotations":null`, `"spec":{"addresses":[],"orchRefs":[],"bgp":null},"status":{}`),
		},
		KindIPAMBlock:    {`{"cidr":"10.0.0.0/30","affinity":null,"allocations":[],"unallocated":null,"attributes":[{}],"sequenceNumber":0,"sequenceNumberForAllocation":null,"deleted":true}`},
		KindIPAMAffinity: {`{}`, `{"state":"","deleted":true}`},
	}
	for _, v := range verbatim {
		if v.key.Kind == KindNode || v.key.Kind == KindIPAMBlock || v.key.Kind == KindIPAMAffinity {
			out[v.key.Kind] = append(out[v.key.Kind], v.raw)
		}
	}
	out[KindNode][0] = strings.Replace(out[KindNode][0], `"é":"\u00e9"`, `"e":"\u00e9"`, 1)
	return out
}

func TestUnmarshalReadsByItself(t *testing.T) {
	t.Parallel()
	for kind, raws := range quickly() {
		for _, raw := range raws {
			r := reader{text: []byte(raw)}
			switch kind {
			case KindNode:
				r.node(new(Node))
			case KindIPAMBlock:
				r.block(new(Block))
			case KindIPAMAffinity:
				r.affinity(new(Affinity))
			}
			if !r.done() {
				t.Errorf("it gave up at %q of %s", raw[r.at:], raw)
			}
			sameAsJSON(t, kind, raw)
		}
	}
}

// TestUnmarshalIsThatOfJSON: whatever is stored, it means the same.
func TestUnmarshalIsThatOfJSON(t *testing.T) {
	t.Parallel()
	all := quickly()
	rapid.Check(t, func(t *rapid.T) {
		kind := rapid.SampledFrom([]Kind{KindNode, KindIPAMBlock, KindIPAMAffinity}).Draw(t, "kind")
		raw := rapid.SampledFrom(all[kind]).Draw(t, "raw")
		for range rapid.IntRange(1, 3).Draw(t, "edits") {
			i := rapid.IntRange(0, len(raw)).Draw(t, "from")
			j := rapid.IntRange(i, min(len(raw), i+40)).Draw(t, "to")
			put := rapid.SampledFrom([]string{
				"", " ", "null", "0", "1", "01", "-1", "1.5", "1e3", "9223372036854775808", "99999999999999999999", "4294967296", "true", "false", `""`, `"a"`, `"a":1,`, `"\u0041"`,
				`"kind":"Node",`, `"Kind":"Node",`, `"cidr":"x",`, `"state":"x",`, `"spec":{},`, `"labels":{"a":"b"},`, `"allocations":[1],`, "{", "}", "[", "]", ",", ":", "\"", "\\", "\x01", "\xff", "é",
				raw[i:j] + raw[i:j], raw[i:j] + "," + raw[i:j],
			}).Draw(t, "put")
			raw = raw[:i] + put + raw[j:]
		}
		sameAsJSON(t, kind, raw)
	})
}

func FuzzUnmarshal(f *testing.F) {
	for kind, raws := range quickly() {
		for _, raw := range raws {
			f.Add(string(kind), raw)
		}
	}
	f.Fuzz(func(t *testing.T, kind, raw string) {
		if New(Kind(kind)) != nil {
			sameAsJSON(t, Kind(kind), raw)
		}
	})
}

func sameAsJSON(t interface{ Errorf(string, ...any) }, kind Kind, raw string) {
	got, want := New(kind), New(kind)
	err, wantErr := unmarshal([]byte(raw), got), json.Unmarshal([]byte(raw), want)
	if (err == nil) != (wantErr == nil) || wantErr == nil && !reflect.DeepEqual(got, want) {
		t.Errorf("%s\nis %+v, %v\nwant %+v, %v", raw, got, err, want, wantErr)
	}
}

func BenchmarkDecode(b *testing.B) {
	for kind, raws := range quickly() {
		b.Run(string(kind), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				for _, raw := range raws {
					if err := unmarshal([]byte(raw), New(kind)); err != nil {
						b.Fatal(err)
					}
				}
			}
		})
	}
}
