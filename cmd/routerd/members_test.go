package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/routerd/routerd/control/config"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/embedded"
	"github.com/routerd/routerd/store/etcd"

	apiv1 "github.com/routerd/routerd/control/api/v1"
)

// threeHosts are host11, which serves its datastore, and two that have joined it, on one
// bridge.
func threeHosts(t *testing.T) []*running {
	t.Helper()
	hosts := []*host{newHost(t, "10.9.0.1/24"), newHost(t, "10.9.0.2/24"), newHost(t, "10.9.0.3/24")}
	one := hosts[0]
	one.ip("link del eth0")
	one.ip("link add eth0 type bridge")
	for i, h := range hosts {
		if i > 0 {
			h.ip("link del eth0")
			one.ip(fmt.Sprintf("link add port%d type veth peer name eth0 netns %s", i, h.ns.Path))
			one.ip(fmt.Sprintf("link set port%d up master eth0", i))
		}
		h.ip(fmt.Sprintf("addr add 10.1.0.1%d/24 dev eth0", i+1))
		h.ip("link set eth0 up")
		h.config["nodeName"] = fmt.Sprint("host1", i+1)
	}
	one.config["datastore"] = map[string]any{"embedded": map[string]any{"listen": "10.1.0.11:2379"}}
	first := one.start()
	first.ready()
	all := []*running{first}
	for _, h := range hosts[1:] {
		file := h.writeConfig()
		if code, out := h.routerd("join", "--config", file, "--token", first.token(), "--no-start"); code != 0 {
			t.Fatalf("join: %d\n%s", code, out)
		}
		r := h.startFrom(file)
		r.ready()
		all = append(all, r)
	}
	return all
}

// changeMember does what routerctl cluster promote, demote and leave do.
func (r *running) changeMember(host string, toMember bool) (told string, err error) {
	r.t.Helper()
	stream, err := apiv1.NewClusterClient(r.dial(config.OperatorSocketName)).ChangeMember(await.Context(r.t), &apiv1.ChangeMemberRequest{Host: host, Member: toMember})
	if err != nil {
		return "", err
	}
	var b strings.Builder
	for {
		p, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return b.String(), nil
		}
		if err != nil {
			return b.String(), err
		}
		fmt.Fprintln(&b, p.GetMessage(), p.GetWarning())
	}
}

// mustChange is changeMember, which must succeed.
func (r *running) mustChange(host string, toMember bool) string {
	r.t.Helper()
	told, err := r.changeMember(host, toMember)
	if err != nil {
		r.t.Fatalf("%s, to be a member %t: %v\n%s", host, toMember, err, told)
	}
	return told
}

func (r *running) members() *apiv1.MembersResponse {
	r.t.Helper()
	var resp *apiv1.MembersResponse
	await.Until(r.t, "the members", func() (err error) {
		resp, err = apiv1.NewClusterClient(r.dial(config.OperatorSocketName)).Members(await.Context(r.t), &apiv1.MembersRequest{})
		return err
	})
	return resp
}

// votes says why a host is no member that votes, and answers: who leads is etcd's to choose.
func votes(of *running, host string) error {
	is := states(of.members())
	if mentions(is, host+" voter follower") == nil || mentions(is, host+" voter leader") == nil {
		return nil
	}
	return fmt.Errorf("want %s among the voters, is %q", host, is)
}

// states lists the members and their states.
func states(r *apiv1.MembersResponse) string {
	var out []string
	for _, m := range r.GetMembers() {
		out = append(out, m.GetHost()+" "+m.GetRole()+" "+m.GetState())
	}
	return strings.Join(out, ", ")
}

// writes writes to the datastore by a host's daemon, and returns how long it took until
// one succeeded.
func (r *running) writes(n int) time.Duration {
	r.t.Helper()
	began := time.Now()
	s := r.store(filepath.Join(r.runDir(), config.OperatorSocketName))
	await.Until(r.t, fmt.Sprintf("%s writes", r.config["nodeName"]), func() error {
		_, err := s.Txn(await.Context(r.t), store.Op{Action: store.Put, Object: store.Object{Key: store.HandleKey(fmt.Sprint("probe", n)), Value: &store.Handle{Block: map[string]int{"10.0.0.0/26": n}}}})
		return err
	})
	return time.Since(began)
}

