package convert

import (
	"encoding/json"
	"fmt"
	"net/netip"

	"github.com/routerd/routerd/store"
)

// fields is a JSON object of which some members are looked at.
type fields map[string]json.RawMessage

func (f fields) text(name string) string {
	var s string
	if json.Unmarshal(f[name], &s) != nil {
		return ""
	}
	return s
}

// rename moves a member, if it is there, to another name.
func (f fields) rename(from, to string) {
	if v, ok := f[from]; ok {
		delete(f, from)
		f[to] = v
	}
}

// set writes a member. Only texts and truth values come here, which are always
// JSON.
func (f fields) set(name string, v any) {
	b, _ := json.Marshal(v) //nolint:errchkjson // see above
	f[name] = b
}

// marked takes the mark of deletion from a record, which is text in [V1]'s
// affinities and a truth value anywhere else.
func (f fields) marked() (bool, error) {
	raw, ok := f["deleted"]
	if !ok {
		return false, nil
	}
	switch string(raw) {
	case "true", `"true"`:
		return true, nil
	case "false", `"false"`, `""`, "null":
		return false, nil
	}
	return false, fmt.Errorf("spec.deleted is %s: want true or false", raw)
}

// spelling lists the members that IPAM's records spell differently in etcd and
// in the API.
func spelling(kind store.Kind) (etcd, api []string) {
	switch kind {
	case store.KindIPAMBlock:
		return []string{"affinity_claim_time"}, []string{"affinityClaimTime"}
	case store.KindIPAMConfig:
		return []string{"strict_affinity", "auto_allocate_blocks"}, []string{"strictAffinity", "autoAllocateBlocks"}
	}
	return nil, nil
}

// readRecord reads one of IPAM's records, which carry their key in the API and
// not in etcd.
func (s Source) readRecord(o object, out *Object) error {
	var f fields
	if err := json.Unmarshal(orEmpty(o.Spec), &f); err != nil {
		return err
	}
	key, err := s.recordKey(o.Metadata.Name, f)
	if err != nil {
		return err
	}
	out.Key = key
	if _, name, ok := s.locate(key); !ok || name != o.Metadata.Name {
		return fmt.Errorf("it says that it is %s, whose object has another name", key)
	}
	if s.Kind != store.KindIPAMConfig {
		if out.Marked, err = f.marked(); err != nil {
			return err
		}
		f.set("deleted", false)
	}
	etcd, api := spelling(s.Kind)
	for i := range etcd {
		f.rename(api[i], etcd[i])
	}
	switch s.Kind {
	case store.KindIPAMBlock:
		delete(f, "strictAffinity") // of before there was a record for it
	case store.KindIPAMAffinity:
		for _, name := range []string{"cidr", "node", "type"} {
			delete(f, name)
		}
	case store.KindIPAMHandle:
		delete(f, "handleID")
		if node := o.Metadata.Annotations[store.AnnotationHandleNode]; node != "" {
			f.set(store.AnnotationHandleNode, node)
		}
	}
	out.Raw, err = json.Marshal(f)
	return err
}

// recordKey returns the key of a record. Where the record does not say, its name
// has to.
func (s Source) recordKey(name string, f fields) (store.Key, error) {
	cidr, err := netip.ParsePrefix(f.text("cidr"))
	switch s.Kind {
	case store.KindIPAMBlock:
		if err != nil {
			p, ok := parseCIDRName(name)
			if !ok {
				return store.Key{}, fmt.Errorf("spec.cidr is %s: want a range of addresses", f["cidr"])
			}
			cidr = p
		}
		return store.BlockKey(cidr), nil
	case store.KindIPAMAffinity:
		if t := f.text("type"); t != "" && t != "host" {
			return store.Key{}, ErrNotOurs // of the load balancers, which hold blocks without being a node
		}
		node := f.text("node")
		if err != nil || node == "" {
			return store.Key{}, fmt.Errorf("spec.node is %s and spec.cidr is %s: want a node and a range of addresses", f["node"], f["cidr"])
		}
		return store.AffinityKey(node, cidr), nil
	case store.KindIPAMHandle:
		if id := f.text("handleID"); id != "" {
			return store.HandleKey(id), nil
		}
		return store.HandleKey(name), nil
	}
	if name != store.DefaultName {
		return store.Key{}, ErrNotOurs
	}
	return store.IPAMConfigKey(), nil
}

