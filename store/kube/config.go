package kube

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/kube/convert"
)

// Config says which API to use, and as whom.
type Config struct {
	// Kubeconfig is a file as kubectl's, or several as in $KUBECONFIG. They and the files
	// that they name are read again when they change. Without it and Server this is a pod,
	// and its service account is used, which is read again too.
	Kubeconfig string

	// Context is the context of Kubeconfig; empty: its current one.
	Context string

	// Server and what follows take the place of what Kubeconfig says, as far as they
	// are set.
	Server            string // a URL
	CAFile            string
	CertFile, KeyFile string
	Token             string
	Insecure          bool // the server's certificate is not looked at

	// Servers are further addresses (host:port) of the same cluster's API servers,
	// tried where the configured one cannot be reached. Their certificates have to
	// be for the configured one's name.
	Servers []string

	// ServersFile keeps on disk where the cluster says that its API servers are, for a
	// start at which the configured address does not answer. Empty: nowhere, and the
	// cluster is not asked.
	ServersFile string

	// APIGroup is the group of Calico's custom resources, as CALICO_API_GROUP.
	// Empty: what the cluster has.
	APIGroup string

	// NativeOnly is set where Calico's resources are in another datastore: of this API
	// only Kubernetes' own objects are read.
	NativeOnly bool

	// Namespace is where routerd's own objects are, such as its Leases. Empty: the
	// pod's, or kube-system where this is no pod.
	Namespace string

	// Node is the host whose daemon this is: the handles of addresses that it makes say so
	// ([store.AnnotationHandleNode]). Empty: it is no host's.
	Node string

	// UserAgent names the program to the API server.
	UserAgent string

	// Logger gets what is noticed. Nil: nothing is logged.
	Logger *slog.Logger
}

const (
	dialTimeout  = 3 * time.Second // of one address: another may answer
	greetTimeout = 6 * time.Second // of TLS on that
	// A connection that says nothing is asked for a sign of life after the first,
	// and given up after the second: the host of an API server may vanish without
	// a word.
	pingAfter   = 5 * time.Second
	pingTimeout = 5 * time.Second
)

// namespaceFile is where a pod finds its namespace.
const namespaceFile = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"

func (c Config) namespace() string {
	if c.Namespace != "" {
		return c.Namespace
	}
	if text, err := os.ReadFile(namespaceFile); err == nil && c.Kubeconfig == "" {
		return strings.TrimSpace(string(text))
	}
	return "kube-system"
}

func trimSlash(path string) string {
	for len(path) > 0 && path[len(path)-1] == '/' {
		path = path[:len(path)-1]
	}
	return path
}

func (c Config) inPod() bool { return c.Kubeconfig == "" && c.Server == "" }

func (c Config) restConfig() (*rest.Config, error) {
	if c.inPod() {
		conf, err := rest.InClusterConfig()
		if err != nil {
			return nil, fmt.Errorf("this is no pod with a service account (%w): name a kubeconfig, by datastore.kubernetes.kubeconfig or KUBECONFIG", err)
		}
		return conf, nil
	}
	rules := &clientcmd.ClientConfigLoadingRules{}
	if files := filepath.SplitList(c.Kubeconfig); len(files) > 1 {
		rules.Precedence = files
	} else {
		rules.ExplicitPath = c.Kubeconfig
	}
	over := &clientcmd.ConfigOverrides{CurrentContext: c.Context}
	over.ClusterInfo = clientcmdapi.Cluster{Server: c.Server, CertificateAuthority: c.CAFile, InsecureSkipTLSVerify: c.Insecure}
	over.AuthInfo = clientcmdapi.AuthInfo{ClientCertificate: c.CertFile, ClientKey: c.KeyFile, Token: c.Token}
	return clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, over).ClientConfig()
}

// ConfigFromEnv returns what the variables of Calico's programs say. It reports
// whether they name this datastore at all: DATASTORE_TYPE=kubernetes does.
func ConfigFromEnv(getenv func(string) string) (Config, bool, error) {
	if getenv("DATASTORE_TYPE") != "kubernetes" {
		return Config{}, false, nil
	}
	c, err := FromEnv(getenv)
	return c, err == nil, err
}

// FromEnv is [ConfigFromEnv] where it is known already that this is the datastore.
func FromEnv(getenv func(string) string) (Config, error) {
	c := Config{
		Kubeconfig: getenv("KUBECONFIG"), Context: getenv("K8S_CURRENT_CONTEXT"), Server: getenv("K8S_API_ENDPOINT"),
		CAFile: getenv("K8S_CA_FILE"), CertFile: getenv("K8S_CERT_FILE"), KeyFile: getenv("K8S_KEY_FILE"),
		Token: getenv("K8S_API_TOKEN"), APIGroup: getenv("CALICO_API_GROUP"),
	}
	if text := getenv("K8S_INSECURE_SKIP_TLS_VERIFY"); text != "" {
		var err error
		if c.Insecure, err = strconv.ParseBool(text); err != nil {
			return Config{}, fmt.Errorf("%w: K8S_INSECURE_SKIP_TLS_VERIFY=%q: want true or false", store.ErrInvalid, text)
		}
	}
	if !convert.KnownGroup(c.APIGroup) {
		return Config{}, fmt.Errorf("%w: CALICO_API_GROUP=%q: want crd.projectcalico.org/v1 or projectcalico.org/v3", store.ErrInvalid, c.APIGroup)
	}
	return c, nil
}
