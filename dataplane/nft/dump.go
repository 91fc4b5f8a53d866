package nft

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane/internal/nl"
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
	return nl.Undisturbed(tries, read)
}

// dump reads our table.
func (c conn) dump() (h *have, err error) {
	err = undisturbed(func() (err error) {
		h, err = c.dumpOnce()
		return err
	})
	if err != nil {
		return nil, err
	}
	return h, nil
}

func (c conn) dumpOnce() (*have, error) {
	h := &have{chains: make(map[string]*haveChain), sets: make(map[string]*set)}
	err := c.request(unix.NFT_MSG_GETTABLE, func(b *nl.Batch) { b.Text(unix.NFTA_TABLE_NAME, TableName) }, func(v []byte) {
		h.there = true
		for kind, v := range nl.Attributes(v) {
			if kind == unix.NFTA_TABLE_FLAGS {
				h.flags = v.Net32()
			}
		}
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
		err := part.fn(h)
		if errors.Is(err, unix.ENOENT) {
			err = fmt.Errorf("%w: %w", nl.ErrInterrupted, err) // it was there when the reading began
		}
		if err != nil {
			return nil, fmt.Errorf("read the %s of table %s: %w", part.what, TableName, err)
		}
	}
	return h, nil
}

func (c conn) dumpChains(h *have) error {
	// The kernel gives the chains of all tables.
	return c.list(unix.NFT_MSG_GETCHAIN, nil, func(v []byte) {
		var table, name string
		hk := new(hook)
		based := false
		for kind, v := range nl.Attributes(v) {
			switch kind {
			case unix.NFTA_CHAIN_TABLE:
				table = v.Text()
			case unix.NFTA_CHAIN_NAME:
				name = v.Text()
			case unix.NFTA_CHAIN_TYPE:
				hk.kind = v.Text()
			case unix.NFTA_CHAIN_HOOK:
				based = true
				for kind, v := range nl.Attributes(v) {
					switch kind {
					case unix.NFTA_HOOK_HOOKNUM:
						hk.number = v.Net32()
					case unix.NFTA_HOOK_PRIORITY:
						hk.priority = int32(v.Net32()) //nolint:gosec // two's complement
					}
				}
			}
		}
		if table != TableName {
			return
		}
		if !based {
			hk = nil
		}
		h.chains[name] = &haveChain{hook: hk}
	})
}

func (c conn) dumpRules(h *have) error {
	return c.rules("", func(chain string, hd handle, _ []byte) {
		if ch := h.chains[chain]; ch != nil {
			ch.rules = append(ch.rules, hd)
		}
	})
}

// rules reads the rules of one chain, or of all.
func (c conn) rules(chain string, fn func(chain string, h handle, exprs []byte)) error {
	ask := func(b *nl.Batch) {
		b.Text(unix.NFTA_RULE_TABLE, TableName)
		if chain != "" {
			b.Text(unix.NFTA_RULE_CHAIN, chain)
		}
	}
	return c.list(unix.NFT_MSG_GETRULE, ask, func(v []byte) {
		var table, name string
		var h handle
		var exprs []byte
		for kind, v := range nl.Attributes(v) {
			switch kind {
			case unix.NFTA_RULE_TABLE:
				table = v.Text()
			case unix.NFTA_RULE_CHAIN:
				name = v.Text()
			case unix.NFTA_RULE_HANDLE:
				h.number = v.Net64()
			case unix.NFTA_RULE_USERDATA:
				h.hash = hashOf(v)
			case unix.NFTA_RULE_EXPRESSIONS:
				exprs = v
			}
		}
		if table == TableName {
			fn(name, h, exprs)
		}
	})
}

func (c conn) dumpSets(h *have) error {
	ask := func(b *nl.Batch) { b.Text(unix.NFTA_SET_TABLE, TableName) }
	err := c.list(unix.NFT_MSG_GETSET, ask, func(v []byte) {
		var table, name string
		s := &set{elems: make(map[string]string)}
		for kind, v := range nl.Attributes(v) {
			switch kind {
			case unix.NFTA_SET_TABLE:
				table = v.Text()
			case unix.NFTA_SET_NAME:
				name = v.Text()
			case unix.NFTA_SET_FLAGS:
				s.spec.flags = v.Net32()
			case unix.NFTA_SET_KEY_TYPE:
				s.spec.keyType = v.Net32()
			case unix.NFTA_SET_KEY_LEN:
				s.spec.keyLen = v.Net32()
			case unix.NFTA_SET_DATA_TYPE:
				if t := v.Net32(); t != typeVerdict {
					s.data = t
				}
			}
		}
		if table == TableName {
			h.sets[name] = s
		}
	})
	if err != nil {
		return err
	}
	for name, s := range h.sets {
		if s.spec.flags&unix.NFT_SET_EVAL != 0 {
			continue // its elements are the packets' own
		}
		if err := c.dumpElems(name, s); err != nil {
			return fmt.Errorf("set %s: %w", name, err)
		}
	}
	return nil
}

func (c conn) dumpElems(name string, s *set) error {
	ask := func(b *nl.Batch) {
		b.Text(unix.NFTA_SET_ELEM_LIST_TABLE, TableName)
		b.Text(unix.NFTA_SET_ELEM_LIST_SET, name)
	}
	return c.list(unix.NFT_MSG_GETSETELEM, ask, func(v []byte) {
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
	for kind, v := range nl.Attributes(b) {
		switch kind {
		case unix.NFTA_SET_ELEM_KEY:
			eachOf(v, unix.NFTA_DATA_VALUE, func(v []byte) { key = string(v) })
		case unix.NFTA_SET_ELEM_FLAGS:
			if v.Net32()&unix.NFT_SET_ELEM_INTERVAL_END != 0 {
				edge = endOf
			}
		case unix.NFTA_SET_ELEM_DATA:
			for kind, v := range nl.Attributes(v) {
				if kind == unix.NFTA_DATA_VALUE {
					data = string(v)
				} else {
					data = decodeVerdict(v)
				}
			}
		}
	}
	if s.spec.isInterval() {
		key += edge
	}
	return key, data
}

func decodeVerdict(b []byte) string {
	var code int32
	chain := ""
	for kind, v := range nl.Attributes(b) {
		switch kind {
		case unix.NFTA_VERDICT_CODE:
			code = int32(v.Net32()) //nolint:gosec // two's complement
		case unix.NFTA_VERDICT_CHAIN:
			chain = v.Text()
		}
	}
	switch code {
	case nfAccept:
		return elemAccept
	case unix.NFT_GOTO:
		return chain
	}
	return fmt.Sprintf("\x00%d %s", code, chain) // none of ours: it is replaced
}

// against notes all that differs from what is desired in a journal. It is false
// when the differences cannot be mended one by one.
func (h *have) against(w *desired) (journal, map[string][]handle, bool) {
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

// eachOf calls fn with the nested attributes of one kind of list.
func eachOf(b []byte, kind uint16, fn func([]byte)) {
	for k, v := range nl.Attributes(b) {
		if k == kind {
			fn(v)
		}
	}
}

// count is what a counter says.
type count struct{ packets, bytes uint64 }

// countersOf returns what the first two counter expressions of a rule say.
func countersOf(exprs []byte) (first, second count) {
	list := []*count{&first, &second}
	eachOf(exprs, unix.NFTA_LIST_ELEM, func(e []byte) {
		name := ""
		for kind, v := range nl.Attributes(e) {
			switch {
			case kind == unix.NFTA_EXPR_NAME:
				name = v.Text()
			case kind == unix.NFTA_EXPR_DATA && name == "counter" && len(list) > 0:
				list[0].read(v)
				list = list[1:]
			}
		}
	})
	return first, second
}

func (c *count) read(b []byte) {
	for kind, v := range nl.Attributes(b) {
		switch kind {
		case unix.NFTA_COUNTER_PACKETS:
			c.packets = v.Net64()
		case unix.NFTA_COUNTER_BYTES:
			c.bytes = v.Net64()
		}
	}
}
