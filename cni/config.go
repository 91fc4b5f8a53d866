package cni

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/types"
)

// Config is the network configuration that the runtime passes on the standard
// input. Fields that are not known are ignored, as the CNI specification
// wants (section 1): they may be another plugin's or a later version's.
type Config struct {
	CNIVersion string `json:"cniVersion"`
	Name       string `json:"name"`
	Type       string `json:"type"`

	Socket string `json:"socket"` // of the daemon; default [DefaultSocket]
	MTU    int    `json:"mtu"`    // bytes; 0: the daemon's choice

	IPAM IPAMConfig `json:"ipam"`

	ContainerSettings struct {
		AllowIPForwarding bool `json:"allow_ip_forwarding"`
	} `json:"container_settings"`

	// FeatureControl are the gates of annotations (see [Annotations]).
	FeatureControl struct {
		IPAddrsNoIPAM bool `json:"ip_addrs_no_ipam"`
		FloatingIPs   bool `json:"floating_ips"`
	} `json:"feature_control"`

	// IncludeDefaultRoutes says that IPAM.Routes come beside the default route,
	// and not instead of it.
	IncludeDefaultRoutes bool `json:"include_default_routes"`

	Nodename    string `json:"nodename"`      // when set, it must be this host's
	LogLevel    string `json:"log_level"`     // of what goes to the standard error and LogFilePath; default warning
	LogFilePath string `json:"log_file_path"` // empty: no file
	DeviceType  string `json:"device_type"`   // veth

	// Of the plugin bridge, when this is its IPAM plugin.
	Bridge           string `json:"bridge"`
	IsGateway        bool   `json:"isGateway"`
	IsDefaultGateway bool   `json:"isDefaultGateway"`

	calicoFields

	AddTimeoutSeconds int `json:"add_timeout_seconds"` // for ADD, CHECK and GC; 0: 60
	DelTimeoutSeconds int `json:"del_timeout_seconds"` // 0: 30

	StatusTimeoutSeconds int `json:"status_timeout_seconds"` // 0: 20

	// Addresses that the runtime asks for, by either convention.
	Args struct {
		CNI struct {
			IPs         []string          `json:"ips"`
			MAC         string            `json:"mac"`
			Annotations map[string]string `json:"annotations"`
		} `json:"cni"`
	} `json:"args"`
	RuntimeConfig struct {
		IPs         []string          `json:"ips"`
		MAC         string            `json:"mac"`
		Annotations map[string]string `json:"io.kubernetes.cri.pod-annotations"` // as containerd's CRI passes them
	} `json:"runtimeConfig"`

	// Only for GC.
	ValidAttachments []types.GCAttachment `json:"cni.dev/valid-attachments"`
}

// IPAMConfig says which addresses a container gets.
type IPAMConfig struct {
	Type       string   `json:"type"`        // routerd-cni or calico-ipam; another: that plugin gives the addresses
	AssignIPv4 Switch   `json:"assign_ipv4"` // default true
	AssignIPv6 Switch   `json:"assign_ipv6"` // default false
	IPv4Pools  []string `json:"ipv4_pools"`  // names or CIDRs
	IPv6Pools  []string `json:"ipv6_pools"`

	// NamespaceLabels are those of the containers' namespace, for pools with a
	// namespaceSelector.
	NamespaceLabels map[string]string `json:"namespace_labels"`

	Subnet string         `json:"subnet"` // usePodCidr: of the Node's pod CIDRs, in place of host-local
	Routes []*types.Route `json:"routes"`

	// Only where another plugin makes the interface.
	Gateway      string `json:"gateway"`       // auto (the default: one of the block), none, or an address
	PrefixLength int    `json:"prefix_length"` // of addresses; 0: their block's
}

// Switch is a truth value that configurations write as a string, or as a JSON
// truth value; empty where it is not given.
type Switch string

// UnmarshalJSON implements [json.Unmarshaler].
func (s *Switch) UnmarshalJSON(b []byte) error {
	switch v := strings.ToLower(strings.Trim(string(b), `"`)); v {
	case "true", "false":
		*s = Switch(v)
	case "", "null":
		*s = ""
	default:
		return fmt.Errorf("%s: want \"true\" or \"false\"", b)
	}
	return nil
}

// On returns the value of s, or deflt where it is not given.
func (s Switch) On(deflt bool) bool {
	if s == "" {
		return deflt
	}
	return s == "true"
}

