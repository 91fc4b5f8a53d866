// Package kube runs a real Kubernetes API server on an etcd of its own, for
// tests of what talks to one. The server is built by `make kube-tools`.
package kube

import (
	"bytes"
	"cmp"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/routerd/routerd/store/embedded"
)

// Token is what the cluster's administrator shows to the server.
const Token = "administrator"

// Node and NodeToken are a node and what its kubelet shows to the server.
const (
	Node      = "node1"
	NodeToken = "kubelet-of-node1"
)

// ServerConfig says how to run a server.
type ServerConfig struct {
	Dir   string   // of its files; a test's temporary directory
	Bin   string   // of the programs; empty: $KUBE_BIN, or .cache/kube of the repository
	Flags []string // beside the usual ones
	Etcd  string   // the program of its etcd; empty: routerd's own, within this process

	// Advertise is where the kubelets of a whole cluster reach the server, which then
	// listens on every address and expects a controller manager to make the service
	// accounts. Without it the server is the machine's own, at a loopback address.
	Advertise netip.Addr
	Users     []User // beside the administrator and the kubelet of [Node]
	Trust     Trust  // at first; see [Server.Rotate]
}

// User is who shows a token to the server.
type User struct{ Token, Name, Group string }

// Server is a running API server. Make one with [Start].
type Server struct {
	URL    string // https://127.0.0.1:PORT, or where it is advertised
	CAFile string

	conf   ServerConfig
	trust  Trust
	port   int
	etcd   *embedded.Server // nil with ServerConfig.Etcd
	other  *otherEtcd       // with it
	client *http.Client

	mu      sync.Mutex
	starts  []start // in order
	asked   audit
	process *exec.Cmd
	died    chan struct{} // closed when process has ended
	log     *os.File
}

// Trust is by what a server and its clients know each other. What is empty is as the server
// makes it itself.
type Trust struct {
	AccountKeys       []string // files; the first signs the tokens of service accounts, all are believed
	CertFile, KeyFile string   // of the server's certificate
	CAFile            string   // of who signed that
	ClientCAFile      string   // of who signs those of clients
}

// flags returns the server's. own is the key that it signs tokens with by itself.
func (tr Trust) flags(own string) (flags []string) {
	keys := tr.AccountKeys
	if len(keys) == 0 {
		keys = []string{own}
	}
	flags = append(flags, "--service-account-signing-key-file="+keys[0])
	for _, file := range keys {
		flags = append(flags, "--service-account-key-file="+file)
	}
	if tr.CertFile != "" {
		flags = append(flags, "--tls-cert-file="+tr.CertFile, "--tls-private-key-file="+tr.KeyFile)
	}
	if tr.ClientCAFile != "" {
		flags = append(flags, "--client-ca-file="+tr.ClientCAFile)
	}
	return flags
}

// Rotate has the server, started again, and its clients know each other by something else.
func (s *Server) Rotate(ctx context.Context, tr Trust) error {
	s.Kill()
	s.believe(tr)
	return s.Run(ctx)
}

func (s *Server) believe(tr Trust) {
	s.trust, s.client = tr, nil
	s.CAFile = cmp.Or(tr.CAFile, filepath.Join(s.conf.Dir, "certs", "apiserver.crt"))
}

// NewAccountsKey makes another key for [Trust.AccountKeys].
func (s *Server) NewAccountsKey(name string) (file string, err error) {
	file = filepath.Join(s.conf.Dir, name+".key")
	return file, writeKey(file)
}

// start is from when to when a start took; to is zero while it takes.
type start struct{ from, to time.Time }

// audit is what was read of the audit log.
type audit struct {
	read int64 // bytes
	all  map[Asked]int
}

