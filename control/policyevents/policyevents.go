// Package policyevents says in Kubernetes which of its policies cannot be carried out as they
// stand: by one event on each, which kubectl events shows.
package policyevents

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/kube"
)

const (
	// lookEvery is how often what cannot be carried out is compared with what was said.
	lookEvery = 2 * time.Second
	// atOnce is how many events are written between two looks, each with up to three
	// requests: thousands of policies with one fault are no burst for the API server.
	atOnce = 5
	// quiet is for how long an event stands at least: an object that comes and goes, or is
	// written all the time, is not an event each time.
	quiet = 15 * time.Second
	// renewEvery is how often what still holds is said again. The API forgets events after
	// an hour.
	renewEvery = 30 * time.Minute
	// retryMost is the longest pause after the API did not take one.
	retryMost = 5 * time.Minute
)

// Reasons of events.
const (
	reasonNot  = "PolicyNotCarriedOut"
	reasonDone = "PolicyCarriedOut"

	messageDone = "everything in it is carried out"
)

// API is what is asked of Kubernetes. [kube.Store] has it.
type API interface {
	SetEvent(ctx context.Context, key store.Key, e kube.Event) error
}

// Teller writes the events. Make one with [New].
type Teller struct {
	api      API
	problems func() (map[store.Key]string, bool)
	log      *slog.Logger

	said map[store.Key]saying // events that warn
}

// saying is what was said of an object, and when.
type saying struct {
	text string
	at   time.Time
}

// New returns a Teller for one term: it keeps nothing between two calls of Run. problems
// says why objects cannot be carried out as they stand; false: that is not known now.
func New(api API, problems func() (map[store.Key]string, bool), log *slog.Logger) *Teller {
	return &Teller{api: api, problems: problems, log: log, said: make(map[store.Key]saying)}
}

// Run writes events until ctx ends. It is for the one host of the cluster that holds the
// lease; the same host, or the next one, writes the same events again when its term begins.
func (t *Teller) Run(ctx context.Context) {
	backoff := async.Backoff{Min: lookEvery, Max: retryMost, Jitter: 0.5}
	level := slog.LevelWarn
	for wait := lookEvery; async.Sleep(ctx, wait) == nil; {
		wait = lookEvery
		err := t.look(ctx)
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			backoff.Reset()
			level = slog.LevelWarn
			continue
		}
		wait = backoff.Next()
		t.log.Log(ctx, level, "that a policy cannot be carried out is not said in Kubernetes; will try again", "error", err, "retry", wait)
		level = slog.LevelDebug
	}
}

// look writes what is due.
func (t *Teller) look(ctx context.Context) error {
	problems, known := t.problems()
	if !known {
		return nil
	}
	for _, key := range t.due(problems, time.Now()) {
		text, is := problems[key]
		e := kube.Event{Reason: reasonDone, Message: messageDone}
		if is {
			e = kube.Event{Warning: true, Reason: reasonNot, Message: text}
		}
		err := t.api.SetEvent(ctx, key, e)
		if err != nil && !errors.Is(err, store.ErrNotFound) { // one that is gone needs none
			return err
		}
		if !is {
			delete(t.said, key)
			continue
		}
		t.said[key] = saying{text, time.Now()}
	}
	return nil
}

// due lists the objects of which something is to be said now, those that wait longest first.
func (t *Teller) due(problems map[store.Key]string, now time.Time) (keys []store.Key) {
	for key, text := range problems {
		if !policy(key.Kind) {
			continue
		}
		was, said := t.said[key]
		since := now.Sub(was.at)
		if !said || since >= renewEvery || was.text != text && since >= quiet {
			keys = append(keys, key)
		}
	}
	for key, was := range t.said {
		if _, is := problems[key]; !is && now.Sub(was.at) >= quiet {
			keys = append(keys, key)
		}
	}
	slices.SortFunc(keys, func(a, b store.Key) int {
		if c := t.said[a].at.Compare(t.said[b].at); c != 0 {
			return c
		}
		return strings.Compare(a.Path(), b.Path())
	})
	return keys[:min(len(keys), atOnce)]
}

// policy reports whether objects of a kind say what policy is. What is wrong with others,
// such as a host endpoint, is the business of the host that they are about.
func policy(kind store.Kind) bool {
	switch kind {
	case store.KindNetworkPolicy, store.KindGlobalNetworkPolicy, store.KindStagedNetworkPolicy, store.KindStagedGlobalNetworkPolicy,
		store.KindStagedKubernetesNetworkPolicy, store.KindTier, store.KindNetworkSet, store.KindGlobalNetworkSet,
		store.KindKubeControllersConfiguration:
		return true
	}
	return false
}
