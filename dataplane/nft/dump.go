package nft

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"

	"golang.org/x/sys/unix"
)

// have is what a dump says of our table.
type have struct {
	there  bool
	flags  uint32
	chains map[string]*haveChain
	sets   map[string]*set
}

type haveChain struct {
	hook  *hook
	rules []handle
}

// undisturbed reads once more while somebody else's transactions interrupt it;
// read begins anew each time.
func undisturbed(read func() error) error {
	const tries = 10
	for range tries {
		if err := read(); !errors.Is(err, errInterrupted) {
			return err
		}
	}
	return fmt.Errorf("read table %s: %w each time of %d", TableName, errInterrupted, tries)
}

// dump reads our table.
func (c *conn) dump() (h *have, err error) {
	err = undisturbed(func() (err error) {
		h, err = c.dumpOnce()
		return err
	})
	if err != nil {
		return nil, err
	}
	return h, nil
}

func (c *conn) dumpOnce() (*have, error) {
	h := &have{chains: make(map[string]*haveChain), sets: make(map[string]*set)}
	err := c.request(unix.NFT_MSG_GETTABLE, 0, func(b *attrs) { b.str(unix.NFTA_TABLE_NAME, TableName) }, func(v []byte) {
		h.there = true
		each(v, func(a attr) {
			if a.kind == unix.NFTA_TABLE_FLAGS {
				h.flags = a.u32()
			}
		})
	})
	switch {
	case errors.Is(err, unix.ENOENT):
		return h, nil
	case err != nil:
		return nil, fmt.Errorf("read table %s: %w", TableName, err)
	}
	for _, part := range []struct {
		what string
		fn   func(*have) error
	}{{"chains", c.dumpChains}, {"rules", c.dumpRules}, {"sets", c.dumpSets}} {
		if err := part.fn(h); err != nil {
			return nil, fmt.Errorf("read the %s of table %s: %w", part.what, TableName, err)
		}
	}
	return h, nil
}

func (c *conn) dumpChains(h *have) error {
	// The kernel gives the chains of all tables.
	return c.request(unix.NFT_MSG_GETCHAIN, unix.NLM_F_DUMP, nil, func(v []byte) {
		var table, name string
		hk := new(hook)
		based := false
		each(v, func(a attr) {
			switch a.kind {
			case unix.NFTA_CHAIN_TABLE:
				table = a.str()
			case unix.NFTA_CHAIN_NAME:
				name = a.str()
			case unix.NFTA_CHAIN_TYPE:
				hk.kind = a.str()
			case unix.NFTA_CHAIN_HOOK:
				based = true
				each(a.v, func(a attr) {
					switch a.kind {
					case unix.NFTA_HOOK_HOOKNUM:
						hk.number = a.u32()
					case unix.NFTA_HOOK_PRIORITY:
						hk.priority = int32(a.u32()) //nolint:gosec // two's complement
					}
				})
			}
		})
		if table != TableName {
			return
		}
		if !based {
			hk = nil
		}
		h.chains[name] = &haveChain{hook: hk}
	})
}

func (c *conn) dumpRules(h *have) error {
	return c.rules("", func(chain string, hd handle, _ []byte) {
		if ch := h.chains[chain]; ch != nil {
			ch.rules = append(ch.rules, hd)
		}
	})
}

// rules reads the rules of one chain, or of all.
func (c *conn) rules(chain string, fn func(chain string, h handle, exprs []byte)) error {
	ask := func(b *attrs) {
		b.str(unix.NFTA_RULE_TABLE, TableName)
		if chain != "" {
			b.str(unix.NFTA_RULE_CHAIN, chain)
		}
	}
	return c.request(unix.NFT_MSG_GETRULE, unix.NLM_F_DUMP, ask, func(v []byte) {
		var table, name string
		var h handle
		var exprs []byte
		each(v, func(a attr) {
			switch a.kind {
			case unix.NFTA_RULE_TABLE:
				table = a.str()
			case unix.NFTA_RULE_CHAIN:
				name = a.str()
			case unix.NFTA_RULE_HANDLE:
				h.number = a.u64()
			case unix.NFTA_RULE_USERDATA:
				h.hash = hashOf(a.v)
			case unix.NFTA_RULE_EXPRESSIONS:
				exprs = a.v
			}
		})
		if table == TableName {
			fn(name, h, exprs)
		}
	})
}

func (c *conn) dumpSets(h *have) error {
	ask := func(b *attrs) { b.str(unix.NFTA_SET_TABLE, TableName) }
	err := c.request(unix.NFT_MSG_GETSET, unix.NLM_F_DUMP, ask, func(v []byte) {
		var table, name string
		s := &set{elems: make(map[string]string)}
		each(v, func(a attr) {
			switch a.kind {
			case unix.NFTA_SET_TABLE:
				table = a.str()
			case unix.NFTA_SET_NAME:
				name = a.str()
			case unix.NFTA_SET_FLAGS:
				s.spec.flags = a.u32()
			case unix.NFTA_SET_KEY_TYPE:
				s.spec.keyType = a.u32()
			case unix.NFTA_SET_KEY_LEN:
				s.spec.keyLen = a.u32()
			case unix.NFTA_SET_DATA_TYPE:
				if t := a.u32(); t != typeVerdict {
					s.data = t
				}
			}
		})
		if table == TableName {
			h.sets[name] = s
		}
	})
	if err != nil {
		return err
	}
	for name, s := range h.sets {
		if err := c.dumpElems(name, s); err != nil {
			return fmt.Errorf("set %s: %w", name, err)
		}
	}
	return nil
}

