package operator

import (
	"context"
	"errors"

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
