package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"sync"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/kube/convert"
)

// cluster is what is known of the cluster that the API is of, and where in it objects are.
type cluster struct {
	*client
	setting   string // of the group
	namespace string // of routerd's own objects

	groupMu    sync.Mutex
	group      convert.Group  // empty: not known yet
	asked      bool           // how old the API is
	id         store.Revision // of [cluster.identify]
	identified bool
}

// groupOf returns the group of Calico's custom resources, which it asks the
// cluster for once.
func (c *cluster) groupOf(ctx context.Context) (convert.Group, error) {
	c.groupMu.Lock()
	defer c.groupMu.Unlock()
	if c.group != "" {
		return c.group, nil
	}
	if c.native {
		return convert.V3, nil // it is not asked for anything of it
	}
	if c.setting != "" {
		c.group = convert.Choose(c.setting, false, false)
		return c.group, nil
	}
	raw, err := c.call(ctx, request{method: http.MethodGet, path: "/apis"})
	if err != nil {
		return "", c.explain(ctx, err)
	}
	var list struct {
		Groups []struct{ Name string }
	}
	if err := json.Unmarshal(raw, &list); err != nil {
		return "", fmt.Errorf("%w: %s: the list of API groups: %w", store.ErrUnavailable, c.base, err)
	}
	has := func(g convert.Group) bool {
		return slices.ContainsFunc(list.Groups, func(l struct{ Name string }) bool { return l.Name == string(g) })
	}
	g := convert.Choose("", has(convert.V1), has(convert.V3))
	if has(convert.V1) && has(convert.V3) {
		c.log.Info("the API has the definitions of both groups; the one that Calico's clients choose is used, another one is to be set (datastore.kubernetes.apiGroup, CALICO_API_GROUP)", "group", g)
	}
	if has(g) {
		c.group = g // else the definitions may come yet
	}
	return g, nil
}

// place is where an object is in the API.
type place struct {
	convert.Source
	key             store.Key
	namespace, name string
}

func (p place) collection() string { return p.Resource.Path(p.namespace) }
func (p place) path() string       { return p.collection() + "/" + url.PathEscape(p.name) }

var errNoPlace = errors.New("the Kubernetes datastore holds no such object")

// sources are those from which the objects of a kind come.
func (c *cluster) sources(g convert.Group, kind store.Kind) []convert.Source {
	all := convert.Sources(g, kind)
	if !c.native {
		return all
	}
	return slices.DeleteFunc(all, convert.Source.Custom)
}

// placeOf returns where the object of a key is.
func (c *cluster) placeOf(ctx context.Context, key store.Key) (place, error) {
	if key.Path() == "" {
		return place{}, fmt.Errorf("%w: no key", store.ErrInvalid)
	}
	g, err := c.groupOf(ctx)
	if err != nil {
		return place{}, err
	}
	if key.Kind == store.KindSecret {
		return place{Source: convert.Secrets(g), key: key, namespace: c.namespace, name: convert.SecretName(key)}, nil
	}
	src, namespace, name, ok := convert.SourceOf(g, key)
	if !ok {
		return place{}, fmt.Errorf("%w: %w", store.ErrInvalid, errNoPlace)
	}
	return place{Source: src, key: key, namespace: namespace, name: name}, nil
}

// identify returns a number that tells one cluster from another: what was known of
// the other is of no use.
func (c *cluster) identify(ctx context.Context) (store.Revision, error) {
	c.groupMu.Lock()
	defer c.groupMu.Unlock()
	if c.identified {
		return c.id, nil
	}
	raw, err := c.call(ctx, request{method: http.MethodGet, path: "/api/v1/namespaces/kube-system"})
	if isCode(err, http.StatusNotFound) || isCode(err, http.StatusForbidden) {
		return 0, nil // then nothing is gone on with
	}
	if err != nil {
		return 0, c.explain(ctx, err)
	}
	var n named
	if err := json.Unmarshal(raw, &n); err != nil {
		return 0, fmt.Errorf("%w: namespace kube-system: %w", store.ErrUnavailable, err)
	}
	c.id, c.identified = lifeOf(n.Metadata.UID), true
	return c.id, nil
}

// read reads the object at a place, as it stands: also one that is marked as
// about to be deleted. The error is the API's, or matches [store.ErrDecode] or
// [convert.ErrNotOurs].
func (c *client) read(ctx context.Context, p *place) (convert.Object, error) {
	raw, err := c.call(ctx, request{method: http.MethodGet, path: p.path()})
	if older, ok := p.OlderName(p.key); ok && isCode(err, http.StatusNotFound) {
		q := *p
		q.name = older
		if raw, err = c.call(ctx, request{method: http.MethodGet, path: q.path()}); err == nil {
			*p = q
		}
	}
	if err != nil {
		return convert.Object{}, err
	}
	o, err := p.Read(raw)
	if err == nil && o.Key != p.key {
		// Two handles may differ in case alone, which names in the API cannot.
		return convert.Object{}, &statusError{
			code: http.StatusNotFound, message: fmt.Sprintf("%s %s holds %s", p.Resource, p.name, o.Key),
		}
	}
	return o, err
}

// destroy deletes an object on condition of a revision and a uid, as far as
// these are given. The error is the API's.
func (c *client) destroy(ctx context.Context, p place, rev store.Revision, uid string) error {
	type preconditions struct {
		ResourceVersion string `json:"resourceVersion,omitempty"`
		UID             string `json:"uid,omitempty"`
	}
	opts := struct {
		Kind          string         `json:"kind"`
		APIVersion    string         `json:"apiVersion"`
		Preconditions *preconditions `json:"preconditions,omitempty"`
	}{Kind: "DeleteOptions", APIVersion: "v1"}
	if rev != 0 {
		opts.Preconditions = &preconditions{strconv.FormatInt(int64(rev), 10), uid}
	}
	body, err := json.Marshal(opts)
	if err != nil {
		return err
	}
	_, err = c.call(ctx, request{method: http.MethodDelete, path: p.path(), contentType: jsonType, body: body})
	return err
}
