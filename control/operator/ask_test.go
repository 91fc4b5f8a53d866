package operator

import (
	"context"
	"errors"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	apiv1 "github.com/routerd/routerd/control/api/v1"
)

// fakeAsk has hosts answer as the test says; the others are silent.
type fakeAsk struct {
	answers map[string]*apiv1.Answer
	raw     map[string][]byte
}

func (f *fakeAsk) all(_ context.Context, nodes []string, _ []byte, yield func(string, []byte)) error {
	silent := false
	for _, n := range nodes {
		switch raw, ok := f.raw[n]; {
		case ok:
			yield(n, raw)
		case f.answers[n] != nil:
			b, err := proto.Marshal(f.answers[n])
			if err != nil {
				return err
			}
			yield(n, b)
		default:
			silent = true
		}
	}
	if silent {
		return errors.New("it is not there")
	}
	return nil
}

// TestOlderDaemon: what a daemon says of a question that it does not know is said of its version, whatever was asked.
func TestOlderDaemon(t *testing.T) {
	t.Parallel()
	unknown := protowire.AppendBytes(protowire.AppendTag(nil, 99, protowire.BytesType), nil) // of a later version
	old := (&Server{}).Answer(t.Context(), unknown)
	s := &Server{cfg: Config{
		Node: "self", Ask: func(context.Context, string, []byte) ([]byte, error) { return old, nil },
		AskAll: (&fakeAsk{raw: map[string][]byte{"old": old}}).all,
	}}
	for what, q := range map[string]*apiv1.Question{
		"look": {Look: &apiv1.LookRequest{}}, "load": {Load: &apiv1.LoadRequest{}}, "watch": {Watch: &apiv1.WatchRequest{}}, "plan": {Plan: &apiv1.PlanRequest{}},
		"clock": {Clock: &apiv1.ClockRequest{}}, "heard": {Heard: &apiv1.HeardRequest{}},
	} {
		if _, err := s.ask(t.Context(), "old", q); !errors.Is(err, errItsVersion) {
			t.Errorf("%s: %v", what, err)
		}
		s.askAll(t.Context(), time.Second, []string{"old"}, q, func(_ string, _ *apiv1.Answer, err error) {
			if !errors.Is(err, errItsVersion) {
				t.Errorf("%s of all: %v", what, err)
			}
		})
		if err := answered(q, &apiv1.Answer{}); !errors.Is(err, errItsVersion) {
			t.Errorf("%s: an answer to nothing: %v", what, err)
		}
	}
}