// The range of MTUs that the kernel takes for a veth, in bytes.
const (
	minMTU = 68
	maxMTU = 65535
)

// ParseConfig reads a network configuration. Errors are CNI errors: code 6
// where the JSON is not of the right form, 7 where a value is not allowed;
// they name the field.
func ParseConfig(b []byte) (*Config, error) {
	c := &Config{Socket: DefaultSocket}
	if err := json.Unmarshal(b, c); err != nil {
		var wrong *json.UnmarshalTypeError
		if errors.As(err, &wrong) && wrong.Field != "" {
			err = fmt.Errorf("field %s: want %s, got a JSON %s", wrong.Field, kindName(wrong.Type.Kind().String()), wrong.Value)
		}
		return nil, types.NewError(types.ErrDecodingFailure, "network configuration: "+err.Error(), "")
	}
	if err := c.check(); err != nil {
		return nil, types.NewError(types.ErrInvalidNetworkConfig, "network configuration: "+err.Error(), "")
	}
	return c, nil
}

// kindName puts a Go kind into the words of JSON.
func kindName(kind string) string {
	switch kind {
	case "int":
		return "a whole number"
	case "bool":
		return "true or false"
	case "slice":
		return "a list"
	case "struct":
		return "an object"
	}
	return "a " + kind
}

func (c *Config) check() error {
	switch {
	case c.Name == "":
		return errors.New("field name is missing")
	case !filepath.IsAbs(c.Socket):
		return fmt.Errorf("field socket: %q is not an absolute path; the default is %s", c.Socket, DefaultSocket)
	case c.MTU != 0 && (c.MTU < minMTU || c.MTU > maxMTU):
		return fmt.Errorf("field mtu: %d is not from %d to %d, or 0 for the daemon's choice", c.MTU, minMTU, maxMTU)
	case strings.ContainsRune(c.IPAM.Type, filepath.Separator):
		return fmt.Errorf("field ipam.type: %q is not the name of a plugin", c.IPAM.Type)
	case c.DeviceType != "" && c.DeviceType != "veth":
		return fmt.Errorf("field device_type: %q is not veth, the one that routerd makes", c.DeviceType)
	case c.LogFilePath != "" && !filepath.IsAbs(c.LogFilePath):
		return fmt.Errorf("field log_file_path: %q is not an absolute path", c.LogFilePath)
	case c.IPAM.PrefixLength < 0 || c.IPAM.PrefixLength > 128:
		return fmt.Errorf("field ipam.prefix_length: %d is not from 1 to 128, or 0 for the block's", c.IPAM.PrefixLength)
	case c.IPAM.own() && len(c.IPAM.Routes) > 0 && !c.IncludeDefaultRoutes && (c.Type == PluginType || c.Type == "calico"):
		return errors.New("field ipam.routes: routes instead of the default route are not supported; remove them, or set include_default_routes to true: " +
			"then they go the default route's way, as all does")
	case c.IPAM.own() && !c.IPAM.AssignIPv4.On(true) && !c.IPAM.AssignIPv6.On(false):
		return errors.New(`fields ipam.assign_ipv4 and ipam.assign_ipv6 are both "false": a container needs an address`)
	case c.AddTimeoutSeconds < 0:
		return fmt.Errorf("field add_timeout_seconds: %d is negative", c.AddTimeoutSeconds)
	case c.DelTimeoutSeconds < 0:
		return fmt.Errorf("field del_timeout_seconds: %d is negative", c.DelTimeoutSeconds)
	case c.StatusTimeoutSeconds < 0:
		return fmt.Errorf("field status_timeout_seconds: %d is negative", c.StatusTimeoutSeconds)
	}
	_, err := c.level()
	return err
}

// own reports whether routerd gives the addresses, rather than another IPAM
// plugin.
func (c *IPAMConfig) own() bool {
	return c.Type == "" || c.Type == PluginType || c.Type == "calico-ipam" || c.podCIDR()
}

// podCIDR reports whether the addresses are to be of the pod CIDRs of this host's Node.
// Of them the daemon knows, and not host-local, which Calico's plugin tells them.
func (c *IPAMConfig) podCIDR() bool { return c.Subnet == "usePodCidr" }

// asIPAM reports whether the plugin, executed under the name program, is the
// IPAM plugin of another, which makes the interface. Both get the same
// configuration (CNI specification 1.1, section 4).
func (c *Config) asIPAM(program string) bool {
	switch program {
	case c.Type:
		return false
	case c.IPAM.Type:
		return true
	}
	return c.IPAM.Type != "" && c.IPAM.own() && c.Type != "" && c.Type != PluginType && c.Type != "calico"
}

