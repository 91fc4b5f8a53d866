package kube

import (
	"net/http"
	"testing"
)

func TestGoing(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, node string
		code       int
		want       Going
		fails      bool
	}{
		{name: "in service", code: 200, node: `{"status":{"conditions":[{"type":"Ready","status":"True","message":"kubelet is posting ready status"}]}}`},
		{name: "cordoned", code: 200, node: `{"spec":{"unschedulable":true}}`, want: Going{Cordoned: true}},
		{name: "its machine goes down", code: 200, node: `{"status":{"conditions":[{"type":"Ready","status":"False","reason":"KubeletNotReady","message":"node is shutting down"}]}}`, want: Going{ShuttingDown: true}},
		{name: "not ready for another reason", code: 200, node: `{"status":{"conditions":[{"type":"Ready","status":"False","message":"container runtime is down"}]}}`},
		{name: "another condition", code: 200, node: `{"status":{"conditions":[{"type":"DiskPressure","status":"False","message":"node is shutting down"}]}}`},
		{name: "refused", code: 403, node: refusal(403, "Forbidden", "no"), fails: true},
		{name: "no JSON", code: 200, node: `?`, fails: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := &script{say: func(_ int, req *http.Request) *http.Response {
				if req.Method != http.MethodGet || req.URL.Path != "/api/v1/nodes/node1" {
					return answer(404, refusal(404, "NotFound", req.URL.Path))
				}
				return answer(tt.code, tt.node)
			}}
			got, err := s.open(t).Going(t.Context(), "node1")
			if got != tt.want || (err != nil) != tt.fails {
				t.Errorf("%+v, %v", got, err)
			}
		})
	}
}
