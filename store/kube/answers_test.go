package kube

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/kube/convert"
)

// TestRightOfOneVerb: whichever verb a user lacks the right for, the error names it, what it is
// about and the manifest that gives it, and what needs other verbs is done.
func TestRightOfOneVerb(t *testing.T) {
	t.Parallel()
	key := store.ResourceKey(store.KindIPPool, "a")
	made := func() any {
		o := store.New(store.KindIPPool)
		store.Meta(o).Name = "new"
		return o
	}
	does := map[string]func(s *Store) error{
		"get":  func(s *Store) error { _, err := s.Get(t.Context(), key); return err },
		"list": func(s *Store) error { _, _, err := s.List(t.Context(), store.KindIPPool, ""); return err },
		"create": func(s *Store) error {
			_, err := store.Create(t.Context(), s, made())
			return err
		},
		"update": func(s *Store) error {
			_, err := store.Modify(t.Context(), s, key, func(cur store.Object) (any, error) {
				o := store.Clone(cur.Value)
				store.Meta(o).Labels = map[string]string{"x": "y"}
				return o, nil
			})
			return err
		},
		"delete": func(s *Store) error { return store.Delete(t.Context(), s, key, 5) },
		"patch": func(s *Store) error {
			_, err := store.Modify(t.Context(), s, store.ResourceKey(store.KindNode, "n1"), func(cur store.Object) (any, error) {
				o := store.Clone(cur.Value)
				store.Meta(o).Annotations = map[string]string{"x": "y"}
				return o, nil
			})
			return err
		},
	}
	for verb := range does {
		s := &script{}
		s.say = func(_ int, req *http.Request) *http.Response {
			asked := map[string]string{http.MethodPost: "create", http.MethodPut: "update", http.MethodPatch: "patch", http.MethodDelete: "delete"}[req.Method]
			switch {
			case asked == "" && req.URL.Query().Has("limit"):
				asked = "list"
			case asked == "":
				asked = "get"
			}
			switch {
			case asked == verb:
				return answer(http.StatusForbidden, refusal(403, "Forbidden", `User "u" cannot `+verb+` resource`))
			case asked == "list":
				return answer(http.StatusOK, page1(7))
			case strings.HasSuffix(req.URL.Path, "/new"):
				return answer(http.StatusNotFound, refusal(404, "NotFound", "no"))
			case strings.Contains(req.URL.Path, "/nodes/"):
				return answer(http.StatusOK, `{"kind":"Node","apiVersion":"v1","metadata":{"name":"n1","resourceVersion":"5"}}`)
			}
			return answer(http.StatusOK, pool("a", 5, `"10.0.0.0/16"`))
		}
		st := s.open(t)
		for other, do := range does {
			err := do(st)
			if needs := other == verb || verb == "get" && (other == "create" || other == "update" || other == "patch"); !needs {
				if err != nil {
					t.Errorf("without the right to %s, %s: %v", verb, other, err)
				}
				continue
			}
			if !errors.Is(err, store.ErrUnavailable) {
				t.Errorf("without the right to %s, %s: %v", verb, other, err)
				continue
			}
			for _, part := range []string{`User "u" cannot ` + verb, "lacks the right to " + verb + " it (/api", "configs/kubernetes/base/account.yaml"} {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("without the right to %s, %s: %v, want it to say %q", verb, other, err, part)
				}
			}
		}
		// Beside etcd the account is another one.
		st.native = true
		if _, err := st.Get(t.Context(), store.ResourceKey(store.KindNode, "n1")); verb == "get" && !strings.Contains(fmt.Sprint(err), "configs/kubernetes/etcd/account.yaml") {
			t.Errorf("beside etcd: %v", err)
		}
	}
}

// TestAnswersOfProxies: an error says the code of an answer that is no Status, and what is for people
// in it.
func TestAnswersOfProxies(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct{ body, want string }{
		"nothing":    {"", "https://api: 502 Bad Gateway"},
		"a line":     {"no upstream\n", "https://api: 502 Bad Gateway: no upstream"},
		"a page":     {"<html>\n<body>no</body></html>", "https://api: 502 Bad Gateway"},
		"a long one": {strings.Repeat("x", 300), "https://api: 502 Bad Gateway"},
		"a Status":   {refusal(502, "", "etcd is away"), "https://api: etcd is away"},
	} {
		s := &script{say: func(int, *http.Request) *http.Response {
			a := answer(http.StatusBadGateway, tt.body)
			a.Status = "502 Bad Gateway"
			return a
		}}
		_, err := s.open(t).Get(t.Context(), store.ResourceKey(store.KindIPPool, "a"))
		if !errors.Is(err, store.ErrUnavailable) || !strings.HasSuffix(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", name, err, tt.want)
		}
	}
}