// level returns the level of the plugin's log. The names are Calico's.
func (c *Config) level() (slog.Level, error) {
	switch strings.ToLower(c.LogLevel) {
	case "debug", "trace":
		return slog.LevelDebug, nil
	case "info":
		return slog.LevelInfo, nil
	case "", "warning", "warn":
		return slog.LevelWarn, nil
	case "error", "fatal", "panic", "none":
		return slog.LevelError, nil
	}
	return 0, fmt.Errorf("field log_level: %q is not debug, info, warning or error", c.LogLevel)
}

func (c *Config) addTimeout() time.Duration { return seconds(c.AddTimeoutSeconds, DefaultAddTimeout) }

func (c *Config) delTimeout() time.Duration { return seconds(c.DelTimeoutSeconds, DefaultDelTimeout) }

func (c *Config) statusTimeout() time.Duration {
	return seconds(c.StatusTimeoutSeconds, DefaultStatusTimeout)
}

func seconds(n int, deflt time.Duration) time.Duration {
	if n == 0 {
		return deflt
	}
	return time.Duration(n) * time.Second
}

// Args are the key-value pairs of CNI_ARGS. The field names are the keys.
type Args struct {
	types.CommonArgs
	IP                         types.UnmarshallableString
	MAC                        types.UnmarshallableString
	K8S_POD_NAMESPACE          types.UnmarshallableString //nolint:revive // the key's name
	K8S_POD_NAME               types.UnmarshallableString //nolint:revive // the key's name
	K8S_POD_INFRA_CONTAINER_ID types.UnmarshallableString //nolint:revive // the key's name
	K8S_POD_UID                types.UnmarshallableString //nolint:revive // the key's name

	annotations map[string]string // those among them, which are no names of Go
}

// ParseArgs reads CNI_ARGS: KEY=VALUE pairs with semicolons between them. A
// key that is not known is an error unless IgnoreUnknown=1 is among them.
// Annotations may be among them (see [Annotations]).
// Errors are CNI errors of code 4.
func ParseArgs(s string) (*Args, error) {
	a := new(Args)
	rest, err := a.takeAnnotations(strings.TrimSuffix(s, ";"))
	if err == nil {
		err = types.LoadArgs(rest, a)
	}
	if err == nil && a.K8S_POD_NAME == "" && a.K8S_POD_NAMESPACE != "" {
		err = errors.New("K8S_POD_NAMESPACE is there without K8S_POD_NAME: give both or neither")
	}
	if err != nil {
		return nil, types.NewError(types.ErrInvalidEnvironmentVariables, fmt.Sprintf("CNI_ARGS %q: %v", s, err), "")
	}
	return a, nil
}

// requestedIP reads an address that somebody asks for.
func requestedIP(s string) (netip.Addr, error) {
	// Runtimes add a prefix length, which says nothing here: every workload has its
	// address alone.
	bare, _, _ := strings.Cut(strings.TrimSpace(s), "/")
	addr, err := netip.ParseAddr(bare)
	if err != nil {
		return addr, fmt.Errorf("%q is not an IP address", s)
	}
	return addr.Unmap(), nil
}

// requestedIPs returns the addresses that the runtime asks for, if it does: by
// capability, by args, or by CNI_ARGS; at most one of a family.
func requestedIPs(c *Config, a *Args, annotated ...string) ([]string, error) {
	all := append(append(annotated, c.RuntimeConfig.IPs...), c.Args.CNI.IPs...)
	if a.IP != "" {
		// Runtimes of dual stack give both, with a comma between them.
		all = append(all, strings.Split(string(a.IP), ",")...)
	}
	var found []netip.Addr
	for _, s := range all {
		addr, err := requestedIP(s)
		if err != nil {
			return nil, types.NewError(types.ErrInvalidNetworkConfig, "requested address "+err.Error(), "")
		}
		i := slices.IndexFunc(found, func(f netip.Addr) bool { return f.Is4() == addr.Is4() })
		switch {
		case i < 0:
			found = append(found, addr)
		case found[i] != addr:
			return nil, types.NewError(types.ErrInvalidNetworkConfig,
				fmt.Sprintf("addresses %s and %s are requested; a container gets one of a family", found[i], addr), "")
		}
	}
	var out []string
	for _, f := range found {
		out = append(out, f.String())
	}
	return out, nil
}