// writeRecord is the inverse of readRecord.
func (s Source) writeRecord(key store.Key, raw []byte) (object, error) {
	var f fields
	if err := json.Unmarshal(raw, &f); err != nil {
		return object{}, err
	}
	etcd, api := spelling(s.Kind)
	for i := range etcd {
		f.rename(etcd[i], api[i])
	}
	var o object
	madeBy := ""
	switch s.Kind {
	case store.KindIPAMBlock:
		for _, list := range []string{"attributes", "unallocated"} { // a schema requires them
			if string(f[list]) == "null" {
				f[list] = json.RawMessage("[]")
			}
		}
		if s.group == V1 {
			f.set("strictAffinity", false) // schemas of older versions require it
		}
	case store.KindIPAMAffinity:
		deleted, err := f.marked()
		if err != nil {
			return object{}, err
		}
		f.set("cidr", key.Name)
		f.set("node", key.Namespace)
		f.set("type", "host")
		f.set("deleted", deleted)
		if s.group == V1 {
			f.set("deleted", fmt.Sprint(deleted))
		}
		version := "4"
		if key.CIDR().Addr().Is6() {
			version = "6"
		}
		o.Metadata.Labels = map[string]string{
			"projectcalico.org/hostname-hash": hostnameHash(key.Namespace),
			"projectcalico.org/affinity-type": "host",
			"projectcalico.org/ip-version":    version,
		}
	case store.KindIPAMHandle:
		f.set("handleID", key.Name)
		if string(f["block"]) == "null" {
			f["block"] = json.RawMessage("{}") // a schema requires it
		}
		madeBy = f.text(store.AnnotationHandleNode)
		delete(f, store.AnnotationHandleNode)
	}
	for name, v := range f {
		if string(v) == "null" {
			delete(f, name) // not there, which a schema takes
		}
	}
	spec, err := json.Marshal(f)
	if err != nil {
		return object{}, err
	}
	o.Spec = spec
	if s.group == V1 {
		if err := s.writeMetadata(&o.Metadata); err != nil {
			return object{}, err
		}
	}
	if madeBy != "" {
		o.Metadata.Annotations = with(o.Metadata.Annotations, store.AnnotationHandleNode, madeBy)
	}
	return o, nil
}

// Record reports whether the objects are IPAM's records, which a program of Calico's
// marks as deleted before it deletes them.
func (s Source) Record() bool {
	return s.Kind == store.KindIPAMBlock || s.Kind == store.KindIPAMAffinity || s.Kind == store.KindIPAMHandle
}

// MadeBy returns what would be stored of a handle, with the node on which it is made. It is
// kept by whoever writes the handle later.
func MadeBy(raw []byte, node string) ([]byte, error) {
	var f fields
	if err := json.Unmarshal(raw, &f); err != nil {
		return nil, err
	}
	f.set(store.AnnotationHandleNode, node)
	return json.Marshal(f)
}

// Mark returns the patch that marks a record as about to be deleted, the first
// of the two steps of its deletion, for [store.KindIPAMBlock] and KindIPAMAffinity. It
// reports false for kinds that are deleted in one step. Handles are: nobody watches them,
// Calico's programs mark them for want of a deletion on condition of the revision, and one
// of these that meets the end of a handle reads it again.
func (s Source) Mark() (spec []byte, ok bool) {
	switch s.Kind {
	case store.KindIPAMBlock:
		return []byte(`{"deleted":true}`), true
	case store.KindIPAMAffinity:
		if s.group == V1 {
			return []byte(`{"deleted":"true"}`), true
		}
		return []byte(`{"deleted":true}`), true
	}
	return nil, false
}
