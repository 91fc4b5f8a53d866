// Package config is the daemon's own configuration: what one host needs to
// know before it can read the rest from the store.
//
// Every key has a default, so a host without any file works. Sources, strongest
// last: defaults, the file, environment variables (ROUTERD_ and the key in
// upper case with underscores: ROUTERD_DATASTORE_CAFILE), flags.
package config

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/go-viper/mapstructure/v2"
	"github.com/spf13/viper"

	"github.com/routerd/routerd/store"
)

// DefaultFile is read when no file is named; it need not exist.
const DefaultFile = "/etc/routerd/routerd.yaml"

// Config is the daemon's configuration.
type Config struct {
	// NodeName is this host's name in the store; empty: $NODENAME, else the
	// operating system's, in lower case.
	NodeName string `mapstructure:"nodeName"`
	// StateDir holds what must outlive a reboot: the embedded datastore, the
	// records of attached workloads.
	StateDir string `mapstructure:"stateDir"`
	// RunDir holds the sockets.
	RunDir string `mapstructure:"runDir"`
	// LogLevel is debug, info, warn or error.
	LogLevel string `mapstructure:"logLevel"`
	// LogFormat is text or json.
	LogFormat string `mapstructure:"logFormat"`

	Datastore Datastore `mapstructure:"datastore"`
	Address   Address   `mapstructure:"address"`
	// TunnelAddress is where hosts that cannot reach this host's own address
	// send tunnelled packets: auto (what such hosts see), none, or the public
	// address of a host behind 1:1 NAT; one of each family, separated by a comma.
	TunnelAddress string      `mapstructure:"tunnelAddress"`
	Reach         Reach       `mapstructure:"reach"`
	Probe         Probe       `mapstructure:"probe"`
	DefaultPool   DefaultPool `mapstructure:"defaultPool"`
	BGP           BGP         `mapstructure:"bgp"`
	Policy        Policy      `mapstructure:"policy"`
	Dataplane     Dataplane   `mapstructure:"dataplane"`
	Health        Health      `mapstructure:"health"`
	UI            UI          `mapstructure:"ui"`
	IPAM          IPAM        `mapstructure:"ipam"`
	CNI           CNI         `mapstructure:"cni"`
	// Kubernetes has an etcd datastore follow Kubernetes' API, which
	// datastore.kubernetes says how to reach.
	Kubernetes FollowKubernetes `mapstructure:"kubernetes"`
}

// FollowKubernetes configures what the daemon does on a node of Kubernetes whose datastore is
// etcd.
type FollowKubernetes struct {
	// Enabled has pods get what their objects in the API ask for, and the cluster's policies,
	// profiles, labels and Services brought into the datastore.
	Enabled bool `mapstructure:"enabled"`
}

// The kinds of [Datastore].
const (
	DatastoreEtcd       = "etcd"
	DatastoreKubernetes = "kubernetes"
)

// Datastore says where the store is.
type Datastore struct {
	// Kind is etcd or kubernetes; empty: what $DATASTORE_TYPE says (etcdv3 or
	// kubernetes), else etcd.
	Kind       string     `mapstructure:"kind"`
	Kubernetes Kubernetes `mapstructure:"kubernetes"`

	// Endpoints of an external etcd: https://host:2379, http://…, unix:///….
	// Empty: the daemon runs its own.
	Endpoints []string `mapstructure:"endpoints"`
	CAFile    string   `mapstructure:"caFile"`
	CertFile  string   `mapstructure:"certFile"`
	KeyFile   string   `mapstructure:"keyFile"`
	Username  string   `mapstructure:"username"`
	// PasswordFile holds the password of Username; a key of its own would put
	// the secret where configurations are shown.
	PasswordFile string        `mapstructure:"passwordFile"`
	DialTimeout  time.Duration `mapstructure:"dialTimeout"`
	Embedded     Embedded      `mapstructure:"embedded"`
}

