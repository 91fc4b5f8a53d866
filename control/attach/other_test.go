package attach

import (
	"context"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestReleaseOther: DEL of a container that was never attached here frees what another
// network's IPAM gave it, and fails where that fails; of one that was nothing is asked.
func TestReleaseOther(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.start()
	var asked []string
	refused := errors.New("refused")
	a.releaseOther = func(_ context.Context, id string) error {
		if asked = append(asked, id); id == "bad" {
			return refused
		}
		return nil
	}
	own := w.request(1)
	w.add(a, own)
	if err := a.Del(t.Context(), delOf(own)); err != nil {
		t.Error(err)
	}
	other := delOf(w.request(2))
	if err := a.Del(t.Context(), other); err != nil {
		t.Error(err)
	}
	bad := delOf(w.request(3))
	bad.ID.ContainerID = "bad"
	if err := a.Del(t.Context(), bad); !errors.Is(err, refused) {
		t.Errorf("one whose address is not freed: %v", err)
	}
	if diff := cmp.Diff([]string{other.ID.ContainerID, "bad"}, asked); diff != "" {
		t.Errorf("asked for (-want +got):\n%s", diff)
	}
}
