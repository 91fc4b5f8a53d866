package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"

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
	query := url.Values{"labelSelector": {discoveryv1.LabelServiceName + "=" + key.Name}}
	var slices []json.RawMessage
	if _, err := s.pages(ctx, convert.EndpointSlices().Path(key.Namespace), query, func(first bool, items []json.RawMessage) {
		if first {
			slices = nil
		}
		slices = append(slices, items...)
	}); err != nil {
		return store.ServiceDetail{}, fmt.Errorf("read the endpoints of %s: %w", key, s.explain(ctx, err))
	}
	out, err := convert.ServiceDetail(raw, slices)
	if err != nil {
		return out, fmt.Errorf("read %s: %w", key, err)
	}
	return out, nil
}
