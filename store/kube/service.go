package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strconv"

	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/kube/convert"
)

// ServiceDetail reads a Service with its ports and endpoints from the API.
func (s *Store) ServiceDetail(ctx context.Context, key store.Key) (store.ServiceDetail, error) {
	p, err := s.placeOf(ctx, key)
	if err != nil {
		return store.ServiceDetail{}, fmt.Errorf("read %s: %w", key, err)
	}
	raw, err := s.call(ctx, request{method: http.MethodGet, path: p.path()})
	if err != nil {
		return store.ServiceDetail{}, fmt.Errorf("read %s: %w", key, s.explain(ctx, err))
	}
	of := convert.EndpointSlices()
	query := url.Values{"limit": {strconv.Itoa(pageSize)}, "labelSelector": {discoveryv1.LabelServiceName + "=" + key.Name}}
	var slices []json.RawMessage
	for {
		raw, err := s.call(ctx, request{method: http.MethodGet, path: of.Path(key.Namespace), query: query})
		if err != nil {
			return store.ServiceDetail{}, fmt.Errorf("read the endpoints of %s: %w", key, s.explain(ctx, err))
		}
		var l page
		if err := json.Unmarshal(raw, &l); err != nil {
			return store.ServiceDetail{}, fmt.Errorf("read the endpoints of %s: %w", key, err)
		}
		if slices = append(slices, l.Items...); l.Metadata.Continue == "" {
			break
		}
		query.Set("continue", l.Metadata.Continue)
	}
	out, err := convert.ServiceDetail(raw, slices)
	if err != nil {
		return out, fmt.Errorf("read %s: %w", key, err)
	}
	return out, nil
}
