package kube_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/traffic"
	"github.com/routerd/routerd/store"
)

// run makes a pod in the API, as the scheduler places it, and attaches it as a
// runtime does.
func (c *cluster) run(where string) lab.Pod {
	c.t.Helper()
	host, name, _ := strings.Cut(where, "/")
	create(c.t, podsPath, podOn(host, name))
	return c.attach(where)
}

// podOn is a pod as the scheduler places it.
func podOn(host, name string) string {
	return fmt.Sprintf(`{"apiVersion":"v1","kind":"Pod","metadata":{"name":%q,"labels":{"app":%[1]q}},"spec":{"nodeName":%q,"automountServiceAccountToken":false,"containers":[{"name":"c","image":"x"}]}}`, name, host)
}

// attach attaches a pod of the API as a runtime does.
func (c *cluster) attach(where string) (p lab.Pod) {
	c.t.Helper()
	_, name, _ := strings.Cut(where, "/")
	await.Until(c.t, "the pod is attached", func() (err error) {
		p, err = c.AttachKubePod(c.t.Context(), where, "default", c.pod(name).Metadata.UID)
		return err
	})
	return p
}

type pod struct {
	Metadata struct {
		UID         string            `json:"uid"`
		Annotations map[string]string `json:"annotations"`
	} `json:"metadata"`
}

func (c *cluster) pod(name string) (p pod) {
	c.t.Helper()
	raw, err := server.Do(c.t.Context(), http.MethodGet, "/api/v1/namespaces/default/pods/"+name, "", nil)
	if err == nil {
		err = json.Unmarshal(raw, &p)
	}
	if err != nil {
		c.t.Fatal(err)
	}
	return p
}

// reach expects that one place gets an answer from another, or, with no, that it
// gets none.
func (c *cluster) reach(what, from, to string, no bool) {
	c.t.Helper()
	c.reachBy(dataplane.IPv4, what, from, to, no)
}

// reachBy is reach by a family's address.
func (c *cluster) reachBy(f dataplane.Family, what, from, to string, no bool) {
	c.t.Helper()
	await.Until(c.t, what, func() error {
		ctx, cancel := context.WithTimeout(c.t.Context(), 5*time.Second)
		defer cancel()
		r, err := c.Ping(ctx, from, to, traffic.Options{IPv6: f == dataplane.IPv6})
		switch {
		case err != nil:
			return err
		case r.OK == no:
			return fmt.Errorf("from %s to %s: %+v", from, to, r)
		}
		return nil
	})
}

