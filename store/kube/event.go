package kube

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/routerd/routerd/store"
)

// Event is what is said of an object in the API, for people: kubectl events shows it.
type Event struct {
	Warning bool
	Reason  string // in CamelCase, for programs
	Message string
}

// coreEvent is an Event of core/v1. What is left out of it stays as it is where it is a
// change of one that is there.
type coreEvent struct {
	APIVersion         string          `json:"apiVersion"`
	Kind               string          `json:"kind"`
	Metadata           *ownMeta        `json:"metadata,omitempty"`
	InvolvedObject     *eventReference `json:"involvedObject,omitempty"`
	Type               string          `json:"type"`
	Reason             string          `json:"reason"`
	Message            string          `json:"message"`
	Source             *eventSource    `json:"source,omitempty"`
	ReportingComponent string          `json:"reportingComponent,omitempty"`
	FirstTimestamp     *time.Time      `json:"firstTimestamp,omitempty"`
	LastTimestamp      time.Time       `json:"lastTimestamp"`
	Count              int             `json:"count,omitempty"`
}

type eventReference struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Namespace  string `json:"namespace,omitempty"`
	Name       string `json:"name"`
	UID        string `json:"uid"`
}

type eventSource struct {
	Component string `json:"component"`
}

const (
	eventComponent = "routerd"
	// eventMessage is how much of a message those who read events.k8s.io/v1 expect at most.
	eventMessage = 1024
	// eventName is how much of an object's name there is in that of its event, which ends
	// with a hash.
	eventName = 200
)

// SetEvent has the one event that routerd has about the object of a key say something. What
// is no warning only takes the place of one: of an object that nothing was said of, nothing is
// said. The API forgets an event an hour after it was written last, unless it is told otherwise
// (kube-apiserver --event-ttl). The error matches [store.ErrNotFound] where the API has no such
// object.
func (s *Store) SetEvent(ctx context.Context, key store.Key, e Event) error {
	if err := s.setEvent(ctx, key, e); err != nil {
		return fmt.Errorf("write an event about %s: %w", key, err)
	}
	return nil
}

func (s *Store) setEvent(ctx context.Context, key store.Key, e Event) error {
	p, err := s.placeOf(ctx, key)
	switch {
	case err != nil:
		return err
	case s.native && p.Custom():
		return fmt.Errorf("%w: it is in another datastore", store.ErrNotFound)
	}
	o, err := s.read(ctx, &p)
	if o.UID == "" { // what cannot be decoded has one
		return s.explain(ctx, err)
	}
	namespace := p.namespace
	if namespace == "" {
		namespace = "default" // as the API wants it of objects that are in none
	}
	collection := "/api/v1/namespaces/" + namespace + "/events"
	sum := sha256.Sum256([]byte(o.UID))
	name := strings.TrimRight(p.name[:min(len(p.name), eventName)], "-.") + "." + hex.EncodeToString(sum[:8])

	now := time.Now().UTC().Truncate(time.Second)
	said := coreEvent{APIVersion: "v1", Kind: "Event", Type: "Normal", Reason: e.Reason, Message: e.Message, LastTimestamp: now}
	if len(said.Message) > eventMessage {
		const more = " …"
		said.Message = strings.ToValidUTF8(said.Message[:eventMessage-len(more)], "") + more
	}
	if e.Warning {
		said.Type = "Warning"
	}
	body, err := json.Marshal(said)
	if err != nil {
		return err
	}
	_, err = s.call(ctx, request{method: http.MethodPatch, path: collection + "/" + name, contentType: patchType, body: body})
	if !isCode(err, http.StatusNotFound) {
		return s.explain(ctx, err)
	}
	if !e.Warning {
		return nil
	}
	said.Metadata = &ownMeta{Name: name, Namespace: namespace}
	said.InvolvedObject = &eventReference{p.Resource.APIVersion(), p.Resource.APIKind, p.namespace, p.name, string(o.UID)}
	said.Source, said.ReportingComponent = &eventSource{eventComponent}, eventComponent
	said.FirstTimestamp, said.Count = &now, 1
	if body, err = json.Marshal(said); err != nil {
		return err
	}
	_, err = s.call(ctx, request{method: http.MethodPost, path: collection, contentType: jsonType, body: body})
	return s.explain(ctx, err)
}