// Start runs an etcd and an API server, and returns when the latter is ready.
// ctx bounds the start only.
func Start(ctx context.Context, c ServerConfig) (_ *Server, err error) {
	c.Bin = cmp.Or(c.Bin, os.Getenv("KUBE_BIN"), "../../.cache/kube")
	if _, err := os.Stat(filepath.Join(c.Bin, "kube-apiserver")); err != nil {
		return nil, fmt.Errorf("%w: run \"make kube-tools\" first, or say by KUBE_BIN where the programs are", err)
	}
	s := &Server{conf: c}
	s.believe(c.Trust)
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	if c.Etcd != "" {
		s.other, err = startEtcd(c.Etcd, c.Dir)
	} else {
		s.etcd, err = embedded.Start(ctx, embedded.Config{
			Dir: filepath.Join(c.Dir, "etcd"), Socket: filepath.Join(c.Dir, "etcd.sock"), Listen: netip.MustParseAddrPort("127.0.0.1:0"),
		})
	}
	if err != nil {
		return nil, err
	}
	if s.log, err = os.Create(filepath.Join(c.Dir, "apiserver.log")); err != nil {
		return nil, err
	}
	var tokens strings.Builder
	for i, u := range append([]User{{Token, "admin", "system:masters"}, {NodeToken, "system:node:" + Node, "system:nodes"}}, c.Users...) {
		fmt.Fprintf(&tokens, "%s,%s,%d,%s\n", u.Token, u.Name, i+1, u.Group)
	}
	if err := os.WriteFile(filepath.Join(c.Dir, "tokens.csv"), []byte(tokens.String()), 0o600); err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(c.Dir, "audit.yaml"), []byte(auditPolicy), 0o600); err != nil {
		return nil, err
	}
	if err := writeKey(s.AccountsKey()); err != nil {
		return nil, err
	}
	if s.port, err = freePort(); err != nil {
		return nil, err
	}
	host := "127.0.0.1"
	if c.Advertise.IsValid() {
		host = c.Advertise.String() // for which its certificate is
	}
	s.URL = "https://" + net.JoinHostPort(host, strconv.Itoa(s.port))
	if err := s.Run(ctx); err != nil {
		return nil, err
	}
	return s, nil
}

