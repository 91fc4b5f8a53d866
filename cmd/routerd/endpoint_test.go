package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/await"
)

// get asks the daemon's HTTP endpoint.
func (h *host) get(path string) (code int, body string, err error) {
	return h.getFrom("127.0.0.1:9099", path)
}

// getFrom asks a server in the namespace.
func (h *host) getFrom(server, path string) (code int, body string, err error) {
	client := http.Client{
		Timeout: await.Patience,
		Transport: &http.Transport{
			DisableKeepAlives: true,
			DialContext: func(ctx context.Context, network, addr string) (c net.Conn, err error) {
				// The socket is made on a thread of the namespace.
				err = h.ns.Do(func() error {
					c, err = new(net.Dialer).DialContext(ctx, network, addr)
					return err
				})
				return c, err
			},
		},
	}
	resp, err := client.Get("http://" + server + path)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b), err
}

// metricNames are what docs/operations/troubleshoot.md and dashboards rely on.
func metricNames() []string {
	return []string{
		`routerd_reconcile_objects{kind="route",state="done"}`, `routerd_reconcile_objects{kind="link",state="failed"}`,
		`routerd_workloads 0`, `routerd_ipam_block_addresses{pool="default-ipv4-ippool"}`,
		`routerd_ipam_block_addresses_in_use{pool="default-ipv4-ippool"}`,
		`routerd_healthy{check="live"} 1`, `routerd_healthy{check="ready"} 1`, `routerd_healthy{check="Registered"} 1`,
		`routerd_healthy{check="DataplaneProgrammed"} 1`, `routerd_healthy{check="Datastore"} 1`, `routerd_healthy{check="BGP"} 1`,
		`routerd_healthy{check="Pool/default-ipv4-ippool"} 1`,
		`routerd_kernel_written_total{action="put",kind="link"}`, `routerd_kernel_list_seconds_count`,
		`routerd_bgp_session_up{peer="10.1.0.12",type="node-to-node mesh"} 0`,
		`routerd_bgp_prefixes{direction="received",peer="10.1.0.12"} 0`,
		`routerd_bgp_session_fsm_state{peer="10.1.0.12"}`, `routerd_bgp_session_established_total{peer="10.1.0.12"} 0`,
		`routerd_bgp_session_changed_timestamp_seconds{peer="10.1.0.12"}`,
		`routerd_bgp_messages_total{direction="out",message="open",peer="10.1.0.12"}`,
		`process_resident_memory_bytes`, `go_goroutines`,
	}
}

func TestEndpoint(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	h.config["health"] = map[string]any{"listen": "127.0.0.1:9099"}
	r := h.start()
	r.ready()
	h.addNode(h.store(""), "node2", "10.1.0.12/24", "192.168.200.1", "192.168.200.0/26")
	await.Until(t, "metrics", func() error {
		code, body, err := h.get("/metrics")
		if err != nil || code != http.StatusOK {
			return fmt.Errorf("%d, %w", code, err)
		}
		var errs []error
		for _, name := range metricNames() {
			if !strings.Contains(body, name) {
				errs = append(errs, errors.New("no "+name))
			}
		}
		return errors.Join(errs...)
	})
	for path, want := range map[string]string{
		"/liveness": `"ok": true`, "/readiness": `"ok": true`, "/peers": "10.1.0.12", "/health": "DataplaneProgrammed",
	} {
		code, body, err := h.get(path)
		if err != nil || code != http.StatusOK || !strings.Contains(body, want) {
			t.Errorf("GET %s: %d, %v, %s; want 200 and %s", path, code, err, body, want)
		}
	}
}

// TestUnready: a host without an address is live and not ready, over HTTP too,
// and becomes ready when it gets one.
func TestUnready(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	h.config["health"] = map[string]any{"listen": "127.0.0.1:9099"}
	h.config["address"] = map[string]any{"ipv4": "cidr=172.16.0.0/12"}
	r := h.start()
	await.Until(t, "not ready", func() error {
		code, body, err := h.get("/readiness")
		if err == nil && code != http.StatusServiceUnavailable {
			err = fmt.Errorf("code %d", code)
		}
		return errors.Join(err, mentions(body, "cidr=172.16.0.0/12", "10.1.0.11/24 on eth0", "address.ipv4"))
	})
	if code, body, err := h.get("/liveness"); err != nil || code != http.StatusOK {
		t.Errorf("liveness: %d, %v, %s", code, err, body)
	}
	h.ip("addr add 172.16.0.5/24 dev eth0")
	if n := r.ready(); n.GetIpv4Address() != "172.16.0.5/24" {
		t.Errorf("the address is %s", n.GetIpv4Address())
	}
}

// TestReadOnlySettings: where the kernel's settings cannot be written, as in an unprivileged
// container, and do not forward, the host is live and not ready, and names the first of them.
// Where they are right already nothing has to be written.
func TestReadOnlySettings(t *testing.T) {
	t.Parallel()
	readOnly := []string{"unshare", "-m", "sh", "-c", `mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys && exec "$0" "$@"`}
	h := newHost(t, "10.1.0.11/24")
	h.config["health"] = map[string]any{"listen": "127.0.0.1:9099"}
	h.wrap = readOnly
	r := h.start()
	await.Until(t, "not ready", func() error {
		code, body, err := h.get("/readiness")
		if err == nil && code != http.StatusServiceUnavailable {
			err = fmt.Errorf("code %d", code)
		}
		return errors.Join(err, mentions(body, "DataplaneProgrammed", "net/ipv4/", "read-only file system"))
	})
	if code, body, err := h.get("/liveness"); err != nil || code != http.StatusOK {
		t.Errorf("liveness: %d, %v, %s", code, err, body)
	}
	r.kill(syscall.SIGKILL)
	h.wrap = nil
	r = h.start()
	r.ready()
	r.kill(syscall.SIGKILL)
	h.wrap = readOnly
	h.start().ready()
}

func TestSystemd(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	path := filepath.Join(h.dir, "notify.sock")
	sock, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer sock.Close()
	h.env = []string{"NOTIFY_SOCKET=" + path, "WATCHDOG_USEC=600000"}
	r := h.start()
	got := map[string]int{}
	buf := make([]byte, 4096)
	read := func() {
		t.Helper()
		if err := sock.SetReadDeadline(time.Now().Add(await.Patience)); err != nil {
			t.Fatal(err)
		}
		n, err := sock.Read(buf)
		if err != nil {
			t.Fatalf("waiting for the daemon: %v; it said %v", err, got)
		}
		got[string(buf[:n])]++
	}
	const served = "STATUS=ready; 0 workloads, 0 of 0 BGP sessions up"
	for got["READY=1"] == 0 || got["WATCHDOG=1"] < 3 || got[served] == 0 {
		read()
	}
	if err := r.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	for got["STOPPING=1"] == 0 {
		read()
	}
	if got["READY=1"] != 1 || got[served] != 1 {
		t.Errorf("said more than once: %v", got)
	}
	if st := r.ended(); st.ExitCode() != 0 {
		t.Errorf("ended with %s", st)
	}
}