// TestDeniedSecret: the more often a Secret was denied, the longer it is not asked for, half a minute at
// most; when the right is given it is told.
func TestDeniedSecret(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		denied := true
		s := &script{}
		s.say = func(_ int, req *http.Request) *http.Response {
			mu.Lock()
			defer mu.Unlock()
			switch {
			case denied:
				return answer(http.StatusForbidden, refusal(403, "Forbidden", "no"))
			case req.URL.Query().Has("watch"):
				return s.stream(req, false)
			}
			return answer(http.StatusOK, `{"kind":"SecretList","metadata":{"resourceVersion":"5"},"items":[{"data":{"password":"YQ=="}}]}`)
		}
		st := s.open(t)
		told := ""
		go st.FollowSecret(t.Context(), "tor", func(data map[string][]byte, _ error) {
			mu.Lock()
			defer mu.Unlock()
			told = string(data["password"])
		})
		<-time.After(time.Hour)
		if n := s.count(); n < 100 || n > 140 {
			t.Errorf("asked %d times in an hour, want about every half a minute", n)
		}
		mu.Lock()
		denied = false
		mu.Unlock()
		<-time.After(definitionPause)
		mu.Lock()
		defer mu.Unlock()
		if told != "a" {
			t.Errorf("told %q half a minute after the right was given", told)
		}
	})
}

// TestBothGroups: of the groups that a cluster has the one is used that Calico's clients choose,
// and that there was a choice is said. Where there is none yet, later is looked again.
func TestBothGroups(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		groups, setting string
		want            convert.Group
		asked           int // how often, of two times
		said            string
	}{
		"both":           {`{"name":"projectcalico.org"},{"name":"crd.projectcalico.org"}`, "", convert.V1, 1, "definitions of both groups"},
		"both, and set":  {`{"name":"projectcalico.org"},{"name":"crd.projectcalico.org"}`, "projectcalico.org/v3", convert.V3, 0, ""},
		"v3 alone":       {`{"name":"projectcalico.org"}`, "", convert.V3, 1, ""},
		"v1 alone":       {`{"name":"crd.projectcalico.org"}`, "", convert.V1, 1, ""},
		"neither so far": {`{"name":"apps"}`, "", convert.V3, 2, ""},
	} {
		s := &script{}
		s.say = func(int, *http.Request) *http.Response { return answer(http.StatusOK, `{"groups":[`+tt.groups+`]}`) }
		var log bytes.Buffer
		st := s.open(t)
		st.group, st.setting, st.log = "", tt.setting, slog.New(slog.NewTextHandler(&log, nil))
		for range 2 {
			if got, err := st.groupOf(t.Context()); err != nil || got != tt.want {
				t.Errorf("%s: %s, %v, want %s", name, got, err, tt.want)
			}
		}
		if s.count() != tt.asked {
			t.Errorf("%s: asked %d times, want %d", name, s.count(), tt.asked)
		}
		if said := log.String(); tt.said == "" && said != "" || strings.Count(said, tt.said) != 1 && tt.said != "" {
			t.Errorf("%s: said is %q", name, said)
		}
	}
}

