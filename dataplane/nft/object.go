package nft

import (
	"crypto/sha256"
	"encoding/base32"
	"encoding/binary"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// TableName is the name of the table, of family inet, in "nft list table inet
// routerd".
const TableName = "routerd"

// hook is where a base chain stands.
type hook struct {
	kind     string // filter or nat
	number   uint32
	priority int32
}

// rule is a rule as the kernel takes it.
type rule struct {
	exprs   []byte // list of expressions
	hash    uint64 // of exprs and comment: the rule's identity in the kernel
	comment string
	counter Counter // whom its counter belongs to
	logging logging
}

// logging says what a rule's counters say of what was logged.
type logging uint8

const (
	logsAll  logging = iota // or nothing is to be logged
	logsNone                // what it meets is beyond the bound
	logsSome                // a second counter says how much
)

// chain is a chain with its rules.
type chain struct {
	hook    *hook // nil: others jump to it
	comment string
	rules   []rule
}

// setSpec is what a set is made as.
type setSpec struct {
	keyType, keyLen uint32 // nft(8)'s number of the type, and bytes
	flags           uint32 // NFT_SET_*
}

func (s setSpec) isMap() bool      { return s.flags&unix.NFT_SET_MAP != 0 }
func (s setSpec) isInterval() bool { return s.flags&unix.NFT_SET_INTERVAL != 0 }

// set is a set or a verdict map with its elements. The key of an element is
// what the kernel has as key; of an interval, one byte more that says whether
// it is the end.
type set struct {
	spec    setSpec
	comment string
	data    uint32        // type of a map's data; 0: verdicts
	keep    time.Duration // how long the kernel keeps elements that packets add
	elems   map[string]string
}

// The data of elements, beside the names of chains to go to and addresses.
const (
	elemNone   = ""
	elemAccept = "\x00accept"
)

// The kernel's numbers of data types are nft(8)'s own, for listings: a
// concatenation is its parts, six bits each.
const (
	typeIPv4    = 7
	typeIPv6    = 8
	typeProto   = 12
	typeService = 13
	typeICMP    = 14
	typeICMPv6  = 29
	typeIfname  = 41
	typeVerdict = 0xffffff00
)

func concat(types ...uint32) uint32 {
	var t uint32
	for _, n := range types {
		t = t<<6 | n
	}
	return t
}

// hash32 names content.
func hashName(content string) string {
	sum := sha256.Sum256([]byte(content))
	return strings.ToLower(base32.HexEncoding.WithPadding(base32.NoPadding).EncodeToString(sum[:10]))
}

func newRule(exprs []byte, c Counter) rule {
	comment := c.comment()
	h := sha256.New()
	h.Write(exprs)
	h.Write([]byte(comment))
	return rule{exprs: exprs, hash: binary.BigEndian.Uint64(h.Sum(nil)), comment: comment, counter: c}
}

// The types of user data of a rule: nft(8) shows the first as a comment and
// passes over the second.
const (
	udataComment = 0
	udataHash    = 0x80
)

// Of a set: the byte order of its keys, and a comment.
const (
	udataKeyByteOrder = 0
	udataSetComment   = 7
	orderHost         = 1
	orderBig          = 2
)

const mostComment = 127 // bytes that nft(8) shows (NFTNL_UDATA_COMMENT_MAXLEN)

// fit makes a text fit for a comment. Nothing that nft(8) prints is quoted, so
// a quote in it could not be read back.
func fit(s string) string { return strings.ReplaceAll(s[:min(len(s), mostComment)], `"`, "'") }

func udata(b []byte, kind byte, v []byte) []byte {
	b = append(b, kind, byte(len(v))) //nolint:gosec // fit to mostComment
	return append(b, v...)
}

func (r *rule) udata() []byte {
	b := udata(nil, udataHash, binary.BigEndian.AppendUint64(nil, r.hash))
	if r.comment != "" {
		b = udata(b, udataComment, append([]byte(r.comment), 0))
	}
	return b
}

// hashOf returns the hash in a rule's user data, 0 for a rule that is not ours.
func hashOf(b []byte) uint64 {
	for len(b) >= 2 {
		n := 2 + int(b[1])
		if n > len(b) {
			return 0
		}
		if b[0] == udataHash && n == 10 {
			return binary.BigEndian.Uint64(b[2:])
		}
		b = b[n:]
	}
	return 0
}

func (s *set) udata() []byte {
	order := uint32(orderBig)
	if s.spec.keyType == typeIfname {
		order = orderHost
	}
	b := udata(nil, udataKeyByteOrder, binary.NativeEndian.AppendUint32(nil, order))
	if s.comment != "" {
		b = udata(b, udataSetComment, append([]byte(fit(s.comment)), 0))
	}
	return b
}

func ifname(name string) string {
	var b [unix.IFNAMSIZ]byte
	copy(b[:unix.IFNAMSIZ-1], name)
	return string(b[:])
}

// tableFlags are those of the table where the kernel knows them: nobody else
// may write to it, and it stays when our socket closes (Linux 6.9).
const (
	flagOwner   = 0x2 // NFT_TABLE_F_OWNER
	flagPersist = 0x4 // NFT_TABLE_F_PERSIST
)

func (b *batch) putTable(flags uint32) {
	b.add(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, subject{"add", "table", b.tableName()}, func() {
		b.Text(unix.NFTA_TABLE_NAME, b.tableName())
		b.Net32(unix.NFTA_TABLE_FLAGS, flags)
	})
}

func (b *batch) delTable() {
	b.add(unix.NFT_MSG_DELTABLE, 0, subject{"delete", "table", b.tableName()}, func() {
		b.Text(unix.NFTA_TABLE_NAME, b.tableName())
	})
}

func (b *batch) putChain(name string, c *chain) {
	b.add(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, subject{"add", "chain", name}, func() {
		b.Text(unix.NFTA_CHAIN_TABLE, b.tableName())
		b.Text(unix.NFTA_CHAIN_NAME, name)
		if c.comment != "" {
			b.Bytes(chainUserdata, udata(nil, udataComment, append([]byte(fit(c.comment)), 0))...)
		}
		if c.hook == nil {
			return
		}
		b.Text(unix.NFTA_CHAIN_TYPE, c.hook.kind)
		b.Nest(unix.NFTA_CHAIN_HOOK, func() {
			b.Net32(unix.NFTA_HOOK_HOOKNUM, c.hook.number)
			b.Net32(unix.NFTA_HOOK_PRIORITY, uint32(c.hook.priority)) //nolint:gosec // two's complement is what is wanted
		})
	})
}

func (b *batch) delChain(name string) {
	b.add(unix.NFT_MSG_DELCHAIN, 0, subject{"delete", "chain", name}, func() {
		b.Text(unix.NFTA_CHAIN_TABLE, b.tableName())
		b.Text(unix.NFTA_CHAIN_NAME, name)
	})
}

// putRule adds a rule before the one with a handle, or with 0 at the end.
func (b *batch) putRule(chain string, r *rule, before uint64) {
	flags := uint16(unix.NLM_F_CREATE)
	if before == 0 {
		flags |= unix.NLM_F_APPEND
	}
	b.add(unix.NFT_MSG_NEWRULE, flags, subject{"add", "a rule of chain", chain}, func() {
		b.Text(unix.NFTA_RULE_TABLE, b.tableName())
		b.Text(unix.NFTA_RULE_CHAIN, chain)
		b.Bytes(unix.NFTA_RULE_EXPRESSIONS|unix.NLA_F_NESTED, r.exprs...)
		b.Bytes(unix.NFTA_RULE_USERDATA, r.udata()...)
		if before != 0 {
			b.Net64(unix.NFTA_RULE_POSITION, before)
		}
	})
}

// delRule deletes a rule, or with 0 all of the chain.
func (b *batch) delRule(chain string, handle uint64) {
	b.add(unix.NFT_MSG_DELRULE, 0, subject{"delete", "a rule of chain", chain}, func() {
		b.Text(unix.NFTA_RULE_TABLE, b.tableName())
		b.Text(unix.NFTA_RULE_CHAIN, chain)
		if handle != 0 {
			b.Net64(unix.NFTA_RULE_HANDLE, handle)
		}
	})
}

func (b *batch) putSet(name string, s *set) {
	b.add(unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE, subject{"add", "set", name}, func() {
		b.Text(unix.NFTA_SET_TABLE, b.tableName())
		b.Text(unix.NFTA_SET_NAME, name)
		b.Net32(unix.NFTA_SET_ID, uint32(b.Len()))
		b.Net32(unix.NFTA_SET_FLAGS, s.spec.flags)
		b.Net32(unix.NFTA_SET_KEY_TYPE, s.spec.keyType)
		b.Net32(unix.NFTA_SET_KEY_LEN, s.spec.keyLen)
		switch {
		case !s.spec.isMap():
		case s.data == 0:
			b.Net32(unix.NFTA_SET_DATA_TYPE, typeVerdict)
			b.Net32(unix.NFTA_SET_DATA_LEN, 0)
		default:
			b.Net32(unix.NFTA_SET_DATA_TYPE, s.data)
			b.Net32(unix.NFTA_SET_DATA_LEN, addrLen(s.data))
		}
		s.describe(&b.Attrs)
		b.Bytes(unix.NFTA_SET_USERDATA, s.udata()...)
	})
}

func addrLen(dataType uint32) uint32 {
	if dataType == typeIPv4 {
		return 4
	}
	return 16
}

func (b *batch) delSet(name string) {
	b.add(unix.NFT_MSG_DELSET, 0, subject{"delete", "set", name}, func() {
		b.Text(unix.NFTA_SET_TABLE, b.tableName())
		b.Text(unix.NFTA_SET_NAME, name)
	})
}

// mostElems is how many elements go in one message: an attribute holds 64 KiB.
const mostElems = 300

// element is an element with its data.
type element struct{ key, data string }

func (b *batch) putElems(name string, s *set, list []element) {
	b.elems(unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE, "add", name, s, list)
}

func (b *batch) delElems(name string, s *set, list []element) {
	b.elems(unix.NFT_MSG_DELSETELEM, 0, "delete", name, s, list)
}

func (b *batch) elems(kind, flags uint16, verb, name string, s *set, list []element) {
	for len(list) > 0 {
		now := list[:min(mostElems, len(list))]
		list = list[len(now):]
		b.add(kind, flags, subject{verb, "elements of set", name}, func() {
			b.Text(unix.NFTA_SET_ELEM_LIST_TABLE, b.tableName())
			b.Text(unix.NFTA_SET_ELEM_LIST_SET, name)
			b.Nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS, func() {
				for _, e := range now {
					b.Nest(unix.NFTA_LIST_ELEM, func() { b.elem(s, e, kind == unix.NFT_MSG_NEWSETELEM) })
				}
			})
		})
	}
}

func (b *batch) elem(s *set, e element, withData bool) {
	key := e.key
	if s.spec.isInterval() {
		end := key[len(key)-1:] == endOf
		key = key[:len(key)-1]
		if end {
			b.Net32(unix.NFTA_SET_ELEM_FLAGS, unix.NFT_SET_ELEM_INTERVAL_END)
		}
	}
	b.Nest(unix.NFTA_SET_ELEM_KEY, func() { b.Chars(unix.NFTA_DATA_VALUE, key) })
	if !s.spec.isMap() || !withData {
		return
	}
	b.Nest(unix.NFTA_SET_ELEM_DATA, func() {
		switch {
		case s.data != 0:
			b.Chars(unix.NFTA_DATA_VALUE, e.data)
		case e.data == elemAccept:
			verdict(&b.Attrs, nfAccept, "")
		default:
			verdict(&b.Attrs, unix.NFT_GOTO, e.data)
		}
	})
}

// chainUserdata is NFTA_CHAIN_USERDATA (Linux 5.10).
const chainUserdata = 12