// TestDaemons: hosts whose datastore is a real API server attach pods that reach each
// other, by resources that kubectl shows; while the server is away they go on.
func TestDaemons(t *testing.T) {
	pods := 0
	top := lab.DefaultTopology(3)
	top.Pods = &pods
	c := bringUp(t, "d", top)

	for _, host := range c.Hosts() {
		await.Until(t, host+" signs its sessions with the key in a Secret", func() error {
			n, err := c.Node(t.Context(), host)
			if err == nil && !strings.HasPrefix(n.GetBgpSigning(), "signed with key ") {
				err = errors.New(n.GetBgpSigning())
			}
			return err
		})
	}
	var all []string
	addrs := make(map[string]string)
	for _, where := range []string{"node1/a", "node1/b", "node2/c", "node3/d"} {
		p := c.run(where)
		all = append(all, where)
		addrs[p.Name] = p.Addrs[0].String()
		await.Until(t, "the API has the pod's address", func() error {
			a := c.pod(p.Name).Metadata.Annotations
			if got, want := a["cni.projectcalico.org/podIPs"], p.Addrs[0].String()+"/32"; got != want {
				return fmt.Errorf("podIPs %q, want %q", got, want)
			}
			if got := a["cni.projectcalico.org/containerID"]; got != p.ContainerID {
				return fmt.Errorf("containerID %q, want %q", got, p.ContainerID)
			}
			return nil
		})
	}
	for _, from := range all {
		for _, to := range all {
			if from != to {
				c.reach("pods reach each other", from, to, false)
			}
		}
	}

	// A policy of Calico's acts.
	s, err := c.Store(t.Context(), "node1")
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	const policy = "/apis/projectcalico.org/v3/namespaces/default/networkpolicies"
	create(t, policy, `{"apiVersion":"projectcalico.org/v3","kind":"NetworkPolicy","metadata":{"name":"d"},"spec":{"selector":"app == 'd'","ingress":[{"action":"Allow","source":{"selector":"app == 'a'"}},{"action":"Allow","source":{"services":{"name":"clients"}}}]}}`)
	c.reach("a denied pod", "node2/c", "node3/d", true)
	c.reach("an allowed pod", "node1/a", "node3/d", false)

	// Rules that name a Service follow its endpoints, whatever these are ready for.
	create(t, policy, `{"apiVersion":"projectcalico.org/v3","kind":"NetworkPolicy","metadata":{"name":"c"},"spec":{"selector":"app == 'c'","ingress":[{"action":"Deny","source":{"services":{"name":"clients","namespace":"default"}}},{"action":"Allow"}]}}`)
	create(t, slicesPath, `{"apiVersion":"discovery.k8s.io/v1","kind":"EndpointSlice","metadata":{"name":"clients-1","labels":{"kubernetes.io/service-name":"clients"}},"addressType":"IPv4","endpoints":[{"addresses":["`+addrs["c"]+`"],"conditions":{"ready":false}}]}`)
	c.reach("an endpoint of the Service", "node2/c", "node3/d", false)
	c.reach("who is none", "node1/b", "node3/d", true)
	c.reach("who is none, where endpoints are denied", "node1/b", "node2/c", false)
	if _, err := server.Do(t.Context(), http.MethodPatch, slicesPath+"/clients-1", "application/merge-patch+json", []byte(`{"endpoints":[{"addresses":["`+addrs["b"]+`"]}]}`)); err != nil {
		t.Fatal(err)
	}
	c.reach("who is none any more", "node2/c", "node3/d", true)
	c.reach("a new endpoint", "node1/b", "node3/d", false)
	c.reach("a new endpoint, where they are denied", "node1/b", "node2/c", true)
	c.reach("who is none, where they are denied", "node1/a", "node2/c", false)

	// The API goes away: the daemon is started anew, pods go and come.
	uid := c.pod("d").Metadata.UID
	heal := c.forwards["node3"].Cut()
	if err := c.Kill(t.Context(), "node3", unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := c.Start(t.Context(), "node3"); err != nil {
		t.Fatal(err)
	}
	await.Until(t, "the daemon answers from the disk", func() error {
		n, err := c.Node(t.Context(), "node3")
		if err == nil && n.GetWorkloads() != 1 {
			err = fmt.Errorf("%d workloads", n.GetWorkloads())
		}
		return err
	})
	c.reach("a denied pod, the API away", "node2/c", "node3/d", true)
	c.reach("an allowed pod, the API away", "node1/a", "node3/d", false)
	c.reach("an endpoint of an allowed Service, the API away", "node1/b", "node3/d", false)

	// The host boots meanwhile, and the runtime makes the pod anew.
	if err := c.LosePower(t.Context(), "node3"); err != nil {
		t.Fatal(err)
	}
	if err := c.Start(t.Context(), "node3"); err != nil {
		t.Fatal(err)
	}
	await.Until(t, "the pod is attached, the API away", func() error {
		_, err := c.AttachKubePod(t.Context(), "node3/d", "default", uid)
		return err
	})
	c.reach("an allowed pod, after a boot", "node1/a", "node3/d", false)
	c.reach("a denied pod, after a boot", "node2/c", "node3/d", true)
	c.reach("an endpoint of an allowed Service, after a boot", "node1/b", "node3/d", false)
	if err := c.DetachPod(t.Context(), "node3/d"); err != nil {
		t.Fatal(err)
	}
	heal()
	await.Until(t, "the API is told that the pod has no address", func() error {
		a := c.pod("d").Metadata.Annotations
		if ip, ok := a["cni.projectcalico.org/podIP"]; !ok || ip != "" {
			return fmt.Errorf("podIP is %q (%t)", ip, ok)
		}
		return nil
	})
	forbidden(t)
}

// TestBootWithoutBGP: a host whose pool is in VXLAN and that speaks no BGP boots while the API is
// away: it reaches pods of the others by their blocks, which are on its disk.
func TestBootWithoutBGP(t *testing.T) {
	pods := 0
	top := lab.DefaultTopology(2)
	top.Pods, top.Pool.Encapsulation, top.Spine.BGP = &pods, store.VXLAN, new(bool)
	c := bringUpSet(t, "nobgp", top, map[string]any{"bgp": map[string]any{"enabled": false}})
	far, near := c.run("node2/far"), c.run("node1/near")
	c.reach("before", "node2/far", "node1/near", false)
	uid := c.pod("far").Metadata.UID
	await.Until(t, "the copy on disk, which is behind by a second, has the pod and the other's block", func() error {
		raw, err := os.ReadFile(filepath.Join(filepath.Dir(lab.Socket(c.Name(), "node2")), "state", "cluster.journal"))
		for _, part := range []string{far.Addrs[0].String() + "/32", store.BlockKey(netip.PrefixFrom(near.Addrs[0], 26).Masked()).Path()} {
			if err == nil && !bytes.Contains(raw, []byte(part)) {
				err = fmt.Errorf("it lacks %s", part)
			}
		}
		return err
	})
	c.forwards["node2"].Cut()
	if err := c.LosePower(t.Context(), "node2"); err != nil {
		t.Fatal(err)
	}
	if err := c.Start(t.Context(), "node2"); err != nil {
		t.Fatal(err)
	}
	await.Until(t, "the pod is attached, the API away", func() error {
		_, err := c.AttachKubePod(t.Context(), "node2/far", "default", uid)
		return err
	})
	c.reach("after a boot", "node2/far", "node1/near", false)
}