// Kubernetes says how the API of Kubernetes is reached. In a pod nothing of it is
// needed.
type Kubernetes struct {
	// Kubeconfig is a file as kubectl's; empty: $KUBECONFIG, else the pod's service
	// account.
	Kubeconfig string `mapstructure:"kubeconfig"`
	// Context of the kubeconfig; empty: its current one.
	Context string `mapstructure:"context"`
	// APIGroup of Calico's custom resources, crd.projectcalico.org/v1 or
	// projectcalico.org/v3; empty: $CALICO_API_GROUP, else what the cluster has.
	APIGroup string `mapstructure:"apiGroup"`
	// Servers are further addresses of the cluster's API servers (HOST:PORT), beside
	// those that the cluster tells.
	Servers []string `mapstructure:"servers"`
	// Namespace is where routerd's own objects are, such as its Leases; empty: the
	// pod's, else kube-system.
	Namespace string `mapstructure:"namespace"`
}

// Embedded configures the daemon's own etcd.
type Embedded struct {
	// Listen is an address and port on which other hosts are served, with
	// certificates on both sides. Empty: only this host, on a unix socket.
	Listen string `mapstructure:"listen"`
	// Hosts are more names and addresses for the server's certificate.
	Hosts []string `mapstructure:"hosts"`
	// JoinPort is where new hosts ask for their certificates, on the address of
	// Listen, while a join token is outstanding.
	JoinPort int `mapstructure:"joinPort"`
	// PeerPort is where members of the datastore's cluster reach each other, on the
	// address of Listen or the host's own, once there are several.
	PeerPort int `mapstructure:"peerPort"`
}

// Address says how this host's addresses are found.
type Address struct {
	// IPv4 is first-found, interface=REGEX[,…], skip-interface=REGEX[,…],
	// can-reach=ADDRESS, cidr=CIDR[,…], kubernetes-internal-ip, or an address with
	// its prefix length; none: this host has no IPv4 address.
	IPv4 string `mapstructure:"ipv4"`
	// IPv6 is one of the same, or auto: first-found where there is no IPv4
	// address, else none.
	IPv6 string `mapstructure:"ipv6"`
}

// Reach configures how the underlay towards other hosts is measured.
type Reach struct {
	Enabled bool `mapstructure:"enabled"`
	// Interval is the time between probes of a peer when all is well. Behind a
	// port-translating NAT they hold the mapping open.
	Interval time.Duration `mapstructure:"interval"`
}

// Probe configures how tunnels to other hosts are measured.
type Probe struct {
	Enabled bool `mapstructure:"enabled"`
	// Port, of UDP and TCP, on which hosts answer inside their tunnels: the same
	// on all hosts.
	Port int `mapstructure:"port"`
}

// DefaultPool describes the pools that are made when the store holds none of
// their family.
type DefaultPool struct {
	CIDR          string `mapstructure:"cidr"` // "none": make no IPv4 pool
	Encapsulation string `mapstructure:"encapsulation"`
	BlockSize     int    `mapstructure:"blockSize"`

	CIDR6          string `mapstructure:"cidr6"` // "none": make no IPv6 pool
	Encapsulation6 string `mapstructure:"encapsulation6"`
	BlockSize6     int    `mapstructure:"blockSize6"`
}

// BGP configures the speaker. All else about BGP is in the store.
type BGP struct {
	Enabled bool `mapstructure:"enabled"`
	// SecretDir is where the passwords are that BGPPeers and the mesh refer to:
	// a file NAME/KEY for each.
	SecretDir string `mapstructure:"secretDir"`
	// DrainOnStop is how long a stop for good, as systemd tells it from a restart, waits at
	// most until workloads are sent nothing any more; 0: a stop is as a restart.
	DrainOnStop time.Duration `mapstructure:"drainOnStop"`
	Inject      Inject        `mapstructure:"inject"`
}

// Inject bounds which routes other programs on the host have it advertise.
type Inject struct {
	// Allow lists prefixes inside which they may; empty: whatever is no pool's, no node's and not the default route.
	Allow []string `mapstructure:"allow"`
	// MaxRoutes is how many an owner may have; 0: nobody may.
	MaxRoutes int `mapstructure:"maxRoutes"`
}

// Prefixes is Allow; [Config.Validate] has parsed it.
func (i Inject) Prefixes() []netip.Prefix {
	var out []netip.Prefix
	for _, s := range i.Allow {
		if p, err := netip.ParsePrefix(s); err == nil {
			out = append(out, p)
		}
	}
	return out
}

