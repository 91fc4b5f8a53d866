package health

import (
	"net/http"
	"net/http/pprof"
)

// WithProfiles adds Go's profiles of the running process to h, below
// /debug/pprof/ as net/http/pprof has them: where processor time and memory go.
// Who asks for one makes the process work for it, and learns what it does: it is
// for loopback only.
func WithProfiles(h http.Handler) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/", h)
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	return mux
}