// TestMembers: the datastore of one host becomes that of three, the first host's death
// stops nothing, it comes back, and leaves.
func TestMembers(t *testing.T) {
	t.Parallel()
	hosts := threeHosts(t)
	first, second, third := hosts[0], hosts[1], hosts[2]
	if _, err := second.changeMember("host13", true); err == nil || mentions(err.Error(), "client of the datastore", "on a member") != nil {
		t.Errorf("a client promotes: %v", err)
	}
	if _, err := first.changeMember("host99", true); err == nil || mentions(err.Error(), "host99", "routerd join") != nil {
		t.Errorf("nobody is promoted: %v", err)
	}
	if _, err := first.changeMember("", false); err == nil || mentions(err.Error(), "last member", "promote another") != nil {
		t.Errorf("the last member leaves: %v", err)
	}
	// Two at once, one of which waits.
	var both errgroup.Group
	began := time.Now()
	for _, host := range []string{"host12", "host13"} {
		both.Go(func() error {
			told, err := first.changeMember(host, true)
			t.Logf("%s", told)
			return errors.Join(err, mentions(told, host+" has its order", host+" is a member with a vote."))
		})
	}
	if err := both.Wait(); err != nil {
		t.Fatal(err)
	}
	t.Logf("three after %s", time.Since(began))
	if again := first.mustChange("host13", true); again != "host13 is a member with a vote. \n" {
		t.Errorf("once more: %q", again)
	}
	if got := states(third.members()); strings.Count(got, "voter") != 3 || strings.Count(got, "leader") != 1 || strings.Count(got, "follower") != 2 {
		t.Errorf("members: %s", got)
	}
	if _, err := os.Stat(filepath.Join(third.dir, "state", "etcd", "pki", "ca.key")); err != nil {
		t.Errorf("the third member has no key of the authority: %v", err)
	}
	await.True(t, "nothing listens for new members", func() bool { return !first.takesHosts() && !second.takesHosts() })

	first.kill(syscall.SIGKILL)
	t.Logf("the second wrote %s after the first one's death", second.writes(1))
	third.writes(2)
	await.Until(t, "the death of the first is seen", func() error {
		r := second.members()
		return mentions(states(r)+r.GetWarning(), "host11 voter unreachable", "if one more is lost")
	})
	third.token() // members that are left take hosts in
	again := first.host.startFrom(filepath.Join(first.dir, "routerd.yaml"))
	again.ready()
	await.Until(t, "the first is back", func() error { return votes(third, "host11") })

	// The first leaves, and is a client, over a restart too.
	t.Logf("%s", again.mustChange("", false))
	if got := states(again.members()); strings.Contains(got, "host11") {
		t.Errorf("members: %s", got)
	}
	again.writes(3)
	again.kill(syscall.SIGTERM)
	if _, err := os.Stat(filepath.Join(first.dir, "state", "etcd", "pki", "ca.key")); err == nil {
		t.Error("who has left has the authority's key still")
	}
	again = first.host.startFrom(filepath.Join(first.dir, "routerd.yaml"))
	again.ready()
	again.writes(4)
	// It becomes one again, from its own configuration.
	second.mustChange("host11", true)
	again.writes(5)
}

// TestMemberLost: a member that is lost is removed, and when it comes back it finds out
// and goes on as a client.
func TestMemberLost(t *testing.T) {
	t.Parallel()
	hosts := threeHosts(t)
	first, second, third := hosts[0], hosts[1], hosts[2]
	first.mustChange("host12", true)
	first.mustChange("host13", true)
	c := apiv1.NewClusterClient(second.dial(config.OperatorSocketName))
	remove := func(host string, force bool) error {
		_, err := c.RemoveMember(await.Context(t), &apiv1.RemoveMemberRequest{Host: host, Force: force})
		return err
	}
	if err := remove("host13", false); err == nil || mentions(err.Error(), "is up", "demote", "--force") != nil {
		t.Errorf("a member that is up is removed: %v", err)
	}
	if err := remove("host12", false); err == nil || mentions(err.Error(), "leave") != nil {
		t.Errorf("a member removes itself: %v", err)
	}
	if err := remove("host99", false); err == nil || mentions(err.Error(), "no member host99", "host11, host12, host13") != nil {
		t.Errorf("nobody is removed: %v", err)
	}
	first.kill(syscall.SIGKILL)
	await.Until(t, "the lost one is removed", func() error { return remove("host11", false) })
	if got := states(third.members()); strings.Contains(got, "host11") {
		t.Errorf("members: %s", got)
	}
	back := first.host.startFrom(filepath.Join(first.dir, "routerd.yaml"))
	await.True(t, "its data are put away", func() bool {
		return !embedded.HasData(filepath.Join(first.dir, "state", "etcd", "data"))
	})
	back.ready()
	back.writes(1)
	if got := states(back.members()); strings.Contains(got, "host11") {
		t.Errorf("members: %s", got)
	}
}