// Policy configures what judges packets. All else about it is in the store.
type Policy struct {
	// Enabled: network policy and the translation of addresses (natOutgoing)
	// have effect on this host.
	Enabled bool `mapstructure:"enabled"`
	// AutoHostEndpoints gives every Node a host endpoint of all its interfaces.
	AutoHostEndpoints bool `mapstructure:"autoHostEndpoints"`
	// MaxConnectionsPerWorkload bounds the tracked connections that a workload opens;
	// 0: any number.
	MaxConnectionsPerWorkload int `mapstructure:"maxConnectionsPerWorkload"`
	// Offload has established flows of workloads take the kernel's flowtable, past the
	// rules, where it has one.
	Offload bool `mapstructure:"offload"`
	// LogRate bounds how many packets a second each rule logs.
	LogRate int `mapstructure:"logRate"`
	// AllowHostPortsFromWorkloads lets workloads reach BGP's and the probes' ports
	// of the cluster's hosts.
	AllowHostPortsFromWorkloads bool `mapstructure:"allowHostPortsFromWorkloads"`
	// AllowTunnelsFromAnywhere has this host decapsulate tunnels' packets from whomever
	// they come, not from hosts of the cluster alone.
	AllowTunnelsFromAnywhere bool `mapstructure:"allowTunnelsFromAnywhere"`
}

// Dataplane configures the writer to the kernel.
type Dataplane struct {
	// RouteProtocol marks routes and next hops as ours.
	RouteProtocol int `mapstructure:"routeProtocol"`
	// FullCheckInterval is how often everything is compared with the kernel.
	FullCheckInterval time.Duration `mapstructure:"fullCheckInterval"`
	// SysctlDir is where the kernel's settings are, of which those below net are
	// written: a container may have them elsewhere than in /proc/sys.
	SysctlDir string `mapstructure:"sysctlDir"`
}

// Health configures the HTTP endpoint of health and metrics.
type Health struct {
	// Listen is an address and port; empty: no endpoint.
	Listen string `mapstructure:"listen"`
	// Profiles serves Go's profiles of the daemon there too.
	Profiles bool `mapstructure:"profiles"`
}

// UI configures the page for an operator's browser.
type UI struct {
	// Listen is a loopback address and port, or unix:///PATH; empty: there is no page.
	Listen string `mapstructure:"listen"`
}

// Address splits Listen as [net.Listen] takes it.
func (u UI) Address() (network, address string, err error) {
	if path, ok := strings.CutPrefix(u.Listen, "unix://"); ok {
		if !filepath.IsAbs(path) || filepath.Clean(path) != path || len(path) > maxUISocket {
			return "", "", fmt.Errorf("want unix:// and the absolute path of a socket, of at most %d bytes, such as unix:///run/routerd/ui.sock", maxUISocket)
		}
		return "unix", path, nil
	}
	a, err := netip.ParseAddrPort(u.Listen)
	if err != nil || a.Port() == 0 || !a.Addr().Unmap().IsLoopback() {
		return "", "", errors.New("want a loopback address and a port, such as 127.0.0.1:7749, or a socket, such as unix:///run/routerd/ui.sock; other machines reach either by ssh -L")
	}
	return "tcp", u.Listen, nil
}

// maxUISocket is what the kernel allows for the path of a socket (107 bytes) without what package rpc adds while it
// makes one.
const maxUISocket = 88

// IPAM configures how this host takes addresses.
type IPAM struct {
	Reserve Reserve `mapstructure:"reserve"`
	// LeakGracePeriod is how long an address must have belonged to nobody before
	// it is freed; 0: leaks stay.
	LeakGracePeriod time.Duration `mapstructure:"leakGracePeriod"`
	// UsePodCIDR keeps this host's addresses within spec.podCIDRs of its Node, and
	// has those of other Nodes routed to them.
	UsePodCIDR bool `mapstructure:"usePodCIDR"`
	// HostLocalDir is where the CNI plugin host-local keeps what it gave pods of
	// another network on this host. With UsePodCIDR none of it is given again.
	HostLocalDir string `mapstructure:"hostLocalDir"`
}

// Reserve bounds how many addresses of a pool and family the host holds ready,
// so that workloads start without waiting for the datastore.
type Reserve struct {
	// Min is how many when nothing starts; 0: none.
	Min int `mapstructure:"min"`
	// Max is how many while many workloads start.
	Max int `mapstructure:"max"`
}

// maxReserve is the limit of ipam.reserve.max: a fifth of what a host may hold
// with the default limit of blocks.
const maxReserve = 256

