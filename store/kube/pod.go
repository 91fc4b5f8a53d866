package kube

import (
	"context"
	"errors"
	"net/http"
	"strings"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/kube/convert"
)

// doPod carries out an op on the endpoint that a pod stands for, in one request: what
// is written are the annotations that the CNI plugin is to write, whatever else
// changed in the pod meanwhile. A Put with a uid is for the pod of this uid; a Remove with
// a value is for the pod that is of the value's container. One that is another by
// now is left alone.
func (s *Store) doPod(ctx context.Context, st step) (store.Object, error) {
	if st.Op.Action == store.Remove {
		return store.Object{}, s.endPod(ctx, st)
	}
	w, err := decoded[*store.WorkloadEndpoint](st)
	if err != nil {
		return store.Object{}, err
	}
	patch, err := convert.PodPatch(w)
	if err != nil {
		return store.Object{}, err
	}
	raw, err := s.patchStatus(ctx, st.dry, st.place.path(), patchType, patch)
	var refused *statusError
	switch {
	case errors.As(err, &refused) && refused.code == http.StatusUnprocessableEntity && strings.Contains(refused.message, "metadata.uid"):
		return store.Object{}, &condError{store.ErrConflict} // a uid cannot be changed
	case err != nil:
		return store.Object{}, condition(err, 1)
	}
	return s.answer(st, raw)
}

// endPod says that a pod has its addresses no more.
func (s *Store) endPod(ctx context.Context, st step) error {
	container := ""
	if w, ok := st.Op.Object.Value.(*store.WorkloadEndpoint); ok {
		container = w.Spec.ContainerID
	}
	patch, err := convert.PodEndPatch(container)
	if err != nil {
		return err
	}
	_, err = s.patchStatus(ctx, st.dry, st.place.path(), jsonPatchType, patch)
	if isCode(err, http.StatusNotFound) || isCode(err, http.StatusUnprocessableEntity) {
		return nil // it is gone, or of another container
	}
	return err
}
