package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"sync"
)

// oldest is the oldest minor version of Kubernetes 1 that has all that routerd asks of it:
// node names in the tokens of service accounts, and policies of admission.
const oldest = 30

// checkVersion says once that the API is too old, if it is. Its resources are read all the
// same: what an older API does not know is asked for in another way.
func (s *cluster) checkVersion(ctx context.Context) {
	s.groupMu.Lock()
	defer s.groupMu.Unlock()
	if s.asked {
		return
	}
	raw, err := s.call(ctx, request{method: http.MethodGet, path: "/version"})
	if err != nil {
		return // who may not ask is not told; an API that is away is asked again
	}
	s.asked = true
	if text, old := tooOld(raw); old {
		s.log.Warn("the Kubernetes API is too old: what its admission and its tokens lack is not enforced; upgrade the cluster", "version", text, "oldest", fmt.Sprint("1.", oldest))
	}
}

// tooOld returns the version that an API says, and whether it is too old.
func tooOld(raw []byte) (version string, old bool) {
	var v struct{ Major, Minor, GitVersion string }
	if json.Unmarshal(raw, &v) != nil || v.Major != "1" {
		return v.GitVersion, false
	}
	minor, err := strconv.Atoi(strings.TrimRight(v.Minor, "+")) // some clouds write "29+"
	return v.GitVersion, err == nil && minor < oldest
}

// dropped reports fields that the API did not keep.
type dropped struct {
	log *slog.Logger

	mu   sync.Mutex
	said map[string]bool
}

func newDropped(log *slog.Logger) *dropped { return &dropped{log: log, said: make(map[string]bool)} }

// saidMost bounds what is reported: a server may say something else each time.
const saidMost = 50

// note reports once that a field of a write was not kept, by the text of a Warning header
// (RFC 7234, section 5.5).
func (d *dropped) note(r request, text string) {
	_, field, is := strings.Cut(text, unknownField)
	if !is {
		return
	}
	field = strings.Trim(strings.ReplaceAll(field, `\"`, `"`), ` "`)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.said[field] || len(d.said) >= saidMost {
		return
	}
	d.said[field] = true
	d.log.Warn("the API has not kept a field of an object: "+definitionsCure, "path", r.path, "field", field)
}