// CNI configures what install-cni writes and what pods get.
type CNI struct {
	NetworkName string `mapstructure:"networkName"`
	// Version of the CNI specification that the conflist names: 1.0.0 or 1.1.0.
	Version string `mapstructure:"version"`
	// Manage has the daemon do what install-cni does, once workloads can be attached,
	// and again when something removes or changes it.
	Manage  bool   `mapstructure:"manage"`
	BinDir  string `mapstructure:"binDir"`
	ConfDir string `mapstructure:"confDir"`
	// MTU of pods in bytes; 0: what the pools' encapsulations leave.
	MTU int `mapstructure:"mtu"`
	// AssignIPv4 and AssignIPv6 say which addresses pods get.
	AssignIPv4 bool `mapstructure:"assignIPv4"`
	AssignIPv6 bool `mapstructure:"assignIPv6"`
}

// Default returns the configuration of a host without any.
func Default() Config {
	return Config{
		StateDir:  "/var/lib/routerd",
		RunDir:    "/run/routerd",
		LogLevel:  "info",
		LogFormat: "text",
		Datastore: Datastore{DialTimeout: 10 * time.Second, Embedded: Embedded{JoinPort: 7748, PeerPort: 2380}},
		Address:   Address{IPv4: "first-found", IPv6: "auto"},

		TunnelAddress: TunnelAddressAuto,
		Reach:         Reach{Enabled: true, Interval: 15 * time.Second},
		Probe:         Probe{Enabled: true, Port: 7747},
		DefaultPool: DefaultPool{
			CIDR: "192.168.0.0/16", Encapsulation: string(store.VXLANCrossSubnet), BlockSize: 26,
			CIDR6: none, Encapsulation6: string(store.VXLANCrossSubnet), BlockSize6: 122,
		},
		BGP:       BGP{Enabled: true, SecretDir: "/etc/routerd/secrets", DrainOnStop: 30 * time.Second, Inject: Inject{Allow: []string{}, MaxRoutes: 1000}},
		Policy:    Policy{Enabled: true, LogRate: 20},
		Dataplane: Dataplane{RouteProtocol: 77, FullCheckInterval: 90 * time.Second, SysctlDir: "/proc/sys"},
		IPAM:      IPAM{Reserve: Reserve{Min: 32, Max: 128}, LeakGracePeriod: 15 * time.Minute, HostLocalDir: "/var/lib/cni/networks"},
		CNI:       CNI{NetworkName: "routerd", Version: "1.0.0", BinDir: "/opt/cni/bin", ConfDir: "/etc/cni/net.d", AssignIPv4: true},
	}
}

// maxConnections is more than the kernel tracks.
const maxConnections = 1 << 30

// maxLogRate is more than anybody reads, and keeps the cost of a flood bounded.
const maxLogRate = 10_000

// The words that [Config.TunnelAddress] may be.
const (
	TunnelAddressAuto = "auto"
	TunnelAddressNone = "none"
)

// maxDrain is longer than anybody waits for a service to stop.
const maxDrain = time.Hour

// maxInjected bounds the routes of an owner: all of an owner's are judged and kept at once.
const maxInjected = 10_000

// Load reads the configuration. An empty path means [DefaultFile] if it
// exists. The result is valid.
func Load(path string) (Config, error) {
	v := viper.New()
	v.SetConfigType("yaml")
	v.SetEnvPrefix("ROUTERD")
	v.SetEnvKeyReplacer(strings.NewReplacer(".", "_"))
	for _, k := range Keys() {
		if err := v.BindEnv(k); err != nil {
			return Config{}, fmt.Errorf("bind the environment to %s: %w", k, err)
		}
	}
	file := path
	if file == "" {
		file = DefaultFile
	}
	v.SetConfigFile(file)
	if err := v.ReadInConfig(); err != nil {
		if path != "" || !errors.Is(err, fs.ErrNotExist) {
			return Config{}, fmt.Errorf("read configuration %s: %w", file, err)
		}
	}
	c := Default()
	err := v.Unmarshal(&c, func(d *mapstructure.DecoderConfig) {
		d.ErrorUnused = true
		d.DecodeHook = mapstructure.ComposeDecodeHookFunc(mapstructure.StringToTimeDurationHookFunc(), mapstructure.StringToSliceHookFunc(","))
	})
	if err != nil {
		return Config{}, fmt.Errorf("configuration %s: %w (known keys: %s)", file, err, strings.Join(Keys(), ", "))
	}
	if err := c.Datastore.fromCalico(os.Getenv); err != nil {
		return Config{}, err
	}
	if err := c.Validate(); err != nil {
		return Config{}, fmt.Errorf("configuration %s: %w", file, err)
	}
	return c, nil
}

