package lab

import (
	"fmt"

	"github.com/routerd/routerd/integration/lab/middlebox"
	"github.com/routerd/routerd/integration/lab/ns"
)

// Break puts a fault on the spine's side of a rack: what goes between that rack
// and the others passes a network that spoils tunnels; see
// [middlebox.Faults]. It replaces the fault that was there.
func (l *Lab) Break(rack string, f middlebox.Faults) error {
	if _, ok := l.topology.rack(rack); !ok {
		return fmt.Errorf("rack %s: not in lab %s", rack, l.name)
	}
	if err := ns.Do(l.Space(spineName), func() error { return middlebox.Attach(rack, f) }); err != nil {
		return fmt.Errorf("break rack %s: %w", rack, err)
	}
	return nil
}

// Mend takes the fault of a rack away. A rack without one is not an error.
func (l *Lab) Mend(rack string) error {
	if _, ok := l.topology.rack(rack); !ok {
		return fmt.Errorf("rack %s: not in lab %s", rack, l.name)
	}
	if err := ns.Do(l.Space(spineName), func() error { return middlebox.Detach(rack) }); err != nil {
		return fmt.Errorf("mend rack %s: %w", rack, err)
	}
	return nil
}
