package kube_test

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
)

var livesAtOnce = flag.Int("lives-at-once", 5, "how many pods live at one time on a host of TestWritesPerPod")

const (
	// livesOfPods is how many pods live and end on each host of TestWritesPerPod.
	livesOfPods = 25
	// writesPerPod is how many writes the life of one may cost on average; docs/performance.md
	// says which they are: three that each pod has, and a part of those that pods share,
	// which a busy machine has fewer share.
	writesPerPod = 4.2
)

// writes is what daemons have written until now, by verb and resource.
func writes(t *testing.T) map[string]int {
	t.Helper()
	audit, err := server.Audit()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]int{}
	for a, n := range audit {
		if slices.Contains([]string{"create", "update", "patch", "delete", "deletecollection"}, a.Verb) {
			what := a.Verb + " " + a.Resource
			if a.Code/100 != 2 {
				what = fmt.Sprintf("%s (%d)", what, a.Code)
			}
			out[what] += n
		}
	}
	return out
}

// quiet waits until the daemons have written nothing for a while.
func quiet(t *testing.T) {
	t.Helper()
	const window = 3 * time.Second
	since, was := time.Now(), writes(t)
	await.Until(t, "the daemons write nothing", func() error {
		if now := writes(t); !maps.Equal(now, was) {
			since, was = time.Now(), now
		}
		if took := time.Since(since); took < window {
			return fmt.Errorf("not for %v", window)
		}
		return nil
	})
}

// handles lists the names of IPAM's handles.
func handles(t *testing.T) (names []string) {
	t.Helper()
	var list struct {
		Items []struct {
			Metadata struct {
				Name string `json:"name"`
			} `json:"metadata"`
		} `json:"items"`
	}
	raw, err := server.Do(t.Context(), http.MethodGet, "/apis/projectcalico.org/v3/ipamhandles", "", nil)
	if err == nil {
		err = json.Unmarshal(raw, &list)
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range list.Items {
		names = append(names, o.Metadata.Name)
	}
	slices.Sort(names)
	return names
}

// TestWritesPerPod counts what two daemons write while pods live and end on their hosts, some
// at a time: each is told to the API, its DEL comes, and then its end in the API, as from a
// kubelet.
func TestWritesPerPod(t *testing.T) {
	none := 0
	top := lab.DefaultTopology(2)
	top.Pods = &none
	c := bringUp(t, "p", top)
	// The first pod has what each host writes once.
	for _, host := range c.Hosts() {
		c.run(host + "/first-" + host)
	}
	quiet(t)
	before, held := writes(t), handles(t)
	for round := range livesOfPods / *livesAtOnce {
		var all []string
		for _, host := range c.Hosts() {
			for i := range *livesAtOnce {
				name := fmt.Sprintf("p%d-%d-%s", round, i, host)
				where := host + "/" + name
				if _, err := server.Do(t.Context(), http.MethodPost, podsPath, "application/json", []byte(podOn(host, name))); err != nil {
					t.Fatal(err)
				}
				c.attach(where)
				all = append(all, where)
			}
		}
		for _, where := range all {
			_, name, _ := strings.Cut(where, "/")
			await.Until(t, "the API has the pod's address", func() error {
				if c.pod(name).Metadata.Annotations["cni.projectcalico.org/podIPs"] == "" {
					return errors.New("it has none")
				}
				return nil
			})
		}
		if err := c.DetachPods(t.Context(), all...); err != nil {
			t.Fatal(err)
		}
		for _, where := range all {
			_, name, _ := strings.Cut(where, "/")
			if _, err := server.Do(t.Context(), http.MethodDelete, podsPath+"/"+name+"?gracePeriodSeconds=0", "", nil); err != nil {
				t.Fatal(err)
			}
		}
	}
	await.Until(t, "nothing is left of the pods", func() error {
		if now := handles(t); !slices.Equal(now, held) {
			return fmt.Errorf("handles %v, want %v", now, held)
		}
		return nil
	})
	quiet(t)
	since := less(writes(t), before)
	total := 0
	var each []string
	lives := float64(len(c.Hosts()) * livesOfPods)
	for _, k := range slices.Sorted(maps.Keys(since)) {
		total += since[k]
		each = append(each, fmt.Sprintf("%s %.2f", k, float64(since[k])/lives))
	}
	t.Logf("%.2f writes in a pod's life: %s", float64(total)/lives, strings.Join(each, ", "))
	if got := float64(total) / lives; got > writesPerPod {
		t.Errorf("%.2f writes in a pod's life, want at most %v", got, writesPerPod)
	}
	forbidden(t)
}