// TestMembersRestored: a member that has lost its data needs no snapshot, and is promoted anew; while the others have the
// datastore a snapshot is not restored beside it; when more than half are lost, one is, and the others join it.
func TestMembersRestored(t *testing.T) {
	t.Parallel()
	hosts := threeHosts(t)
	first, second, third := hosts[0], hosts[1], hosts[2]
	first.mustChange("host12", true)
	first.mustChange("host13", true)
	file := filepath.Join(third.dir, "routerd.yaml")
	third.kill(syscall.SIGKILL)
	snapshot := filepath.Join(third.dir, "backup.db")
	second.snapshot(snapshot)
	restore := func(r *running) (int, string) {
		return r.host.routerd("restore", snapshot, "--config", filepath.Join(r.dir, "routerd.yaml"))
	}
	if code, out := restore(third); code == 0 || mentions(out, "host11 and host12", "have it without this host", "on host11: routerctl cluster promote host13", "--force") != nil {
		t.Errorf("restore beside the others: %d\n%s", code, out)
	}

	// Its disk is lost.
	if err := os.RemoveAll(filepath.Join(third.dir, "state", "etcd", "data")); err != nil {
		t.Fatal(err)
	}
	third = third.host.startFrom(file)
	await.Until(t, "it is a member no more", func() error {
		if got := states(first.members()); strings.Contains(got, "host13") {
			return errors.New(got)
		}
		return nil
	})
	third.ready()
	third.writes(1)
	first.mustChange("host13", true)
	await.Until(t, "it is a member again", func() error { return votes(first, "host13") })

	// Two of three are lost.
	first.kill(syscall.SIGKILL)
	third.kill(syscall.SIGKILL)
	second.kill(syscall.SIGTERM)
	if code, out := restore(second); code != 0 || mentions(out, "the only member of the datastore now", "Restored ") != nil {
		t.Fatalf("restore: %d\n%s", code, out)
	}
	second = second.host.startFrom(filepath.Join(second.dir, "routerd.yaml"))
	second.ready()
	if got := states(second.members()); got != "host12 voter leader" {
		t.Errorf("members: %s", got)
	}
	if err := os.Rename(filepath.Join(third.dir, "state", "etcd"), filepath.Join(third.dir, "state", "etcd.before")); err != nil {
		t.Fatal(err)
	}
	if code, out := third.host.routerd("join", "--config", file, "--token", second.token(), "--no-start", "--force"); code != 0 {
		t.Fatalf("join: %d\n%s", code, out)
	}
	third = third.host.startFrom(file)
	third.ready()
	second.mustChange("host13", true)
	third.writes(2)
}

// snapshot writes the database of this host's datastore to a file.
func (r *running) snapshot(file string) {
	r.t.Helper()
	s, err := etcd.Open(r.t.Context(), etcd.Config{Endpoints: []string{"unix://" + filepath.Join(r.runDir(), config.OperatorSocketName)}})
	if err != nil {
		r.t.Fatal(err)
	}
	defer s.Close()
	var b bytes.Buffer
	if _, err := s.Snapshot(await.Context(r.t), &b); err != nil {
		r.t.Fatal(err)
	}
	if err := os.WriteFile(file, b.Bytes(), 0o600); err != nil {
		r.t.Fatal(err)
	}
}

// TestMemberKilled: a host that becomes a member, or leaves, may be killed after each of
// its steps, and started again it goes on; the command may be killed too.
func TestMemberKilled(t *testing.T) {
	t.Parallel()
	hosts := threeHosts(t)
	first, second := hosts[0], hosts[1]
	file := filepath.Join(second.dir, "routerd.yaml")
	state := filepath.Join(second.dir, "state", "etcd")
	there := func(path ...string) func() bool {
		return func() bool {
			_, err := os.Stat(filepath.Join(append([]string{state}, path...)...))
			return err == nil
		}
	}
	role := func(want string) func() bool {
		return func() bool {
			b, err := os.ReadFile(filepath.Join(state, "member.json"))
			return err == nil && strings.Contains(string(b), want)
		}
	}
	order := func(toMember bool) {
		t.Helper()
		// Who gave the command is gone once it is heard.
		ctx, cancel := context.WithCancel(await.Context(t))
		defer cancel()
		stream, err := apiv1.NewClusterClient(first.dial(config.OperatorSocketName)).ChangeMember(ctx, &apiv1.ChangeMemberRequest{Host: "host12", Member: toMember})
		if err == nil {
			_, err = stream.Recv()
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	kill := func(steps ...func() bool) {
		for _, step := range steps {
			await.True(t, "the next step", step)
			second.kill(syscall.SIGKILL)
			second = second.host.startFrom(file)
		}
	}
	order(true)
	kill(there("pki", "ca.key"), role("learner"), there("data", "member"), role("voter"))
	second.ready()
	await.Until(t, "it is a member", func() error {
		return votes(first, "host12")
	})
	order(false)
	kill(role("leaving"), func() bool { return !embedded.HasData(filepath.Join(state, "data")) })
	await.True(t, "it is a client", role("client"))
	second.ready()
	second.writes(1)
	if got := states(first.members()); got != "host11 voter leader" {
		t.Errorf("members: %s", got)
	}
}