// fromCalico takes the kind of the datastore from the variable of Calico's users,
// where nothing else names it.
func (d *Datastore) fromCalico(getenv func(string) string) error {
	if d.Kind != "" || len(d.Endpoints) > 0 || d.Embedded.Listen != "" {
		return nil
	}
	switch t := getenv("DATASTORE_TYPE"); t {
	case "", "etcdv3":
	case DatastoreKubernetes:
		d.Kind = DatastoreKubernetes
	default:
		return fmt.Errorf("DATASTORE_TYPE: %q: want etcdv3 or kubernetes", t)
	}
	return nil
}

// Keys lists every key in the file's dotted form, sorted.
func Keys() []string {
	var keys []string
	var walk func(t reflect.Type, prefix string)
	walk = func(t reflect.Type, prefix string) {
		for f := range t.Fields() {
			name := prefix + f.Tag.Get("mapstructure")
			if f.Type.Kind() == reflect.Struct {
				walk(f.Type, name+".")
				continue
			}
			keys = append(keys, name)
		}
	}
	walk(reflect.TypeFor[Config](), "")
	slices.Sort(keys)
	return keys
}

// Validate checks every value and says which are allowed. It reports all
// faults at once.
func (c Config) Validate() error {
	var errs []error
	bad := func(key string, value any, want string) {
		errs = append(errs, fmt.Errorf("%s: %q: %s", key, fmt.Sprint(value), want))
	}
	if c.NodeName != "" && !ValidNodeName(c.NodeName) {
		bad("nodeName", c.NodeName, "want lower-case letters, digits, - and ., at most 253 characters")
	}
	for key, dir := range map[string]string{"stateDir": c.StateDir, "runDir": c.RunDir, "dataplane.sysctlDir": c.Dataplane.SysctlDir, "ipam.hostLocalDir": c.IPAM.HostLocalDir} {
		if !filepath.IsAbs(dir) {
			bad(key, dir, "want an absolute path")
		}
	}
	// The kernel's sockaddr_un holds 107 bytes and a zero.
	if longest := len(filepath.Join(c.RunDir, "routerd.sock")); longest > 107 {
		bad("runDir", c.RunDir, fmt.Sprintf("the paths of the sockets in it are up to %d bytes long, and the kernel allows 107", longest))
	}
	if n := c.Policy.MaxConnectionsPerWorkload; n < 0 || n > maxConnections {
		bad("policy.maxConnectionsPerWorkload", n, fmt.Sprintf("want 0 to %d; 0: any number", maxConnections))
	}
	if n := c.BGP.Inject.MaxRoutes; n < 0 || n > maxInjected {
		bad("bgp.inject.maxRoutes", n, fmt.Sprintf("want 0 to %d; 0: no routes may be injected", maxInjected))
	}
	if d := c.BGP.DrainOnStop; d < 0 || d > maxDrain {
		bad("bgp.drainOnStop", d, fmt.Sprintf("want 0s to %s; 0s: a stop is as a restart", maxDrain))
	}
	for _, s := range c.BGP.Inject.Allow {
		if p, err := netip.ParsePrefix(s); err != nil || p != p.Masked() {
			bad("bgp.inject.allow", s, "want prefixes without bits beyond their length, such as 203.0.113.0/24")
		}
	}
	if c.Policy.LogRate < 1 || c.Policy.LogRate > maxLogRate {
		bad("policy.logRate", c.Policy.LogRate, fmt.Sprintf("want 1 to %d packets a second", maxLogRate))
	}
	if err := new(slog.Level).UnmarshalText([]byte(c.LogLevel)); err != nil {
		bad("logLevel", c.LogLevel, "want debug, info, warn or error")
	}
	if c.LogFormat != "text" && c.LogFormat != "json" {
		bad("logFormat", c.LogFormat, "want text or json")
	}
	c.Datastore.validate(c.Kubernetes.Enabled, bad)
	for key, m := range map[string]string{"address.ipv4": c.Address.IPv4, "address.ipv6": c.Address.IPv6} {
		if m == "kubernetes-internal-ip" && c.Datastore.Kind != DatastoreKubernetes && !c.Kubernetes.Enabled {
			bad(key, m, "only a Node of Kubernetes has that address: set datastore.kind to kubernetes, or with a datastore in etcd kubernetes.enabled to true, or take another method")
		}
	}
	c.DefaultPool.validate(bad)
	if p := c.Dataplane.RouteProtocol; p < 5 || p > 255 || slices.Contains(takenProtocols(), p) {
		bad("dataplane.routeProtocol", p, "want a number from 5 to 255 that no other routing software uses (77 is routerd's)")
	}
	if v := c.TunnelAddress; v != TunnelAddressAuto && v != TunnelAddressNone {
		if addrs, err := store.ParseTunnelAddresses(v); err != nil || len(addrs) == 0 {
			bad("tunnelAddress", v, "want auto, none, or an address such as 198.51.100.7; one of each family, separated by a comma")
		}
	}
	if p := c.Probe.Port; p < 1 || p > 65535 {
		bad("probe.port", p, "want a port, 1 to 65535; the same on all hosts (7747 is routerd's)")
	}
	// Translators commonly forget a UDP mapping after 30 s without a packet.
	if i := c.Reach.Interval; i < time.Second || i > 25*time.Second {
		bad("reach.interval", i, "want 1s to 25s")
	}
	if c.Dataplane.FullCheckInterval < time.Second {
		bad("dataplane.fullCheckInterval", c.Dataplane.FullCheckInterval, "want at least 1s")
	}
	for key, v := range map[string]string{"health.listen": c.Health.Listen, "datastore.embedded.listen": c.Datastore.Embedded.Listen} {
		if _, err := netip.ParseAddrPort(v); v != "" && err != nil {
			bad(key, v, "want ADDRESS:PORT, such as 127.0.0.1:9099")
		}
	}
	if a, err := netip.ParseAddrPort(c.Health.Listen); c.Health.Profiles && (err != nil || !a.Addr().IsLoopback()) {
		bad("health.profiles", true, fmt.Sprintf("profiles are served on a loopback address only, and health.listen is %q: set it to one such as 127.0.0.1:9099", c.Health.Listen))
	}
	if _, _, err := c.UI.Address(); c.UI.Listen != "" && err != nil {
		bad("ui.listen", c.UI.Listen, err.Error())
	}
	if r := c.IPAM.Reserve; r.Min < 0 || r.Min > r.Max || r.Max > maxReserve {
		bad("ipam.reserve.min", r.Min, fmt.Sprintf("want 0 (no reserve) to ipam.reserve.max, which is %d and may be %d at most", r.Max, maxReserve))
	}
	if g := c.IPAM.LeakGracePeriod; g != 0 && g < time.Minute {
		bad("ipam.leakGracePeriod", g, "want 0 (leaks stay) or at least 1m: a container that is being made has its address before anything else tells of it")
	}
	if c.CNI.MTU != 0 && (c.CNI.MTU < 576 || c.CNI.MTU > 65535) {
		bad("cni.mtu", c.CNI.MTU, "want 0 (computed) or 576 to 65535 bytes")
	}
	if !c.CNI.AssignIPv4 && !c.CNI.AssignIPv6 {
		bad("cni.assignIPv4", false, "cni.assignIPv6 is false too, and a workload needs an address: set one of them to true")
	}
	if v := c.CNI.Version; v != "1.0.0" && v != "1.1.0" {
		bad("cni.version", v, "want 1.0.0, which every runtime reads, or 1.1.0, with which those that can ask STATUS and GC")
	}
	if c.CNI.NetworkName == "" {
		bad("cni.networkName", "", "want a name")
	}
	slices.SortFunc(errs, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return errors.Join(errs...)
}

func (k Kubernetes) validate(bad func(key string, value any, want string)) {
	for _, s := range k.Servers {
		if host, port, err := net.SplitHostPort(s); err != nil || host == "" || port == "" {
			bad("datastore.kubernetes.servers", s, "want HOST:PORT, such as 10.0.0.1:6443")
		}
	}
}

// validate reports what makes no sense. follows says that an etcd datastore is to follow
// Kubernetes' API.
func (d Datastore) validate(follows bool, bad func(key string, value any, want string)) {
	switch d.Kind {
	case "", DatastoreEtcd:
		k := d.Kubernetes
		if !follows && (k.Kubeconfig != "" || k.Context != "" || k.APIGroup != "" || len(k.Servers) > 0 || k.Namespace != "") {
			bad("datastore.kind", d.Kind, "datastore.kubernetes is set: want kubernetes, or kubernetes.enabled beside etcd, or remove it")
		}
		if follows && k.APIGroup != "" {
			bad("datastore.kubernetes.apiGroup", k.APIGroup, "Calico's resources are in etcd: remove it")
		}
		k.validate(bad)
	case DatastoreKubernetes:
		if follows {
			bad("kubernetes.enabled", true, "datastore.kind is kubernetes, and so the datastore is the API itself: remove it")
		}
		if len(d.Endpoints) > 0 {
			bad("datastore.endpoints", strings.Join(d.Endpoints, ","), "datastore.kind is kubernetes, and these are of etcd; remove one of them")
		}
		if d.Embedded.Listen != "" {
			bad("datastore.embedded.listen", d.Embedded.Listen, "datastore.kind is kubernetes, and no datastore is embedded then; remove one of them")
		}
		d.Kubernetes.validate(bad)
		if g := d.Kubernetes.APIGroup; !slices.Contains([]string{"", "crd.projectcalico.org/v1", "projectcalico.org/v3"}, g) {
			bad("datastore.kubernetes.apiGroup", g, "want crd.projectcalico.org/v1 or projectcalico.org/v3, or nothing to take what the cluster has")
		}
	default:
		bad("datastore.kind", d.Kind, "want etcd or kubernetes")
	}
	for _, e := range d.Endpoints {
		if !strings.HasPrefix(e, "https://") && !strings.HasPrefix(e, "http://") && !strings.HasPrefix(e, "unix://") {
			bad("datastore.endpoints", e, "want https://HOST:PORT, http://HOST:PORT or unix:///PATH")
		}
	}
	if len(d.Endpoints) > 0 && d.Embedded.Listen != "" {
		bad("datastore.embedded.listen", d.Embedded.Listen, "the embedded datastore is not used when datastore.endpoints is set; remove one of them")
	}
	if (d.CertFile == "") != (d.KeyFile == "") {
		bad("datastore.certFile", d.CertFile, "certFile and keyFile go together")
	}
	if (d.Username == "") != (d.PasswordFile == "") {
		bad("datastore.username", d.Username, "username and passwordFile go together")
	}
	if p := d.Embedded.JoinPort; p < 1 || p > 65535 {
		bad("datastore.embedded.joinPort", p, "want a port, 1 to 65535 (7748 is routerd's)")
	}
	if at, err := netip.ParseAddrPort(d.Embedded.Listen); err == nil && int(at.Port()) == d.Embedded.JoinPort {
		bad("datastore.embedded.joinPort", d.Embedded.JoinPort, "datastore.embedded.listen has that port; choose another one for one of them")
	}
	if p := d.Embedded.PeerPort; p < 1 || p > 65535 {
		bad("datastore.embedded.peerPort", p, "want a port, 1 to 65535 (2380 is etcd's)")
	}
	if at, err := netip.ParseAddrPort(d.Embedded.Listen); d.Embedded.PeerPort == d.Embedded.JoinPort || err == nil && int(at.Port()) == d.Embedded.PeerPort {
		bad("datastore.embedded.peerPort", d.Embedded.PeerPort, "datastore.embedded.listen or joinPort has that port; choose another one for one of them")
	}
	if d.DialTimeout < 100*time.Millisecond {
		bad("datastore.dialTimeout", d.DialTimeout, "want at least 100ms, with its unit, such as 10s")
	}
}

func (p DefaultPool) validate(bad func(key string, value any, want string)) {
	validatePool(bad, "", poolLimits{"IPv4", "192.168.0.0/16", 32, 20}, p.CIDR, p.Encapsulation, p.BlockSize)
	validatePool(bad, "6", poolLimits{"IPv6", "fd00:10:244::/48", 128, 116}, p.CIDR6, p.Encapsulation6, p.BlockSize6)
}

// none stands where no pool is wanted.
const none = "none"

// poolLimits is what a family allows.
type poolLimits struct {
	family, example string
	bits            int // of an address
	minBlock        int // the shortest prefix of a block
}

// validatePool checks the keys of one pool, which end in suffix.
func validatePool(bad func(key string, value any, want string), suffix string, l poolLimits, text, encapsulation string, blockSize int) {
	if text == none {
		return
	}
	key := func(k string) string { return "defaultPool." + k + suffix }
	cidr, err := netip.ParsePrefix(text)
	switch {
	case err != nil:
		bad(key("cidr"), text, "want a CIDR, such as "+l.example+", or none")
	case cidr != cidr.Masked():
		bad(key("cidr"), text, "host bits are set; want "+cidr.Masked().String())
	case cidr.Addr().BitLen() != l.bits:
		bad(key("cidr"), text, "want an "+l.family+" CIDR")
	case blockSize < l.minBlock || blockSize > l.bits:
		bad(key("blockSize"), blockSize, fmt.Sprintf("want %d to %d", l.minBlock, l.bits))
	case cidr.Bits() > blockSize:
		bad(key("blockSize"), blockSize, "a block cannot be larger than the pool "+text)
	}
	if _, err := store.ParseEncapsulation(encapsulation); err != nil {
		bad(key("encapsulation"), encapsulation, fmt.Sprintf("want one of %v", store.Encapsulations()))
	}
}

// takenProtocols are numbers that others put on their routes: the daemon would
// take their routes for its own leftovers, or they ours. RTPROT_* of
// linux/rtnetlink.h, FRR's tools/etc/iproute2/rt_protos.d, Calico's 80.
func takenProtocols() []int {
	return []int{8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 42, 80, 84, 99, 186, 187, 188, 189, 190, 191, 192, 193, 194, 195, 196, 197, 198}
}

// ValidNodeName reports whether a node may be called so.
func ValidNodeName(s string) bool {
	return len(s) <= 253 && regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`).MatchString(s)
}

// Name returns this host's name in the store.
func (c Config) Name() (string, error) {
	if c.NodeName != "" {
		return c.NodeName, nil
	}
	name := os.Getenv("NODENAME")
	if name == "" {
		host, err := os.Hostname()
		if err != nil {
			return "", fmt.Errorf("find this host's name: %w; set nodeName", err)
		}
		name = strings.ToLower(host)
	}
	if !ValidNodeName(name) {
		return "", fmt.Errorf("this host's name %q cannot be a node's name: set nodeName, of lower-case letters, digits, dashes and dots", name)
	}
	return name, nil
}

// Own reports whether the datastore is this daemon's own.
func (d Datastore) Own() bool { return d.Kind != DatastoreKubernetes && len(d.Endpoints) == 0 }

// Password reads the datastore's password.
func (d Datastore) Password() (string, error) {
	if d.PasswordFile == "" {
		return "", nil
	}
	b, err := os.ReadFile(d.PasswordFile)
	if err != nil {
		return "", fmt.Errorf("datastore.passwordFile: %w", err)
	}
	return strings.TrimRight(string(b), "\r\n"), nil
}

// The sockets, below RunDir.
const (
	OperatorSocketName = "routerd.sock"
	CNISocketName      = "cni.sock"
	EtcdSocketName     = "etcd.sock"
)

// OperatorSocket is where routerctl finds the daemon.
func (c Config) OperatorSocket() string { return filepath.Join(c.RunDir, OperatorSocketName) }

// CNISocket is where the CNI plugin finds the daemon.
func (c Config) CNISocket() string { return filepath.Join(c.RunDir, CNISocketName) }

// EtcdSocket is where the embedded datastore listens.
func (c Config) EtcdSocket() string { return filepath.Join(c.RunDir, EtcdSocketName) }

// EtcdDir holds the embedded datastore's data.
func (c Config) EtcdDir() string { return filepath.Join(c.StateDir, "etcd", "data") }

// PKIDir holds the certificates of the embedded datastore.
func (c Config) PKIDir() string { return filepath.Join(c.StateDir, "etcd", "pki") }

// ClientPKIDir holds what this host reaches another host's datastore by, since it has
// joined. It is below StateDir because the daemon may write nothing elsewhere.
func (c Config) ClientPKIDir() string { return filepath.Join(c.StateDir, "pki") }

// WorkloadDir holds the records of attached workloads.
func (c Config) WorkloadDir() string { return filepath.Join(c.StateDir, "workloads") }
