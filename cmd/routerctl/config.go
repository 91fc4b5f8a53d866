package main

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/routerd/routerd/store"
)

// apiConfig is the file in which calicoctl finds the datastore (/etc/calico/calicoctl.cfg): Calico's CalicoAPIConfig.
type apiConfig struct {
	APIVersion string         `json:"apiVersion"`
	Kind       string         `json:"kind"`
	Metadata   map[string]any `json:"metadata,omitempty"`
	Spec       map[string]any `json:"spec"`
}

const kindAPIConfig = "CalicoAPIConfig"

// configFields are the fields of its spec, by the variables of the environment that say the same. Those without one tell
// Calico's own clients how to behave.
func configFields() map[string]string {
	return map[string]string{
		"datastoreType": "DATASTORE_TYPE",
		"etcdEndpoints": "ETCD_ENDPOINTS", "etcdDiscoverySrv": "ETCD_DISCOVERY_SRV", "etcdUsername": "ETCD_USERNAME", "etcdPassword": "ETCD_PASSWORD",
		"etcdKeyFile": "ETCD_KEY_FILE", "etcdCertFile": "ETCD_CERT_FILE", "etcdCACertFile": "ETCD_CA_CERT_FILE",
		"kubeconfig": "KUBECONFIG", "k8sAPIEndpoint": "K8S_API_ENDPOINT", "k8sKeyFile": "K8S_KEY_FILE", "k8sCertFile": "K8S_CERT_FILE", "k8sCAFile": "K8S_CA_FILE",
		"k8sAPIToken": "K8S_API_TOKEN", "k8sInsecureSkipTLSVerify": "K8S_INSECURE_SKIP_TLS_VERIFY", "k8sCurrentContext": "K8S_CURRENT_CONTEXT", "calicoAPIGroup": "CALICO_API_GROUP",
		"k8sDisableNodePoll": "", "usePodCIDR": "", "k8sClientQPS": "",
	}
}

// settings returns what says where the datastore is: the file of --config alone, as for calicoctl, or the environment;
// --context goes before both.
func (a *daemon) settings() (func(string) string, error) {
	getenv := a.getenv
	switch {
	case a.plugin && a.config == "":
		getenv = a.kubectlSettings()
	case a.config != "":
		var err error
		if getenv, err = readAPIConfig(a.config, getenv("HOME")); err != nil {
			return nil, fmt.Errorf("--config: %w", err)
		}
	}
	if a.kubeContext == "" {
		return getenv, nil
	}
	return func(name string) string {
		if name == "K8S_CURRENT_CONTEXT" {
			return a.kubeContext
		}
		return getenv(name)
	}, nil
}

// readAPIConfig returns what a CalicoAPIConfig says, as an environment.
func readAPIConfig(file, home string) (func(string) string, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var c apiConfig
	if err := yaml.UnmarshalStrict(b, &c); err != nil {
		return nil, fmt.Errorf("%w: %s: %w", store.ErrInvalid, file, err)
	}
	if c.APIVersion != store.APIVersion || c.Kind != kindAPIConfig {
		return nil, fmt.Errorf("%w: %s is %s %s: want %s %s", store.ErrInvalid, file, c.APIVersion, c.Kind, store.APIVersion, kindAPIConfig)
	}
	env := map[string]string{}
	var errs []error
	for _, field := range slices.Sorted(maps.Keys(c.Spec)) {
		value, err := configValue(field, c.Spec[field])
		errs = append(errs, err)
		env[configFields()[field]] = value
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("%w: %s: %w", store.ErrInvalid, file, err)
	}
	// As Calico's clients guess it.
	etcd := env["ETCD_ENDPOINTS"] != "" || env["ETCD_DISCOVERY_SRV"] != ""
	switch {
	case env["DATASTORE_TYPE"] == "" && etcd:
		env["DATASTORE_TYPE"] = "etcdv3"
	case env["DATASTORE_TYPE"] == "":
		env["DATASTORE_TYPE"] = "kubernetes"
	case env["DATASTORE_TYPE"] == "etcdv3" && !etcd:
		return nil, fmt.Errorf("%w: %s: spec.etcdEndpoints: required: the addresses of etcd", store.ErrInvalid, file)
	}
	if env["DATASTORE_TYPE"] == "kubernetes" && env["KUBECONFIG"] == "" && env["K8S_API_ENDPOINT"] == "" {
		env["KUBECONFIG"] = usualKubeconfig(home)
	}
	return func(name string) string { return env[name] }, nil
}

// configValue returns the value of a field as the environment has it.
func configValue(field string, value any) (string, error) {
	switch field {
	case "etcdKey", "etcdCert", "etcdCACert":
		return "", fmt.Errorf("spec.%s: is not supported: write it to a file, and name the file in spec.%[1]sFile", field)
	case "kubeconfigInline":
		return "", fmt.Errorf("spec.%s: is not supported: write it to a file, and name the file in spec.kubeconfig", field)
	}
	if _, ok := configFields()[field]; !ok {
		return "", fmt.Errorf("spec.%s: unknown field; there are %s", field, strings.Join(slices.Sorted(maps.Keys(configFields())), ", "))
	}
	switch v := value.(type) {
	case string:
		return v, nil
	case bool:
		return strconv.FormatBool(v), nil
	case float64:
		return strconv.FormatFloat(v, 'g', -1, 64), nil
	case nil:
		return "", nil
	}
	return "", fmt.Errorf("spec.%s: %v: want one value", field, value)
}
