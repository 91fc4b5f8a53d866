package nft

import (
	"maps"
	"slices"
)

// handle is a rule of the kernel.
type handle struct {
	number uint64
	hash   uint64
}

// plan is what is to be done, in three parts. The first makes what nothing
// refers to yet, the second is the switch, the third removes what nothing
// refers to any more. Carried out in order, each part is safe: a packet meets
// the rules before or after the switch.
type plan struct {
	prepare []func(*batch)
	change  []func(*batch)
	remove  []func(*batch)
}

// differ says what leads from what the kernel has to what it should have, of
// all that a journal names. The handles are those of the chains that are there
// and stay.
func (w *desired) differ(j *journal, handles map[string][]handle) *plan {
	p := new(plan)
	w.differSets(p, j)
	// Chains first come without rules, so that rules can name all of them.
	names := slices.Sorted(maps.Keys(j.chains))
	for _, name := range names {
		now := w.chains[name]
		if now == nil || j.chains[name] {
			continue
		}
		if now.hook != nil {
			p.change = append(p.change, func(b *batch) { b.putChain(name, now) })
		} else {
			p.prepare = append(p.prepare, func(b *batch) { b.putChain(name, now) })
		}
	}
	w.differNewElems(p, j)
	for _, name := range names {
		now, there := w.chains[name], j.chains[name]
		switch {
		case now != nil && !there && now.hook == nil:
			p.prepare = append(p.prepare, appendRules(name, now.rules)...)
		case now != nil && !there:
			p.change = append(p.change, appendRules(name, now.rules)...)
		case now != nil:
			p.change = append(p.change, changeRules(name, now.rules, handles[name])...)
		case there:
			// All empty before the first is deleted: they may jump to one another.
			p.remove = append(p.remove, func(b *batch) { b.delRule(name, 0) })
		}
	}
	w.differElems(p, j)
	for _, name := range names {
		if w.chains[name] == nil && j.chains[name] {
			p.remove = append(p.remove, func(b *batch) { b.delChain(name) })
		}
	}
	for _, name := range slices.Sorted(maps.Keys(j.sets)) {
		if w.sets[name] == nil && j.sets[name] != nil {
			p.remove = append(p.remove, func(b *batch) { b.delSet(name) })
		}
	}
	return p
}

func (w *desired) differSets(p *plan, j *journal) {
	for _, name := range slices.Sorted(maps.Keys(j.sets)) {
		if now := w.sets[name]; now != nil && j.sets[name] == nil {
			p.prepare = append(p.prepare, func(b *batch) { b.putSet(name, now) })
		}
	}
}

// differNewElems fills the sets that are new.
func (w *desired) differNewElems(p *plan, j *journal) {
	for _, name := range slices.Sorted(maps.Keys(j.sets)) {
		now := w.sets[name]
		if now == nil || j.sets[name] != nil || len(now.elems) == 0 {
			continue
		}
		p.prepare = append(p.prepare, putAll(name, now, sortedElems(now.elems))...)
	}
}

// putAll adds elements in messages of their own, so that large sets can be split.
func putAll(name string, s *set, list []element) []func(*batch) {
	var out []func(*batch)
	for part := range slices.Chunk(list, mostElems) {
		out = append(out, func(b *batch) { b.putElems(name, s, part) })
	}
	return out
}

func sortedElems(m map[string]string) []element {
	list := make([]element, 0, len(m))
	for _, k := range slices.Sorted(maps.Keys(m)) {
		list = append(list, element{k, m[k]})
	}
	return list
}

// differElems changes single elements of the sets that stay.
func (w *desired) differElems(p *plan, j *journal) {
	for _, name := range slices.Sorted(maps.Keys(j.elems)) {
		now := w.sets[name]
		if was, ok := j.sets[name]; now == nil || ok && was == nil || ok && was != now {
			continue
		}
		var del, put []element
		for _, key := range slices.Sorted(maps.Keys(j.elems[name])) {
			del, put = differElem(j.elems[name][key], key, now.elems, now.spec.isInterval(), del, put)
		}
		p.changeElems(name, now, del, put)
	}
	for name, was := range j.sets {
		now := w.sets[name]
		if now == nil || was == nil || was == now {
			continue // new or gone; or it went and came as it was
		}
		old := maps.Clone(was.elems)
		for key, e := range j.elems[name] {
			if e.key == "" {
				delete(old, key)
			} else {
				old[key] = e.data
			}
		}
		if now.spec.isInterval() {
			if !maps.Equal(old, now.elems) {
				p.changeElems(name, now, sortedElems(old), sortedElems(now.elems))
			}
			continue
		}
		var del, put []element
		for _, e := range sortedElems(old) {
			del, put = differElem(e, e.key, now.elems, false, del, put)
		}
		for _, e := range sortedElems(now.elems) {
			if _, ok := old[e.key]; !ok {
				put = append(put, e)
			}
		}
		p.changeElems(name, now, del, put)
	}
}

// differElem compares one element; old has no key if there was none. An element that stays is made anew in a set of intervals:
// one of its bounds may be another's too, and the kernel refuses a bound that lies inside of an interval which is not deleted whole.
func differElem(old element, key string, now map[string]string, intervals bool, del, put []element) ([]element, []element) {
	data, wanted := now[key]
	if old.key != "" && (!wanted || intervals || data != old.data) {
		del = append(del, old)
	}
	if wanted && (old.key == "" || intervals || data != old.data) {
		put = append(put, element{key, data})
	}
	return del, put
}

func (p *plan) changeElems(name string, s *set, del, put []element) {
	if len(del) > 0 {
		p.change = append(p.change, func(b *batch) { b.delElems(name, s, del) })
	}
	if len(put) > 0 {
		p.change = append(p.change, func(b *batch) { b.putElems(name, s, put) })
	}
}

func appendRules(name string, rules []rule) []func(*batch) {
	var out []func(*batch)
	for i := range rules {
		out = append(out, func(b *batch) { b.putRule(name, &rules[i], 0) })
	}
	return out
}

// changeRules replaces what is between the first and the last rules that stay:
// these keep their counters.
func changeRules(name string, rules []rule, have []handle) []func(*batch) {
	head := 0
	for head < len(rules) && head < len(have) && rules[head].hash == have[head].hash {
		head++
	}
	tail := 0
	for tail < len(rules)-head && tail < len(have)-head && rules[len(rules)-1-tail].hash == have[len(have)-1-tail].hash {
		tail++
	}
	before := uint64(0)
	if tail > 0 {
		before = have[len(have)-tail].number
	}
	var out []func(*batch)
	for _, h := range have[head : len(have)-tail] {
		out = append(out, func(b *batch) { b.delRule(name, h.number) })
	}
	for i := head; i < len(rules)-tail; i++ {
		out = append(out, func(b *batch) { b.putRule(name, &rules[i], before) })
	}
	return out
}

// mostBatch is how large a transaction may become before a new one begins, if
// it may: the kernel needs its memory in one piece.
const mostBatch = 16 << 20

// batches writes the messages. Only the change is one transaction whatever its
// size.
func (p *plan) batches(limit int) []*batch {
	var out []*batch
	b := new(batch)
	splitAt := func(size int) {
		if len(b.B) > size && !b.empty() {
			out = append(out, b)
			b = new(batch)
		}
	}
	for _, fn := range p.prepare {
		splitAt(limit)
		fn(b)
	}
	for _, fn := range p.change {
		fn(b)
	}
	for _, fn := range p.remove {
		splitAt(limit)
		fn(b)
	}
	splitAt(0)
	return out
}