// TestDefinitionLacksField: what an operator writes is refused before anything is written; a
// field that the API drops of what the daemon writes is named once, with the cure.
func TestDefinitionLacksField(t *testing.T) {
	t.Parallel()
	s := &script{}
	s.say = func(_ int, req *http.Request) *http.Response {
		if req.URL.Query().Get("fieldValidation") == "Strict" {
			return answer(http.StatusBadRequest, refusal(400, "BadRequest", `IPPool in version "v3" cannot be handled as a IPPool: strict decoding error: unknown field "spec.assignmentMode"`))
		}
		if req.Method == http.MethodGet {
			return answer(http.StatusNotFound, refusal(404, "NotFound", "no"))
		}
		resp := answer(http.StatusCreated, pool("a", 5, `"10.0.0.0/16"`))
		resp.Header.Add("Warning", `299 - "unknown field \"spec.assignmentMode\""`)
		resp.Header.Add("Warning", `299 - "something else"`)
		return resp
	}
	var log bytes.Buffer
	st := s.open(t)
	st.warned = newDropped(slog.New(slog.NewTextHandler(&log, nil))).note
	o := store.New(store.KindIPPool)
	store.Meta(o).Name = "a"
	key, err := store.KeyOf(o)
	if err != nil {
		t.Fatal(err)
	}
	err = st.Try(t.Context(), store.Op{If: store.IfAbsent(), Action: store.Put, Object: store.Object{Key: key, Value: o}})
	if !errors.Is(err, store.ErrInvalid) || !strings.Contains(err.Error(), `unknown field "spec.assignmentMode"`) || !strings.Contains(err.Error(), "routerctl kubernetes crds") {
		t.Errorf("tried: %v", err)
	}
	for range 2 {
		if _, err := store.Create(t.Context(), st, o); err != nil {
			t.Error(err)
		}
	}
	said := log.String()
	if strings.Count(said, "\n") != 1 || !strings.Contains(said, "field=spec.assignmentMode") || !strings.Contains(said, "path=/apis/projectcalico.org/v3/ippools") || !strings.Contains(said, "routerctl kubernetes crds") {
		t.Errorf("said is %q", said)
	}
}

// TestLargeObject: an object of 1 MB is told whole, and what comes after it.
func TestLargeObject(t *testing.T) {
	t.Parallel()
	large := func(rev int) string {
		return strings.Replace(pool("large", rev, `"10.0.0.0/16"`), `"metadata":{`, fmt.Sprintf(`"metadata":{"annotations":{"x":%q},`, strings.Repeat("x", 1<<20)), 1)
	}
	synctest.Test(t, func(t *testing.T) {
		s := &script{}
		s.say = func(_ int, req *http.Request) *http.Response {
			if !initial(req) {
				return s.stream(req, false)
			}
			return s.stream(req, false, line("ADDED", large(5)), bookmark(7, true), line("MODIFIED", large(8)), line("ADDED", pool("small", 9, `"10.1.0.0/16"`)))
		}
		batches := collect(watchPools(t, s))
		got := told(batches)
		for _, part := range []string{"large@5", "large@8", "small@9"} {
			if !strings.Contains(got, part) {
				t.Errorf("told %q", got)
			}
		}
		if n := len(batches[0].Events[0].Object.Raw); n < 1<<20 {
			t.Errorf("the large one has %d bytes", n)
		}
	})
}

// TestLeaseOfAnotherClock: by whether a Lease changes is judged whether its holder lives, not by the
// time that it writes there: its clock may be an hour ahead or behind.
func TestLeaseOfAnotherClock(t *testing.T) {
	t.Parallel()
	for name, off := range map[string]time.Duration{"ahead": time.Hour, "behind": -time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			var mu sync.Mutex
			lives, rev := true, 5
			s := &script{}
			s.say = func(_ int, req *http.Request) *http.Response {
				mu.Lock()
				defer mu.Unlock()
				if req.Method == http.MethodGet {
					if lives {
						rev++
					}
					renewed := metav1.NewMicroTime(time.Now().Add(off)).UTC().Format(metav1.RFC3339Micro)
					return answer(http.StatusOK, fmt.Sprintf(`{"metadata":{"name":"routerd-x","resourceVersion":"%d"},"spec":{"holderIdentity":"other","leaseDurationSeconds":10,"renewTime":%q}}`, rev, renewed))
				}
				if lives {
					t.Errorf("%s: the lease is taken from one that lives", name)
				}
				return answer(http.StatusOK, `{"metadata":{"name":"routerd-x","resourceVersion":"100"}}`)
			}
			c := &candidate{s: s.open(t), name: "routerd-x", id: "me", ttl: 10 * time.Second}
			for range 20 {
				if held, err := c.take(t.Context()); held || err != nil {
					t.Fatalf("%s: held %v, %v", name, held, err)
				}
				later(9 * time.Second)
			}
			mu.Lock()
			lives = false
			mu.Unlock()
			for range 3 {
				if held, _ := c.take(t.Context()); held {
					return
				}
				later(9 * time.Second)
			}
			t.Errorf("%s: the lease of one that is dead is not taken", name)
		})
	}
}