func (c *conn) dumpElems(name string, s *set) error {
	ask := func(b *attrs) {
		b.str(unix.NFTA_SET_ELEM_LIST_TABLE, TableName)
		b.str(unix.NFTA_SET_ELEM_LIST_SET, name)
	}
	return c.request(unix.NFT_MSG_GETSETELEM, unix.NLM_F_DUMP, ask, func(v []byte) {
		eachOf(v, unix.NFTA_SET_ELEM_LIST_ELEMENTS, func(list []byte) {
			eachOf(list, unix.NFTA_LIST_ELEM, func(e []byte) {
				key, data := decodeElem(e, s)
				s.elems[key] = data
			})
		})
	})
}

func decodeElem(b []byte, s *set) (key, data string) {
	edge := startOf
	each(b, func(a attr) {
		switch a.kind {
		case unix.NFTA_SET_ELEM_KEY:
			eachOf(a.v, unix.NFTA_DATA_VALUE, func(v []byte) { key = string(v) })
		case unix.NFTA_SET_ELEM_FLAGS:
			if a.u32()&unix.NFT_SET_ELEM_INTERVAL_END != 0 {
				edge = endOf
			}
		case unix.NFTA_SET_ELEM_DATA:
			each(a.v, func(a attr) {
				if a.kind == unix.NFTA_DATA_VALUE {
					data = string(a.v)
				} else {
					data = decodeVerdict(a.v)
				}
			})
		}
	})
	if s.spec.isInterval() {
		key += edge
	}
	return key, data
}

func decodeVerdict(b []byte) string {
	var code int32
	chain := ""
	each(b, func(a attr) {
		switch a.kind {
		case unix.NFTA_VERDICT_CODE:
			code = int32(a.u32()) //nolint:gosec // two's complement
		case unix.NFTA_VERDICT_CHAIN:
			chain = a.str()
		}
	})
	switch code {
	case nfAccept:
		return elemAccept
	case unix.NFT_GOTO:
		return chain
	}
	return fmt.Sprintf("\x00%d %s", code, chain) // none of ours: it is replaced
}

// against notes all that differs from the world in a journal. It is false
// when the differences cannot be mended one by one.
func (h *have) against(w *world) (journal, map[string][]handle, bool) {
	j := newJournal()
	handles := make(map[string][]handle)
	for name, now := range w.chains {
		is := h.chains[name]
		if is == nil {
			j.chains[name] = false
			continue
		}
		if (is.hook == nil) != (now.hook == nil) || is.hook != nil && *is.hook != *now.hook {
			return j, nil, false
		}
		if !slices.EqualFunc(is.rules, now.rules, func(h handle, r rule) bool { return h.hash == r.hash }) {
			j.chains[name] = true
			handles[name] = is.rules
		}
	}
	for name := range h.chains {
		if w.chains[name] == nil {
			j.chains[name] = true
		}
	}
	for name, now := range w.sets {
		is := h.sets[name]
		switch {
		case is == nil:
			j.sets[name] = nil
		case is.spec != now.spec || is.data != now.data:
			return j, nil, false
		case !maps.Equal(is.elems, now.elems):
			j.sets[name] = is
		}
	}
	for name, is := range h.sets {
		if w.sets[name] == nil {
			j.sets[name] = is
		}
	}
	return j, handles, true
}

// count is what a counter says.
type count struct{ packets, bytes uint64 }

// countersOf returns what the first two counter expressions of a rule say.
func countersOf(exprs []byte) (first, second count) {
	list := []*count{&first, &second}
	eachOf(exprs, unix.NFTA_LIST_ELEM, func(e []byte) {
		name := ""
		each(e, func(a attr) {
			switch {
			case a.kind == unix.NFTA_EXPR_NAME:
				name = a.str()
			case a.kind == unix.NFTA_EXPR_DATA && name == "counter" && len(list) > 0:
				list[0].read(a.v)
				list = list[1:]
			}
		})
	})
	return first, second
}

func (c *count) read(b []byte) {
	each(b, func(a attr) {
		switch a.kind {
		case unix.NFTA_COUNTER_PACKETS:
			c.packets = a.u64()
		case unix.NFTA_COUNTER_BYTES:
			c.bytes = a.u64()
		}
	})
}

// nativeU32 reads a number of a netlink header.
func nativeU32(b []byte) uint32 { return binary.NativeEndian.Uint32(b) }