// auditPolicy has written down what the daemons ask for.
const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived, ResponseStarted]
rules:
- {level: Metadata, users: ["` + Account + `"]}
- {level: None}
`

// Account is the user that the daemons are.
const Account = "system:serviceaccount:kube-system:routerd"

func (s *Server) auditLog() string { return filepath.Join(s.conf.Dir, "audit.log") }

// Asked is a kind of request that daemons made.
type Asked struct {
	Verb, Group, Resource string // the resource with its subresource: "nodes/status"
	Name                  string // of a Secret or a Lease, to which rights are given by name
	Code                  int    // of the answer
	Unmet                 bool   // a patch whose condition did not hold: Code is 422, as where admission refuses
	Whole                 bool   // the state of all objects is asked for, by a list or a watch
	Of                    string // of pods: own, those of a node; others, those of all other nodes; empty: all
}

// Thief is the User-Agent of who shows a daemon's token and is none.
const Thief = "thief"

// Audit lists what the daemons asked for since the server was first started, without
// what it refused while it started: it has not read the rights then. A watch is listed when
// it has ended. Several goroutines may call it.
func (s *Server) Audit() (map[Asked]int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f, err := os.Open(s.auditLog())
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || info.Size() < s.asked.read {
		return nil, errors.Join(err, fmt.Errorf("%s is shorter than it was: raise --audit-log-maxsize", f.Name()))
	}
	raw, err := io.ReadAll(io.NewSectionReader(f, s.asked.read, math.MaxInt64-s.asked.read))
	if err != nil {
		return nil, err
	}
	if s.asked.all == nil {
		s.asked.all = map[Asked]int{}
	}
	for line := range bytes.Lines(raw[:bytes.LastIndexByte(raw, '\n')+1]) { // the server may be writing the rest
		var e event
		if err := json.Unmarshal(line, &e); err != nil {
			return nil, err
		}
		s.asked.read += int64(len(line))
		if e.UserAgent == Thief || e.ResponseStatus.Code == http.StatusForbidden && s.starting(e.Received) {
			continue
		}
		s.asked.all[e.asked()]++
	}
	return maps.Clone(s.asked.all), nil
}

// event is one of the audit log.
type event struct {
	Verb       string
	RequestURI string
	UserAgent  string
	Received   time.Time `json:"requestReceivedTimestamp"`
	ObjectRef  struct {
		APIGroup, Resource, Subresource, Name string
	}
	ResponseStatus struct {
		Code    int
		Message string
	}
}

// unmet is what the server says of a JSON patch of which a test (RFC 6902 section 4.6) failed.
const unmet = "the server rejected our request due to an error in our request"

func (e event) asked() Asked {
	a := Asked{Verb: e.Verb, Group: e.ObjectRef.APIGroup, Resource: e.ObjectRef.Resource, Code: e.ResponseStatus.Code}
	a.Unmet = a.Verb == "patch" && a.Code == http.StatusUnprocessableEntity && e.ResponseStatus.Message == unmet
	switch a.Resource {
	case "secrets", "leases":
		a.Name = e.ObjectRef.Name
	}
	if e.ObjectRef.Subresource != "" {
		a.Resource += "/" + e.ObjectRef.Subresource
	}
	asks := func(what string) bool { return strings.Contains(e.RequestURI, what) }
	// The daemon asks for one object of all to learn how far the server is.
	a.Whole = asks("sendInitialEvents=true") || e.Verb == "list" && !asks("limit=1")
	switch {
	case asks("fieldSelector=spec.nodeName%3D"):
		a.Of, a.Whole = "own", false
	case asks("fieldSelector=spec.nodeName%21%3D"):
		a.Of = "others"
	case asks("Selector="):
		a.Whole = false
	}
	return a
}

// Refused reports whether rights or admission did not allow it, or the server found what was written wrong.
func (a Asked) Refused() bool {
	switch a.Code {
	case http.StatusForbidden, http.StatusUnauthorized:
		return true
	default:
		return a.Code == http.StatusUnprocessableEntity && !a.Unmet
	}
}

// starting reports whether the server was being started at a time. s.mu is held.
func (s *Server) starting(at time.Time) bool {
	return slices.ContainsFunc(s.starts, func(r start) bool {
		return !at.Before(r.from) && (r.to.IsZero() || !at.After(r.to))
	})
}

// freePort returns a port that nothing listens on at this moment.
func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}

// writeKey makes the key with which the server signs the tokens of service
// accounts.
func writeKey(file string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return err
	}
	return os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), 0o600)
}

// AccountsKey is the file of the key that signs the tokens of service accounts.
func (s *Server) AccountsKey() string { return filepath.Join(s.conf.Dir, "accounts.key") }

// reach returns the flags about where the server is reached, and what goes with that.
func (c ServerConfig) reach() []string {
	if !c.Advertise.IsValid() {
		return []string{
			"--bind-address=127.0.0.1",
			"--endpoint-reconciler-type=none",            // its address is a loopback's
			"--disable-admission-plugins=ServiceAccount", // no controller makes the accounts
		}
	}
	every := netip.IPv4Unspecified()
	if c.Advertise.Is6() {
		every = netip.IPv6Unspecified()
	}
	return []string{
		"--bind-address=" + every.String(), "--advertise-address=" + c.Advertise.String(),
		"--kubelet-preferred-address-types=InternalIP", // no DNS knows the nodes
	}
}

// Run starts the API server, also again after [Server.Kill], and returns when it
// is ready.
func (s *Server) Run(ctx context.Context) error {
	dir := s.conf.Dir
	args := append(s.etcdFlags(), append([]string{
		"--secure-port=" + strconv.Itoa(s.port), "--cert-dir=" + filepath.Join(dir, "certs"),
		"--service-cluster-ip-range=10.96.0.0/16",
		"--service-account-issuer=https://kubernetes.default.svc",
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
		"--token-auth-file=" + filepath.Join(dir, "tokens.csv"),
		"--allow-privileged=true",
		"--audit-policy-file=" + filepath.Join(dir, "audit.yaml"), "--audit-log-path=" + s.auditLog(), "--audit-log-mode=blocking",
	}, s.conf.reach()...)...)
	args = append(args, s.trust.flags(s.AccountsKey())...)
	args = append(args, s.conf.Flags...)
	s.mu.Lock()
	s.starts = append(s.starts, start{from: time.Now()})
	s.process = exec.Command(filepath.Join(s.conf.Bin, "kube-apiserver"), args...)
	s.process.Stdout, s.process.Stderr = s.log, s.log
	s.process.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	s.died = make(chan struct{})
	process, died, started := s.process, s.died, make(chan error)
	go func() {
		defer close(died)
		// The kernel sends Pdeathsig when the thread ends that started the process, and
		// threads do where goroutines that enter namespaces end on them.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := process.Start()
		if started <- err; err == nil {
			_ = process.Wait() // a killed process ends with an error
		}
	}()
	err := <-started
	if err != nil {
		s.process = nil
	}
	s.mu.Unlock()
	if err != nil {
		return err
	}
	for {
		err := s.ready(ctx)
		if err == nil {
			s.mu.Lock()
			s.starts[len(s.starts)-1].to = time.Now()
			s.mu.Unlock()
			return nil
		}
		select {
		case <-died:
			return fmt.Errorf("the API server ended at its start:\n%s", s.lastWords())
		case <-ctx.Done():
			return fmt.Errorf("the API server is not ready: %w\n%s", err, s.lastWords())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// ready asks whether the server serves.
func (s *Server) ready(ctx context.Context) error {
	if s.client == nil {
		pemText, err := os.ReadFile(s.CAFile) // the server makes it
		if err != nil {
			return err
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(pemText) {
			return fmt.Errorf("%s holds no certificate", s.CAFile)
		}
		s.client = &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}}}
	}
	_, err := s.Do(ctx, http.MethodGet, "/readyz", "", nil)
	return err
}

// Do makes one request as the administrator and returns the answer. A status that
// is not a success is an error.
func (s *Server) Do(ctx context.Context, method, path, contentType string, body []byte) ([]byte, error) {
	return s.DoAs(ctx, Token, "", method, path, contentType, body)
}

// DoAs is like Do with another token, and with a User-Agent unless that is empty.
func (s *Server) DoAs(ctx context.Context, token, agent, method, path, contentType string, body []byte) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, method, s.URL+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+token)
	if agent != "" {
		req.Header.Set("User-Agent", agent)
	}
	if contentType != "" {
		req.Header.Set("Content-Type", contentType)
	}
	resp, err := s.client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode/100 != 2 {
		err = fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, answer)
	}
	return answer, err
}

// Kill ends the API server as a crash would. Its etcd stays.
func (s *Server) Kill() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.process == nil {
		return
	}
	_ = s.process.Process.Kill() // it may have ended
	<-s.died
	s.process = nil
}

// PID is the process of the API server.
func (s *Server) PID() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.process == nil {
		return 0
	}
	return s.process.Process.Pid
}

// Etcd returns the datastore of the server.
func (s *Server) Etcd() *embedded.Server { return s.etcd }

// Close ends all.
func (s *Server) Close() {
	s.Kill()
	if s.client != nil {
		s.client.CloseIdleConnections()
	}
	if s.etcd != nil {
		s.etcd.Close()
	}
	if s.other != nil {
		s.other.close()
	}
	if s.log != nil {
		s.log.Close()
	}
}

// lastWords returns the end of the server's log.
func (s *Server) lastWords() string {
	text, err := os.ReadFile(s.log.Name())
	if err != nil {
		return err.Error()
	}
	return string(text[max(0, len(text)-2000):])
}

// Kubeconfig writes a kubeconfig of the administrator's for a server's address,
// the server's own if it is empty, and returns its name.
func (s *Server) Kubeconfig(url, token string) (string, error) {
	if token == "" {
		return "", errors.New("a kubeconfig needs a token")
	}
	f, err := os.CreateTemp(s.conf.Dir, "kubeconfig-*")
	if err != nil {
		return "", err
	}
	defer f.Close()
	_, err = f.WriteString(s.KubeconfigText(url, token))
	return f.Name(), err
}

// KubeconfigText is what such a file says.
func (s *Server) KubeconfigText(url, token string) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: %q, certificate-authority: %q}}]
users: [{name: u, user: {token: %q}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
`, cmp.Or(url, s.URL), s.CAFile, token)
}
