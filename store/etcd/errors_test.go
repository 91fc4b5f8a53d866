package etcd

import (
	"errors"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/routerd/routerd/store"
)

func TestExplainNamesThePlace(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, where, text, want string
	}{
		{
			"etcd itself", "https://10.0.0.1:2379",
			`connection error: desc = "transport: Error while dialing: dial tcp 10.0.0.1:2379: connect: connection refused"`,
			"datastore unavailable: https://10.0.0.1:2379: connection refused: is etcd running there?",
		},
		{
			"etcd behind the daemon's socket", "unix:///run/routerd/routerd.sock",
			`connection error: desc = "transport: Error while dialing: dial tcp 10.0.0.1:2379: connect: connection refused"`,
			"datastore unavailable: 10.0.0.1:2379: connection refused: is etcd running there?",
		},
		{
			"the socket itself", "unix:///run/routerd/routerd.sock",
			`connection error: desc = "transport: Error while dialing: dial unix /run/routerd/routerd.sock: connect: no such file or directory"`,
			"datastore unavailable: unix:///run/routerd/routerd.sock: there is no such socket: is the datastore running?",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := &Store{where: tt.where}
			err := s.explain(t.Context(), status.Error(codes.Unavailable, tt.text))
			if !errors.Is(err, store.ErrUnavailable) || err.Error() != tt.want {
				t.Errorf("got  %v\nwant %s", err, tt.want)
			}
		})
	}
}
