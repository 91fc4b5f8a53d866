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
	// livesOfPods is how many pods live and end on each host of TestWritesPerPod, of each length.
	livesOfPods = 25
	// writesPerShortLife is how many writes the life of a pod may cost on average that ends within
	// attach.LingerConfirm, and writesPerLongLife that of another; docs/performance.md says which
	// they are: one and three that each pod has, and a part of those that pods share.
	writesPerShortLife, writesPerLongLife = 2.0, 4.6
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
	// More than attach.LingerEnd, after which what ended is written.
	const window = 6 * time.Second
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
// kubelet. Of the short ones the datastore hears no handle, of the long ones it does.
func TestWritesPerPod(t *testing.T) {
	none := 0
	top := lab.DefaultTopology(2)
	top.Pods = &none
	c := bringUp(t, "p", top)
	// The first pod has what each host writes once.
	for _, host := range c.Hosts() {
		c.run(host + "/first-" + host)
	}
	await.True(t, "the first pods have handles", func() bool {
		ofPods := slices.DeleteFunc(handles(t), func(name string) bool {
			return slices.ContainsFunc(c.Hosts(), func(host string) bool { return strings.HasSuffix(name, "-"+host) })
		})
		return len(ofPods) == len(c.Hosts())
	})
	quiet(t)
	short := c.lives("s", livesOfPods / *livesAtOnce, func([]string) {})
	if short > writesPerShortLife {
		t.Errorf("%.2f writes in the life of a short pod, want at most %v", short, writesPerShortLife)
	}
	long := c.lives("l", 1, func(all []string) {
		before := len(handles(t))
		await.Until(t, "the pods have handles", func() error {
			if n := len(handles(t)) - before; n < len(all) {
				return fmt.Errorf("%d of %d", n, len(all))
			}
			return nil
		})
	})
	if long > writesPerLongLife {
		t.Errorf("%.2f writes in the life of a long pod, want at most %v", long, writesPerLongLife)
	}
	if mean := (short + long) / 2; mean > 3 {
		t.Errorf("%.2f writes in a pod's life, where half are short, want at most 3", mean)
	}
	forbidden(t)
}

// lives has pods live and end, some at a time and as many times as rounds says, each for as long
// as during takes, and returns how many writes each took.
func (c *cluster) lives(prefix string, rounds int, during func(all []string)) float64 {
	c.t.Helper()
	t := c.t
	before, held := writes(t), handles(t)
	for round := range rounds {
		var all []string
		for _, host := range c.Hosts() {
			for i := range *livesAtOnce {
				name := fmt.Sprintf("%s%d-%d-%s", prefix, round, i, host)
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
		during(all)
		for _, where := range all {
			if err := c.DetachPod(t.Context(), where); err != nil {
				t.Fatal(err)
			}
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
	lives := float64(len(c.Hosts()) * rounds * *livesAtOnce)
	for _, k := range slices.Sorted(maps.Keys(since)) {
		total += since[k]
		each = append(each, fmt.Sprintf("%s %.2f", k, float64(since[k])/lives))
	}
	t.Logf("%.2f writes in a pod's life: %s", float64(total)/lives, strings.Join(each, ", "))
	return float64(total) / lives
}
