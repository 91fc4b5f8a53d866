package bgp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"

	"github.com/routerd/routerd/control/atomicfile"
	"github.com/routerd/routerd/store"
)

// Secrets has passwords in Secrets of one namespace, as an API of Kubernetes.
type Secrets interface {
	// Namespace is where they are.
	Namespace() string
	// FollowSecret tells what the Secret of a name holds, first as it is and then after each change, until ctx ends.
	// Where there is none the error matches [store.ErrNotFound]; any other says why it cannot be read now.
	FollowSecret(ctx context.Context, name string, tell func(data map[string][]byte, err error))
}

// secretObjects follows the Secrets that are wanted, and no others. What they held when they could be read last holds while
// they cannot be.
type secretObjects struct {
	from    Secrets
	file    string // keeps what is wanted over a restart; empty: nothing does
	log     *slog.Logger
	changed func()
	wanted  chan []SecretRef

	last []SecretRef // that was wanted, by the one who wants
	refs []SecretRef // that the one who runs has taken

	mu    sync.Mutex
	known map[string]secretObject // by name
	saved map[string]map[string][]byte
}

// secretObject is what is known of one.
type secretObject struct {
	data map[string][]byte // nil: nothing
	read bool              // in this run
	err  error             // why it cannot be read now
}

// secretsFile is what the file holds.
type secretsFile struct {
	Namespace string
	Secrets   map[string]map[string][]byte // by name and key
}

func newSecretObjects(from Secrets, file string, log *slog.Logger, changed func()) *secretObjects {
	o := &secretObjects{from: from, file: file, log: log, changed: changed, wanted: make(chan []SecretRef), known: map[string]secretObject{}}
	if err := o.load(); err != nil {
		log.Warn("passwords of bgp sessions are not known until the API answers", "error", err)
	}
	return o
}

// load goes by what the previous run knew.
func (o *secretObjects) load() error {
	if o.file == "" {
		return nil
	}
	b, err := os.ReadFile(o.file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var f secretsFile
	if json.Unmarshal(b, &f) != nil { // what json says may show a part of it
		return fmt.Errorf("%s cannot be decoded; it is written anew", o.file)
	}
	if f.Namespace != o.from.Namespace() {
		return nil // they are others' by now
	}
	o.saved = f.Secrets
	for name, data := range f.Secrets {
		o.known[name] = secretObject{data: data}
	}
	return nil
}

// want has these secrets followed and no others. It is called by one goroutine.
func (o *secretObjects) want(ctx context.Context, refs []SecretRef) {
	if o.last != nil && slices.Equal(refs, o.last) {
		return
	}
	select {
	case o.wanted <- refs:
		o.last = append([]SecretRef{}, refs...) // not nil
	case <-ctx.Done():
	}
}

// run follows what is wanted until ctx ends.
func (o *secretObjects) run(ctx context.Context) {
	var following sync.WaitGroup
	defer following.Wait()
	end := map[string]context.CancelFunc{}
	for {
		var refs []SecretRef
		select {
		case <-ctx.Done():
			for _, stop := range end {
				stop()
			}
			return
		case refs = <-o.wanted:
		}
		names := map[string]bool{}
		for _, r := range refs {
			names[r.Name] = true
		}
		for name, stop := range end {
			if !names[name] {
				stop()
				delete(end, name)
			}
		}
		o.narrow(refs, names)
		for name := range names {
			if end[name] != nil {
				continue
			}
			one, stop := context.WithCancel(ctx)
			end[name] = stop
			following.Go(func() {
				o.from.FollowSecret(one, name, func(data map[string][]byte, err error) { o.take(one, name, data, err) })
			})
		}
	}
}

// narrow forgets what is not wanted any more.
func (o *secretObjects) narrow(refs []SecretRef, names map[string]bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.refs = refs
	maps.DeleteFunc(o.known, func(name string, _ secretObject) bool { return !names[name] })
	o.save()
}

// take notes what a Secret holds, for as long as that is wanted.
func (o *secretObjects) take(wanted context.Context, name string, data map[string][]byte, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if wanted.Err() != nil {
		return
	}
	was := o.known[name]
	now := secretObject{data: data, read: true, err: err}
	if data == nil && err == nil {
		now.data = map[string][]byte{}
	}
	if err != nil && !errors.Is(err, store.ErrNotFound) {
		now.data, now.read = was.data, was.read
		if was.err == nil || was.err.Error() != err.Error() {
			o.log.Warn("a Secret with passwords of bgp sessions cannot be read; its last known content stays in use", "secret", name, "error", err)
		}
	}
	o.known[name] = now
	if reflect.DeepEqual(now, was) {
		return
	}
	o.save()
	o.changed()
}

// save has on disk what is wanted and known, and nothing else. The lock is held.
func (o *secretObjects) save() {
	if o.file == "" {
		return
	}
	keep := map[string]map[string][]byte{}
	for _, r := range o.refs {
		if text, ok := o.known[r.Name].data[r.Key]; ok {
			if keep[r.Name] == nil {
				keep[r.Name] = map[string][]byte{}
			}
			keep[r.Name][r.Key] = text
		}
	}
	if o.saved != nil && reflect.DeepEqual(keep, o.saved) {
		return
	}
	var err error
	if len(keep) == 0 {
		if err = os.Remove(o.file); errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
	} else {
		var b []byte
		if b, err = json.Marshal(secretsFile{o.from.Namespace(), keep}); err == nil {
			err = atomicfile.Write(o.file, b, 0o600)
		}
	}
	if err != nil {
		o.log.Warn("passwords of bgp sessions on disk are outdated: a restart while the API cannot be reached uses them", "error", err)
		return
	}
	o.saved = keep
}

// password returns one. doubt says why what is known of it may be out of date.
func (o *secretObjects) password(ref SecretRef) (p Password, doubt string, err error) {
	o.mu.Lock()
	s := o.known[ref.Name]
	o.mu.Unlock()
	ns := o.from.Namespace()
	place := fmt.Sprintf("the Secret %s of the namespace %s", ref.Name, ns)
	text, ok := s.data[ref.Key]
	switch {
	case ok:
		if s.err != nil {
			doubt = fmt.Sprintf("%s cannot be read, so its last known content is in use: %v", place, s.err)
		}
		p, err = passwordOf(ref, place, string(text))
		return p, doubt, err
	case errors.Is(s.err, store.ErrNotFound):
		return p, "", fmt.Errorf("secret %s is missing: make it: kubectl -n %s create secret generic %s --from-file=%s=FILE", ref, ns, ref.Name, ref.Key)
	case s.err != nil:
		return p, "", fmt.Errorf("secret %s: %w", ref, s.err)
	case !s.read:
		return p, "", fmt.Errorf("secret %s: the API has not said yet what is in %s", ref, place)
	}
	has := "it is empty"
	if keys := slices.Sorted(maps.Keys(s.data)); len(keys) > 0 {
		has = "it has " + strings.Join(keys, ", ")
	}
	return p, "", fmt.Errorf("secret %s is missing: %s lacks the key %s, %s: kubectl -n %s edit secret %s", ref, place, ref.Key, has, ns, ref.Name)
}
