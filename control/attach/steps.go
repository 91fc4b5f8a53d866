package attach

import (
	"context"

	"github.com/routerd/routerd/control/spans"
)

// step is one of the things that a verb does. After a crash in it, or before or
// after it, the verb can be repeated or undone.
type step struct {
	name string
	do   func(context.Context) error
}

// runner runs the steps of verbs.
type runner struct {
	tracer *spans.Tracer
	// around, if set, runs a step in the place of the runner: tests fail or end the
	// daemon before, in or after it.
	around func(name string, do func() error) error
}

// run runs steps until one fails.
func (x *runner) run(ctx context.Context, steps ...step) error {
	for _, s := range steps {
		do := func() error {
			ctx, end := x.tracer.Start(ctx, s.name)
			err := s.do(ctx)
			end(err)
			return err
		}
		if x.around != nil {
			if err := x.around(s.name, do); err != nil {
				return err
			}
		} else if err := do(); err != nil {
			return err
		}
	}
	return nil
}
