package clustertest

import (
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"go.etcd.io/etcd/server/v3/embed"
)

// memberEnv in the environment makes the test's binary a member: its memberSpec.
const memberEnv = "ROUTERD_TEST_ETCD_MEMBER"

type memberSpec struct {
	Name  string
	All   []string
	Quota int64
	Disk  bool
}

// Main is to be called first in TestMain. In a process that [Start] made it runs
// a member and does not return.
func Main() {
	if raw := os.Getenv(memberEnv); raw != "" {
		var spec memberSpec
		err := json.Unmarshal([]byte(raw), &spec)
		if err == nil {
			err = member(spec)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
}

// peerName is the name of the socket at which a member listens for others. A peer's URL
// has no path: etcd takes host and port for the name.
func peerName(member string) string { return member + ":1" }

// member runs until the test, which holds the other end of standard input, has
// ended. Its working directory holds data and sockets, and links to the others.
func member(spec memberSpec) error {
	dir, err := os.Getwd()
	if err != nil {
		return err
	}
	peer := func(n string) url.URL { return url.URL{Scheme: "unix", Host: peerName(n)} }
	client := url.URL{Scheme: "unix", Path: filepath.Join(dir, spec.Name)}
	for _, socket := range []string{peerName(spec.Name), spec.Name, spec.Name + "-http"} {
		if err := os.Remove(socket); err != nil && !os.IsNotExist(err) {
			return err
		}
	}
	if spec.Disk {
		if err := delayFlushes(readDelay); err != nil {
			return fmt.Errorf("member %s: %w", spec.Name, err)
		}
	}
	c := embed.NewConfig()
	c.Name, c.Dir, c.LogLevel, c.LogOutputs = spec.Name, spec.Name+"-data", "error", []string{"stderr"}
	c.ListenPeerUrls, c.AdvertisePeerUrls = []url.URL{peer(spec.Name)}, []url.URL{peer(spec.Name)}
	c.ListenClientUrls, c.AdvertiseClientUrls = []url.URL{client}, []url.URL{client}
	c.ListenClientHttpUrls = []url.URL{{Scheme: "unix", Path: client.Path + "-http"}}
	var members []string
	for _, n := range spec.All {
		u := peer(n)
		members = append(members, n+"="+u.String())
	}
	c.InitialCluster = strings.Join(members, ",")
	c.EnableGRPCGateway = false
	c.QuotaBackendBytes = spec.Quota
	c.UnsafeNoFsync = !spec.Disk // processes die here, not machines
	e, err := embed.StartEtcd(c)
	if err != nil {
		return fmt.Errorf("member %s: %w", spec.Name, err)
	}
	_, _ = io.Copy(io.Discard, os.Stdin) // until the test ends
	e.Close()
	return nil
}
